"""Facts about processes: who is alive, who is the same, and who dies with whom (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from msgspec import Struct, json

from common.run_files import naming, private

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class ProcessEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One process of a run, as written into the run's process list."""

    service: str
    replica: int
    pid: int
    start: int


def pid_space() -> str:
    """Names the set of processes in which this process's pids count: a container may have its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; with the pid it identifies a process. 0 if there is none."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] in ("Z", "X") else int(fields[19])


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat (proc(5)) from the third, the state, on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_alive(entry: ProcessEntry) -> bool:
    """Whether this very process, not a later one with its pid, still runs."""
    return entry.start != 0 and process_start(entry.pid) == entry.start


def die_with_parent(parent: int, sig: signal.Signals = signal.SIGTERM) -> None:
    """Has the kernel send ``sig`` to this process when its parent dies; raises SystemExit if it is dead already."""
    _prctl(PR_SET_PDEATHSIG, int(sig))
    if os.getppid() != parent:
        raise SystemExit(f"parent process {parent} is gone")


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies, so that it can end what they leave."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def children() -> dict[int, list[int]]:
    """The children of every process that has any; zombies included."""
    found: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := _stat(pid):
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on, in any session; zombies included."""
    tree = children()
    found = list(tree.get(pid, []))
    for child in found:  # grows while it is walked
        found += tree.get(child, [])
    return found


def register(directory: Path, service: str, replica: int, pid: int | None = None) -> ProcessEntry:
    """Writes a process (default: this one) into the run's process list, so that ``quartet clean`` finds it.

    Raises OSError, naming the file, where there is no memory for it.
    """
    pid = os.getpid() if pid is None else pid
    entry = ProcessEntry(service, replica, pid, process_start(pid))
    directory.mkdir(mode=0o700, exist_ok=True)
    path = entry_path(directory, service, replica, pid)
    try:
        with open(path, "wb", opener=private) as file:
            file.write(json.encode(entry))
    except OSError as error:
        raise naming(path, error) from error
    return entry


def unregister(directory: Path, service: str, replica: int, pid: int) -> None:
    """Takes a process that has ended off the run's list, if it is there."""
    entry_path(directory, service, replica, pid).unlink(missing_ok=True)


def entry_path(directory: Path, service: str, replica: int, pid: int) -> Path:
    return directory / f"{service}-{replica}-{pid}.json"


def registered(directory: Path) -> list[ProcessEntry]:
    """The run's process list. A file that was being written when its writer died is ignored: its pid is not known."""
    entries: list[ProcessEntry] = []
    for path in sorted(directory.glob("*.json")):
        data = path.read_bytes()
        if data.endswith(b"}"):
            entries.append(json.decode(data, type=ProcessEntry))
    return entries
