"""The thread in which vLLM's asyncio client lives, and the log of the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

LAST_BYTES = 65_536
LAST_LINES = 8
LAST_ERRORS = 4
ERROR = re.compile(r"\b\w*(Error|Exception|Signal)\b: ")


class LoopThread:
    """An event loop in a thread of its own. The thread lives as long as this process, as the engine's parent must."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(job, self.loop)

    def run(self, job: Coroutine[Any, Any, Result], within: float) -> Result:
        """Runs a job to its end. Raises TimeoutError at the deadline, the job then being cancelled."""
        future = self.start(job)
        try:
            return future.result(within)
        except TimeoutError:
            future.cancel()
            raise

    def when_ended(self, pid: int, then: Callable[[], None]) -> None:
        """Has the loop call ``then`` once, when a process ends."""
        descriptor = os.pidfd_open(pid)

        def ended() -> None:
            self.loop.remove_reader(descriptor)
            os.close(descriptor)
            then()

        self.loop.call_soon_threadsafe(self.loop.add_reader, descriptor, ended)


@contextlib.contextmanager
def output_into(path: Path) -> Generator[None]:
    """Has processes that are started meanwhile write their output into a file, crashes of native code included.

    This process's own logging goes on where it went before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
    streams = [handler.setStream(os.fdopen(os.dup(2), "w", buffering=1)) for handler in handlers]
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for handler, stream in zip(handlers, streams, strict=True):
            if (own := handler.setStream(stream)) is not None:
                own.close()
        for descriptor in (file, *saved):
            os.close(descriptor)


def last_lines(path: Path) -> str:
    """The end of a log for an error message, after the last errors before it: vLLM's end seldom names the cause."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LAST_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    before, tail = lines[:-LAST_LINES], lines[-LAST_LINES:]
    causes = list(dict.fromkeys(line for line in before if ERROR.search(line)))
    return "\n".join([*causes[-LAST_ERRORS:], *tail])
