"""The lock that makes a run live: held by its coordinator, probed by ``quartet up``, taken by ``quartet clean``.

The lock is a ``flock`` on a file inside the run's shared directory. The kernel drops it when its holder dies, whatever
it dies of, so a directory whose lock nobody holds belongs to a dead run. Removing such a directory takes the lock first
and unlinks the lock file last; whoever gets a lock then checks that the path still names the file that was locked.

Between a coordinator that was killed and its successor nobody holds the lock: then the supervisor, which has written
itself down beside it, keeps the run from being taken for dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import json

from common.processes import ProcessEntry, is_alive, process_start
from common.records import write_whole
from common.run_files import SHM_PREFIX, SharedDirectory, naming

SETTLE_S = 5.0
"""Longest wait for a lock whose recorded holder is not alive: a cleaner or a probe that is about to let go."""
RETRY_S = 0.02
"""Interval of tries: a flock can be waited for, but not up to a deadline, so it is polled until one."""


class RunLocked(Exception):
    """The run is live: another process holds its lock. ``pid`` is 0 where the holder has not written it."""

    def __init__(self, run: str, pid: int) -> None:
        super().__init__(
            f"run '{run}' is live: process {pid or '(unknown)'} coordinates it. "
            "Choose another --name, or stop that run first"
        )
        self.run = run
        self.pid = pid


class RunLock:
    """An exclusive lock on a run, held until ``release``, ``remove_directory`` or the end of this process.

    The descriptor is not inherited through exec; a child that is forked without exec would hold the lock too.
    """

    def __init__(self, shared: SharedDirectory, descriptor: int) -> None:
        self.shared = shared
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, shared: SharedDirectory) -> RunLock:
        """Creates the run's shared directory (mode 0700) if it is missing and locks it.

        Raises RunLocked if another process holds it, PermissionError if the directory belongs to another user, and
        OSError where there is no memory for it; nothing is left then.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            with contextlib.suppress(FileExistsError):  # exist_ok would look at what a cleaner may remove
                shared.path.mkdir(mode=0o700)
            _require_own(shared)
            lock = cls._try(shared)
            if lock is not None:
                lock._record_holder()
                return lock
            pid, alive = _recorded_holder(shared)
            if alive or time.monotonic() > deadline:
                raise RunLocked(run_name(shared), pid)
            time.sleep(RETRY_S)  # the interval of a poll with a deadline

    @classmethod
    def take_dead(cls, shared: SharedDirectory) -> RunLock | None:
        """Locks an existing directory in order to remove it; None if it is live or gone. Records no holder."""
        return cls._try(shared)

    @classmethod
    def _try(cls, shared: SharedDirectory) -> RunLock | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(shared.lock, flags, 0o600)
        except FileNotFoundError:  # the directory was removed by a cleaner
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(shared.lock)):
                return cls(shared, descriptor)
        except (BlockingIOError, FileNotFoundError):
            pass  # held by another, or unlinked by a cleaner between open and flock: this lock would guard nothing
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _record_holder(self) -> None:
        os.ftruncate(self._descriptor, 0)
        try:
            os.pwrite(self._descriptor, f"{os.getpid()} {process_start(os.getpid())}".encode(), 0)
        except OSError as error:
            self.remove_directory()
            raise naming(self.shared.lock, error) from error

    def release(self) -> None:
        """Lets go of the lock and leaves the directory as it is."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)  # a living process that has let go is not the holder
            os.close(self._descriptor)
            self._descriptor = -1

    def clear_directory(self) -> int:
        """Removes everything of the run in memory but the lock, which stays held, and the note of a living supervisor.

        Returns the bytes that were freed.
        """
        supervised = [] if supervisor(self.shared) is None else [_supervisor_file(self.shared)]
        return self._clear([self.shared.lock, *supervised])

    def _clear(self, kept: Sequence[Path]) -> int:
        if not self.guards_directory():
            return 0
        freed = 0
        for entry in list(os.scandir(self.shared.path)):
            if Path(entry.path) in kept:
                continue
            freed += _allocated(entry.path)
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        return freed

    def remove_directory(self) -> int:
        """Removes everything of the run in memory, the lock file last, and lets go. Returns the bytes freed."""
        if not self.guards_directory():
            self.release()
            return 0
        freed = self._clear([self.shared.lock])
        os.unlink(self.shared.lock)
        try:
            self.shared.path.rmdir()
        except OSError:  # a new coordinator has put its lock file there already: the directory is its own now
            if not self.shared.path.is_dir():
                raise
        self.release()
        return freed

    def guards_directory(self) -> bool:
        """Not after somebody deleted the directory by hand: what has its name by now is another run's."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.shared.lock))
        except FileNotFoundError:
            return False


def run_name(shared: SharedDirectory) -> str:
    return shared.path.name.removeprefix(SHM_PREFIX)


def holder(shared: SharedDirectory) -> int | None:
    """Process id of the coordinator that holds the run's lock; None if nobody does."""
    deadline = time.monotonic() + SETTLE_S
    while is_locked(shared.lock):
        pid, alive = _recorded_holder(shared)
        if alive or time.monotonic() > deadline:
            return pid
        time.sleep(RETRY_S)  # the interval of a poll with a deadline
    return None


def record_supervisor(shared: SharedDirectory) -> None:
    """Writes this process down as the one that starts the run's coordinator again."""
    entry = ProcessEntry("supervisor", 0, os.getpid(), process_start(os.getpid()))
    write_whole(_supervisor_file(shared), json.encode(entry))


def supervisor(shared: SharedDirectory) -> int | None:
    """Process id of the living supervisor of the run, coordinator or no coordinator; None if there is none."""
    try:
        entry = json.decode(_supervisor_file(shared).read_bytes(), type=ProcessEntry)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return entry.pid if is_alive(entry) else None


def is_held_by(shared: SharedDirectory, pid: int) -> bool:
    """Whether this process holds the run's lock. Does not wait."""
    return _recorded_holder(shared) == (pid, True) and is_locked(shared.lock)


def _supervisor_file(shared: SharedDirectory) -> Path:
    return shared.path / "supervisor.json"


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock (flock) on this file; False where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two probes do not take each other for a holder
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _recorded_holder(shared: SharedDirectory) -> tuple[int, bool]:
    """The process that last wrote itself into the lock file, and whether that very process still runs."""
    try:
        pid, _, start = shared.lock.read_text().partition(" ")
    except FileNotFoundError:
        return 0, False
    if not (pid.isdigit() and start.isdigit()):
        return 0, False
    return int(pid), is_alive(ProcessEntry("coordinator", 0, int(pid), int(start)))


def _require_own(shared: SharedDirectory) -> None:
    try:
        found = os.lstat(shared.path)
    except FileNotFoundError:  # removed by a cleaner: the next try makes it again
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{shared.path} is not a directory of this user: choose another run.name, or remove it")


def _allocated(path: str) -> int:
    """Bytes of memory that a file or folder takes; the token cache is sparse."""
    total = os.lstat(path).st_blocks * 512
    if os.path.isdir(path) and not os.path.islink(path):
        total += sum(_allocated(entry.path) for entry in os.scandir(path))
    return total
