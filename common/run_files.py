"""Where a run keeps what: its directory ``runs/<name>/`` on disk and ``/dev/shm/quartet-<name>/`` in memory."""

from __future__ import annotations

import errno
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

SHM_ROOT = Path("/dev/shm")
SHM_PREFIX = "quartet-"
SOCKET_PATH_LIMIT = 107
"""Longest path of a Unix socket in bytes, the terminating zero not counted (unix(7))."""
STATE_FILE = "state.json"
"""In the directory of a saved state, written when all of its parts are whole: without it the state does not exist."""
_STATE = re.compile(r"^step-([0-9]+)$")


def naming(path: Path, error: OSError) -> OSError:
    """The error of a write, with the file's path, which it lacks; where memory is full, with what to do."""
    full = error.errno == errno.ENOSPC and path.is_relative_to(SHM_ROOT)
    advice = f": free space in {SHM_ROOT}, or enlarge it (docker: shm_size)" if full else ""
    return OSError(error.errno, f"{error.strerror}{advice}", str(path))


def is_open(endpoint: str) -> bool:
    """Whether the socket of a ZeroMQ address is there; of one that is no file nobody can tell, so True."""
    return not endpoint.startswith("ipc://") or os.path.exists(endpoint.removeprefix("ipc://"))


def private(path: str, flags: int) -> int:
    """An ``opener`` of files that their owner alone may read, whatever the umask."""
    return os.open(path, flags, 0o600)


def file_identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a file; None if there is none. The same path may name another file after a restart."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def state_directory(checkpoints: Path, step: int) -> Path:
    """Where the state after this step is saved."""
    return checkpoints / f"step-{step}"


def state_directories(checkpoints: Path) -> dict[int, Path]:
    """By step, in order, what bears the name of a saved state, whole or not. A copy beside them bears another."""
    found = [(_STATE.match(path.name), path) for path in checkpoints.glob("step-*")]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


@dataclass(frozen=True)
class RunDirectory:
    """Files of a run that outlive it."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, service: str, replica: int) -> Path:
        return self.logs / f"{service}-{replica}.log"


FINISHED = "the run is finished"
STOPPED = "the run was stopped"
"""Why a run ended early whose coordinator, or whoever it cannot go on without, was told to end."""


@dataclass(frozen=True)
class SharedDirectory:
    """Files of a run that live in memory and go with it: socket, token cache, weights, lock, process list."""

    path: Path

    @classmethod
    def of_run(cls, run: str) -> SharedDirectory:
        return cls(SHM_ROOT / f"{SHM_PREFIX}{run}")

    @classmethod
    def of_socket(cls, endpoint: str) -> SharedDirectory:
        """That in which the coordinator of a ZeroMQ address listens; one that is not there for other addresses."""
        return cls(Path(endpoint.removeprefix("ipc://")).parent)

    @property
    def socket(self) -> Path:
        return self.path / "bus.sock"

    @property
    def endpoint(self) -> str:
        """ZeroMQ address of the coordinator. Raises ValueError where the path cannot be a socket."""
        if len(os.fsencode(self.socket)) > SOCKET_PATH_LIMIT:
            raise ValueError(
                f"{self.socket} is longer than {SOCKET_PATH_LIMIT} bytes and cannot be a socket: use a shorter run.name"
            )
        return f"ipc://{self.socket}"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def note(self) -> Path:
        """Beside the directory, where docker starts services again: the coordinator's host name (container), and in a
        second line why the run ended."""
        return self.path.with_name(f".{self.path.name}-started")

    def leave_note(self, reason: str = "") -> None:
        """``reason``: why the run has ended. Raises OSError."""
        self.note.write_text(f"{socket.gethostname()}\n{reason}")

    def has_ended(self) -> bool:
        """Whether a coordinator has been here and has removed what it had in memory."""
        return self.note.exists() and not self.path.exists()

    @property
    def secret_file(self) -> Path:
        return self.path / "secret"

    def secret(self) -> str:
        """Shows that a process is of the run's own user; empty where there is none, or this one may not read it."""
        try:
            return self.secret_file.read_text()
        except (FileNotFoundError, PermissionError):
            return ""

    def open_to_group(self) -> None:
        """Lets users of this process's group connect and read the token cache; weights and the rest stay closed."""
        self.tokens.chmod(0o640)
        self.socket.chmod(0o660)
        self.path.chmod(0o710)

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def processes(self) -> Path:
        return self.path / "processes"

    @property
    def status(self) -> Path:
        return self.path / "status.json"
