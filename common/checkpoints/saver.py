"""Saving in the background: the service waits for the copy alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from common.checkpoints.files import CheckpointError
from common.checkpoints.staging import Staging
from common.checkpoints.writer import Written, write_state

log = logging.getLogger("checkpoints")

Report = Callable[[Written | CheckpointError], None]
"""Told once, in the writing thread, how a save ended."""


class StateSaver:
    """One copy and one writing thread at a time: a save waits until the one before it is on disk, or has failed."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._doing = ""

    def prepare(self, nbytes: int, device: torch.device) -> None:
        """Begins to take pinned memory for a state of so many bytes on a GPU, in the background."""
        self._start(f"memory for a state of {nbytes} bytes", lambda: self._staging.prepare(nbytes, device))

    def save(
        self, target: Path, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int], report: Report
    ) -> float:
        """Copies, and writes the copy to ``target`` in the background. Returns the seconds until it was copied.

        Raises CheckpointError if the save before it has not ended within the limit.
        """
        started = time.monotonic()
        if not self.wait(self.wait_s):
            raise CheckpointError(
                f"{target}: {self._doing} has not ended within {self.wait_s:.0f} s, so nothing more is saved: is the "
                "disk too slow for checkpoint.snapshot_every?"
            )
        copies, fixed = self._staging.copy(tensors), dict(counters)
        self._start(f"the saving of {target}", lambda: report(_write(target, copies, fixed)))
        return time.monotonic() - started

    def wait(self, limit_s: float) -> bool:
        """Waits until nothing is written any more; False at the limit."""
        if self._thread is None:
            return True
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def close(self, limit_s: float) -> None:
        """Waits for what is being written, and gives it up at the limit: its directory then has no name yet."""
        if not self.wait(limit_s):
            log.warning("%s is given up: it has not ended within %.0f s", self._doing, limit_s)

    def _start(self, doing: str, work: Callable[[], None]) -> None:
        self._doing = doing
        # A daemon: a process that ends does not wait for a disk.
        self._thread = threading.Thread(target=work, name="checkpoints", daemon=True)
        self._thread.start()


def _write(target: Path, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, int]) -> Written | CheckpointError:
    try:
        return write_state(target, tensors, counters)
    except CheckpointError as error:
        log.error("%s", error)
        return error
