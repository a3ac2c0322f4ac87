"""Removes what dead runs left behind: their processes and their directories in /dev/shm. Never touches a live run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from msgspec import Struct

from common.processes import ProcessEntry, is_alive, registered
from common.run_files import SHM_PREFIX, SHM_ROOT, SharedDirectory
from common.run_lock import RunLock, run_name, supervisor

KILL_WAIT_S = 10.0
"""Longest wait for killed processes to be gone; one that holds a GPU takes seconds."""


class Removed(Struct, frozen=True):
    """What was left of one dead run."""

    run: str
    path: str
    killed: list[ProcessEntry]
    freed_bytes: int


def shared_directories() -> list[SharedDirectory]:
    """The shared directories of all runs of this user, dead or live, by name."""
    found: list[Path] = []
    with os.scandir(SHM_ROOT) as entries:
        for entry in entries:
            if not entry.name.startswith(SHM_PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            try:
                owner = entry.stat(follow_symlinks=False).st_uid
            except FileNotFoundError:  # its run ended just now
                continue
            if owner == os.geteuid():
                found.append(Path(entry.path))
    return [SharedDirectory(path) for path in sorted(found)]


def clean(run: str | None = None) -> list[Removed]:
    """Cleans up after every dead run of this user, or after the named one; returns what there was to remove."""
    wanted = [shared for shared in shared_directories() if run in (None, run_name(shared))]
    removed = [_clean_one(shared) for shared in wanted]
    return [entry for entry in removed if entry is not None]


def _clean_one(shared: SharedDirectory) -> Removed | None:
    if supervisor(shared) not in (None, os.getpid()):  # its coordinator was killed and is about to be started again
        return None
    lock = RunLock.take_dead(shared)
    if lock is None:
        return None
    try:
        killed = kill(registered(shared.processes))
        freed = lock.remove_directory()
    finally:
        lock.release()
    return Removed(run_name(shared), str(shared.path), killed, freed)


def kill(entries: list[ProcessEntry]) -> list[ProcessEntry]:
    """Kills those of the processes that still run, waits until they are gone, and returns them."""
    killed: list[ProcessEntry] = []
    descriptors: list[int] = []
    try:
        for entry in entries:
            descriptor = _open(entry)
            if descriptor is None:
                continue
            descriptors.append(descriptor)
            with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                killed.append(entry)
        _wait(descriptors, time.monotonic() + KILL_WAIT_S)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return killed


def _open(entry: ProcessEntry) -> int | None:
    """A pidfd of the entry's very process; None if it is gone. What a pidfd names cannot change afterwards."""
    if entry.pid == os.getpid():
        return None
    try:
        descriptor = os.pidfd_open(entry.pid)
    except ProcessLookupError:
        return None
    if is_alive(entry):
        return descriptor
    os.close(descriptor)
    return None


def _wait(descriptors: list[int], deadline: float) -> None:
    for descriptor in descriptors:
        left = max(0.0, deadline - time.monotonic())
        select.select([descriptor], [], [], left)
