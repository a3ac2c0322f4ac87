"""Facts about processes: who is alive, who is the same, and who dies with whom (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from msgspec import Struct, json

from common.run_files import naming

PR_SET_PDEATHSIG = 1


class ProcessEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One process of a run, as written into the run's process list."""

    service: str
    replica: int
    pid: int
    start: int


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; with the pid it identifies a process. 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(entry: ProcessEntry) -> bool:
    """Whether this very process, not a later one with its pid, still runs."""
    return entry.start != 0 and process_start(entry.pid) == entry.start


def die_with_parent(parent: int, sig: signal.Signals = signal.SIGTERM) -> None:
    """Has the kernel send ``sig`` to this process when its parent dies; raises SystemExit if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit(f"parent process {parent} is gone")


def register(directory: Path, service: str, replica: int, pid: int | None = None) -> ProcessEntry:
    """Writes a process (default: this one) into the run's process list, so that ``quartet clean`` finds it.

    Raises OSError, naming the file, where there is no memory for it.
    """
    pid = os.getpid() if pid is None else pid
    entry = ProcessEntry(service, replica, pid, process_start(pid))
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"{service}-{replica}-{pid}.json"
    try:
        path.write_bytes(json.encode(entry))
    except OSError as error:
        raise naming(path, error) from error
    return entry


def registered(directory: Path) -> list[ProcessEntry]:
    """The run's process list. A file that was being written when its writer died is ignored: its pid is not known."""
    entries: list[ProcessEntry] = []
    for path in sorted(directory.glob("*.json")):
        data = path.read_bytes()
        if data.endswith(b"}"):
            entries.append(json.decode(data, type=ProcessEntry))
    return entries
