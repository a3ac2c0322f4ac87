"""``quartet doctor --meet``: several doctors, each in its own container, write into each other's memory.

That is what shared weights rest on: on a GPU by CUDA IPC, on a CPU by a file in /dev/shm. They find each other in a
folder there. A word is a file, renamed into place when it is whole, and removed by whom it is for:

    A.here           A takes part; touched while it does
    A.to.B.offer     memory of A, and what B is to write into it
    B.to.A.written   it has been written, or why it could not be
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from common.messages import CudaHandle
from common.run_files import SHM_ROOT
from tools.doctor.finding import Finding, error, ok
from tools.doctor.memory import Buffer, FileBuffer, GpuBuffer, fill

POLL_S = 0.05
LIVE_S = 60.0
"""Who has not touched its file for so long is dead; others have their GPUs to look at before they meet."""
SETTLE_S = 3.0
"""Time for one more to come after everybody has met everybody."""
HERE, OFFER, WRITTEN = "here", "offer", "written"

T = TypeVar("T", bound=Struct)


class Offer(Struct, frozen=True):
    """``value`` is to be written into every byte of the memory that is given, by a handle or as a file."""

    value: int
    cuda: CudaHandle | None = None
    file: str = ""


class Written(Struct, frozen=True):
    problem: str = ""


class Meeting:
    """One of those who meet."""

    def __init__(self, gpu: bool, name: str = "", folder: Path | None = None) -> None:
        self.gpu = gpu
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.folder = folder or SHM_ROOT / f".quartet-doctor-{os.geteuid()}"
        self.buffers: dict[str, Buffer] = {}
        self.served: set[str] = set()
        self.found: dict[str, Finding] = {}
        self.newest = time.monotonic()

    def __enter__(self) -> Meeting:
        """From now on the others wait for this one."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not self.others():
            self._clear()
        self._path(self.name, HERE).touch()
        return self

    def __exit__(self, *_: object) -> None:
        """Its own files go, but for the answers that others still wait for."""
        for path in self.folder.glob(f"{self.name}.*"):
            if not path.name.endswith(f".{WRITTEN}"):
                path.unlink(missing_ok=True)

    def hold(self, seconds: float) -> list[Finding]:
        """Meets whoever comes, for at most so long. A finding for each of them, or one that says that nobody came."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._complete():
            self._path(self.name, HERE).touch()
            self._offer_memory()
            self._write_where_offered()
            self._read_answers()
            time.sleep(POLL_S)
        silent = [other for other in self.buffers if other not in self.found]
        return [*self.found.values(), *map(_silent, silent)] or [_nobody(seconds)]

    def others(self) -> list[str]:
        """Who takes part now, and has been heard of lately."""
        names: list[str] = []
        for path in self.folder.glob(f"*.{HERE}"):
            try:
                fresh = time.time() - path.stat().st_mtime < LIVE_S
            except FileNotFoundError:
                continue
            if fresh and path.stem != self.name:
                names.append(path.stem)
        return names

    def _complete(self) -> bool:
        met = self.served & self.found.keys()
        return bool(met) and met >= {*self.others(), *self.buffers} and time.monotonic() - self.newest > SETTLE_S

    # ------------------------------------------------------------ the words

    def _offer_memory(self) -> None:
        for other in self.others():
            if other in self.buffers:
                continue
            self.newest = time.monotonic()
            value = 1 + len(self.buffers) % 255
            memory = self._path(f"{self.name}.to.{other}", "memory")
            buffer = GpuBuffer(value) if self.gpu else FileBuffer(memory, value)
            self.buffers[other] = buffer
            self._say(other, OFFER, Offer(value, buffer.handle(), str(buffer.path or "")))

    def _write_where_offered(self) -> None:
        for other, offer in self._heard(OFFER, Offer):
            self._say(other, WRITTEN, Written(fill(offer.cuda, offer.file, offer.value)))
            self.served.add(other)

    def _read_answers(self) -> None:
        for other, answer in self._heard(WRITTEN, Written):
            buffer = self.buffers.get(other)
            if buffer is None:
                continue
            problem = answer.problem or ("" if buffer.arrived() else "what it wrote did not arrive")
            self.found[other] = _broken(other, problem) if problem else ok(f"memory with {other}", buffer.kind)

    def _path(self, stem: str, kind: str) -> Path:
        return self.folder / f"{stem}.{kind}"

    def _say(self, other: str, kind: str, word: Struct) -> None:
        path = self._path(f"{self.name}.to.{other}", kind)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(msgspec.json.encode(word))
        unfinished.rename(path)

    def _heard(self, kind: str, shape: type[T]) -> list[tuple[str, T]]:
        heard: list[tuple[str, T]] = []
        for path in self.folder.glob(f"*.to.{self.name}.{kind}"):
            heard.append((path.name.split(".to.")[0], msgspec.json.decode(path.read_bytes(), type=shape)))
            path.unlink()
        return heard

    def _clear(self) -> None:
        """What those have left who died here."""
        for path in self.folder.iterdir():
            if time.time() - path.stat().st_mtime > LIVE_S:
                path.unlink(missing_ok=True)


def _broken(other: str, problem: str) -> Finding:
    return error(
        f"memory with {other}", problem, "weights are shared between the services by such memory",
        "ipc, pid and the GPUs' reservation as in compose.yaml; a whole GPU instead of a part (MIG)",
    )  # fmt: skip


def _silent(other: str) -> Finding:
    return _broken(other, "it did not answer in time")


def _nobody(seconds: float) -> Finding:
    return error(
        "memory", f"nobody else came within {seconds:g} s", "memory is tried between two containers at least",
        "`quartet doctor --meet 60` in several at once; ipc: \"service:pause\" in each, so that they see one /dev/shm",
    )  # fmt: skip
