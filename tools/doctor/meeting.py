"""``quartet doctor --meet``: several doctors, each in its own container, write into each other's memory.

That is what shared weights rest on: on a GPU by CUDA IPC, on a CPU by a file in /dev/shm. They find each other in a
folder there, of which nobody but their user has a part (``folder.py``, which also tells who is alive):

    A.here           A takes part, and holds a lock on this file while it does
    A.to.B.offer     what B is to write into memory of A; on a CPU that is the file A.to.B.memory
    B.to.A.written   it has been written, or why it could not be

A word is a file, renamed into place when it is whole, and removed by whom it is for.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from common.run_files import SHM_ROOT
from common.service import ReplicaError
from tools.doctor.finding import Finding, error, ok
from tools.doctor.folder import MEMORY, OFFER, WRITTEN, Folder
from tools.doctor.memory import Buffer, FileBuffer, GpuBuffer, Offer, fill, missing

POLL_S = 0.05
SETTLE_S = 3.0
"""Time for one more to come after everybody has met everybody."""

T = TypeVar("T", bound=Struct)


class Written(Struct, frozen=True):
    problem: str = ""


class Meeting:
    """One of those who meet. To enter raises CannotMeet."""

    def __init__(self, gpu: bool, name: str = "", folder: Path | None = None) -> None:
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
        self.gpu = gpu
        self.name = name or f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
        self.folder = Folder(folder or SHM_ROOT / f".quartet-doctor-{os.geteuid()}")
        self.buffers: dict[str, Buffer] = {}
        self.served: set[str] = set()
        self.found: dict[str, Finding] = {}
        self.newest = time.monotonic()

    def __enter__(self) -> Meeting:
        """From now on the others wait for this one."""
        self.folder.enter(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.leave()

    def hold(self, seconds: float) -> list[Finding]:
        """Meets whoever comes, for at most so long. A finding for each of them, or one that says that nobody came.

        Ends at once, with a finding of its own, where this one has no memory to lend.
        """
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and not self._complete():
                self._offer_memory()
                self._write_where_offered()
                self._read_answers()
                time.sleep(POLL_S)
        except (OSError, ReplicaError) as refused:
            return [*self.found.values(), _refused(str(refused))]
        silent = [other for other in self.buffers if other not in self.found]
        return [*self.found.values(), *map(_silent, silent)] or [_nobody(seconds)]

    def _complete(self) -> bool:
        """Whoever is there has been met, and whoever has gone is found to be: nothing is to be waited for."""
        waited_for = {*self.folder.others(), *self.buffers}
        met = self.found.keys() - (self.folder.others() - self.served)
        return bool(self.found) and met >= waited_for and time.monotonic() - self.newest > SETTLE_S

    # ------------------------------------------------------------ the words

    def _offer_memory(self) -> None:
        """To those who have come. Raises OSError or DeviceError where there is no memory for it."""
        for other in sorted(self.folder.others() - self.buffers.keys()):
            self.newest = time.monotonic()
            value = 1 + len(self.buffers) % 255
            memory = self.folder.path(self.name, MEMORY, other)
            self.buffers[other] = buffer = GpuBuffer(value) if self.gpu else FileBuffer(memory, value)
            self._say(other, OFFER, Offer(value, buffer.handle))

    def _write_where_offered(self) -> None:
        for other, offer in self._heard(OFFER, Offer):
            self._say(other, WRITTEN, Written(fill(offer, self.folder.path(other, MEMORY, self.name))))
            self.served.add(other)

    def _read_answers(self) -> None:
        gone = self.buffers.keys() - self.folder.others()  # looked at first: their last words come before they go
        for other, answer in self._heard(WRITTEN, Written):
            if buffer := self.buffers.get(other):
                problem = answer.problem or missing(buffer)
                self.found[other] = _broken(other, problem) if problem else ok(f"memory with {other}", buffer.kind)
        for other in gone - self.found.keys():
            self.found[other] = _broken(other, "it went before it answered: it has died, or says itself why")

    def _say(self, other: str, kind: str, word: Struct) -> None:
        self.folder.write(self.folder.path(self.name, kind, other), msgspec.json.encode(word))

    def _heard(self, kind: str, shape: type[T]) -> list[tuple[str, T]]:
        """The words for this one. What cannot be read, of a doctor of another version, is a finding."""
        heard: list[tuple[str, T]] = []
        for other, content in self.folder.take(kind, self.name):
            try:
                heard.append((other, msgspec.json.decode(content, type=shape)))
            except msgspec.DecodeError as problem:
                self.found[other] = _broken(other, f"its word cannot be read, is it another version? {problem}")
                self.served.add(other)
        return heard


def _broken(other: str, problem: str) -> Finding:
    return error(
        f"memory with {other}", problem, "weights are shared between the services by such memory",
        "ipc, pid and the GPUs' reservation as in compose.yaml; a whole GPU instead of a part (MIG)",
    )  # fmt: skip


def _silent(other: str) -> Finding:
    return _broken(other, "it did not answer in time")


def _refused(problem: str) -> Finding:
    return error(
        "memory", f"this doctor has left the meeting: {problem}", "the others write into memory that it lends",
        "what is said there; memory that others use up; no expandable segments in this container",
    )  # fmt: skip


def _nobody(seconds: float) -> Finding:
    return error(
        "memory", f"nobody else came within {seconds:g} s", "memory is tried between two containers at least",
        "`quartet doctor --meet 60` in several at once; ipc: \"service:pause\" in each, so that they see one /dev/shm",
    )  # fmt: skip
