"""The processes that a supervisor has started, what they left behind, and what is said of the dead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from common import processes
from tools.display import ServiceLine
from tools.launch import OWNER, ServiceSpec
from tools.starter import UNKNOWN

TAIL_LINES = 20
TAIL_BYTES = 16384
DYING_S = 1.0
ORPHANS_S = 5.0
"""Longest wait for what services left behind, after SIGKILL."""
ORPHANS_POLL_S = 0.02


@dataclass(eq=False)
class Child:
    """A started service. ``code`` is its exit code, negative for a signal, None while it runs."""

    spec: ServiceSpec
    pid: int
    pidfd: int
    log: Path
    gone: asyncio.Future[None]
    code: int | None = None

    @property
    def fate(self) -> str:
        if self.code is None:
            return "running"
        if self.code == UNKNOWN:
            return "ended with a code that is not known"
        return f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with code {self.code}"

    @property
    def described(self) -> str:
        return f"{self.spec.name} (process {self.pid}) {self.fate}"

    @property
    def line(self) -> ServiceLine:
        """For the display."""
        return ServiceLine(self.spec.service, self.spec.replica, self.pid, None if self.code is None else self.fate)

    def send(self, sig: signal.Signals) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, sig)

    def dying(self) -> bool:
        """Whether its main thread is dead; waits for its other threads, with the last of which the pidfd fires."""
        started = processes.process_start(self.pid)
        return started == 0 and bool(select.select([self.pidfd], [], [], DYING_S)[0])

    def obituary(self, why: str = "") -> str:
        when = " before the coordinator said stop" if self.code == 0 else ""
        lines = [f"    {line}" for line in tail(self.log)] or ["    (nothing)"]
        return "\n".join([f"{self.described}{when}{why}. Last lines of {self.log}:", *lines])


def head_log(log: Path, name: str, before: Child | None) -> None:
    """Says in the log of a service's earlier lives that another begins."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        if file.tell():
            why = f"started again after process {before.pid}, {before.fate}" if before else "resumed"
            file.write(f"---- {name} {why} ----\n".encode())


def orphans(parents: Collection[int], known: Collection[int], living: Collection[str]) -> list[int]:
    """Running processes that dead services left behind: adopted by ``parents``, with all that they started themselves.

    ``known`` are not among them, nor is what says by its environment that a living service has started it: a reward
    function may keep a helper whose parent ends.
    """
    tree = processes.children()
    roots = [pid for parent in parents for pid in tree.get(parent, []) if pid not in known]
    found = [pid for pid in roots if not living or owner(pid) not in living]
    for pid in found:  # grows while it is walked
        found += tree.get(pid, [])
    return [pid for pid in found if processes.process_start(pid)]


async def end_orphans(find: Callable[[], list[int]]) -> list[int]:
    """Kills what ``find`` finds until there is none; returns what is left at the deadline."""
    deadline = time.monotonic() + ORPHANS_S
    while (left := find()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(ORPHANS_POLL_S)
    return left


def owner(pid: int) -> str:
    """The service that a process says it was started by; empty if it says nothing."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    mark = f"{OWNER}=".encode()
    return next((os.fsdecode(variable.removeprefix(mark)) for variable in variables if variable.startswith(mark)), "")


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, without reading all of it."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-lines:]
