"""The folder in /dev/shm where doctors meet: whose it is, who is there, and what the dead have left.

/dev/shm is open to all, also to the user under which a run's scorers execute foreign code, so what lies there under the
folder's name may be anybody's: it must be a directory of this user alone. A doctor that takes part holds a lock on its
file ``A.here``, which the kernel drops when it dies: what it has written is then removed by whoever finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from common.run_files import naming
from common.run_lock import is_locked
from tools.doctor.finding import Finding, error

HERE, OFFER, MEMORY, WRITTEN, UNFINISHED = "here", "offer", "memory", "written", "unfinished"
JOIN_S = 5.0
"""Longest wait for the lock on a file that is one's own, and that others only look at."""
RETRY_S = 0.01
_NAME = r"[A-Za-z0-9_-]{1,100}"
_FILE = re.compile(rf"({_NAME})(?:\.to\.({_NAME}))?\.({HERE}|{OFFER}|{MEMORY}|{WRITTEN}|{UNFINISHED})")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class CannotMeet(Exception):
    """The folder is not to be trusted, or cannot be used."""

    def __init__(self, folder: Path, problem: str) -> None:
        super().__init__(f"{folder}: {problem}")
        self.finding: Finding = error(
            str(folder), problem, "doctors meet there, and others must have no part in it",
            "remove it as its owner, or as root",
        )  # fmt: skip


class Folder:
    """Files ``<who>[.to.<whom>].<kind>``; whatever bears another name is left alone."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.name = ""
        self._lock = -1

    def enter(self, name: str) -> None:
        """Makes the folder where it is missing, clears it of the dead, and takes part. Raises CannotMeet."""
        if re.fullmatch(_NAME, name) is None:
            raise CannotMeet(self.place, f"{name!r} is no name: letters, digits, - and _, at most 100")
        try:
            with contextlib.suppress(FileExistsError):
                self.place.mkdir(mode=0o700)
            self._require_own()
            self.clear()
            self._take_part(name)
        except OSError as problem:
            raise CannotMeet(self.place, str(problem)) from problem

    def leave(self) -> None:
        """Its own files go, and with them what others have left who are not here; what the living are to read stays."""
        self.path(self.name, HERE).unlink(missing_ok=True)
        os.close(self._lock)
        self.clear()

    def others(self) -> set[str]:
        """Who takes part now. Removes what those have left who died."""
        dead = False
        names: set[str] = set()
        for who, _, kind, path in self._files():
            if kind == HERE and who != self.name:
                if is_locked(path):
                    names.add(who)
                else:
                    dead = True
        if dead:
            self.clear()
        return names

    def path(self, who: str, kind: str, whom: str = "") -> Path:
        return self.place / (f"{who}.to.{whom}.{kind}" if whom else f"{who}.{kind}")

    def write(self, path: Path, content: bytes) -> None:
        """A file that is whole as soon as it has its name. Raises OSError that names it."""
        unfinished = path.with_suffix(f".{UNFINISHED}")
        try:
            with open(os.open(unfinished, _NEW, 0o600), "wb") as file:
                file.write(content)
            unfinished.rename(path)
        except OSError as problem:
            raise naming(path, problem) from problem

    def take(self, kind: str, whom: str) -> list[tuple[str, bytes]]:
        """Reads and removes the files of this kind for somebody; who wrote them, and what they say."""
        taken: list[tuple[str, bytes]] = []
        for who, addressee, found, path in self._files():
            if (found, addressee) == (kind, whom):
                with contextlib.suppress(FileNotFoundError):  # its writer has gone
                    taken.append((who, path.read_bytes()))
                    path.unlink()
        return taken

    def clear(self) -> None:
        """Removes what serves nobody who is alive: answers are for whom they are written to, all else for its writer.

        The listing comes before the looking: whoever has files in it and comes to life later had none before.
        """
        alive: dict[str, bool] = {}
        for who, whom, kind, path in self._files():
            keeper = whom if kind == WRITTEN else who
            if keeper not in alive:
                # In this order: who comes gives its file the second name before it takes the first away.
                alive[keeper] = is_locked(self.path(keeper, UNFINISHED)) or is_locked(self.path(keeper, HERE))
            if not alive[keeper]:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[str, str, str, Path]]:
        entries: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # somebody has removed the folder: nobody is there
            entries = sorted(os.listdir(self.place))
        for entry in entries:
            if match := _FILE.fullmatch(entry):
                yield match[1], match[2] or "", match[3], self.place / entry

    def _require_own(self) -> None:
        found = os.lstat(self.place)
        if not stat.S_ISDIR(found.st_mode):
            raise CannotMeet(self.place, "is not a directory")
        if found.st_uid != os.geteuid():
            raise CannotMeet(self.place, f"belongs to user {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & 0o777 != 0o700:
            raise CannotMeet(self.place, f"has mode {stat.S_IMODE(found.st_mode):04o}, expected 0700")

    def _take_part(self, name: str) -> None:
        """Raises OSError, TimeoutError after a while; nothing is left then.

        The file is locked before it has its name. Who sees it earlier takes it for one of the dead, and may remove it.
        """
        unfinished, here = self.path(name, UNFINISHED), self.path(name, HERE)
        deadline = time.monotonic() + JOIN_S
        while time.monotonic() < deadline:
            lock = os.open(unfinished, _NEW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.link(unfinished, here)  # not over another of this name, as a rename
                unfinished.unlink(missing_ok=True)
            except (BlockingIOError, FileNotFoundError):  # looked at just now, or removed
                os.close(lock)
                unfinished.unlink(missing_ok=True)
                time.sleep(RETRY_S)  # the interval of a poll with a deadline
            except OSError:
                os.close(lock)
                unfinished.unlink(missing_ok=True)
                raise
            else:
                self.name, self._lock = name, lock
                return
        raise TimeoutError(f"{unfinished} could not be locked within {JOIN_S:g} s")
