"""``quartet coordinate``: the coordinator alone, for docker compose, which starts the other services itself.

    first start              writes ``config.toml``, and becomes the coordinator
    unfinished run           goes on with it where the config is the same, or fits; else a list of differences
    started again by docker  after a kill the shared memory is there: the coordinator takes over what it finds
                             after an end by decision it is gone, and so are the replicas: nothing is started

``docker compose up`` starts everything anew, with an empty /dev/shm: then an unfinished run goes on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common.config import Config
from common.config_checks import check_config
from common.config_loading import to_toml
from common.records import write_whole
from common.run_files import FINISHED, RunDirectory, SharedDirectory
from common.run_lock import RunLock
from tools.doctor.report import require_health
from tools.folder_lock import lock_folder
from tools.resume import CannotStart, keep_earlier_config, require_fit
from tools.settings import config_of
from tools.up import read_summary, refuse_finished, refuse_live, set_earlier_attempt_aside

GROUP = "bus.group_access=true"
"""Under compose the reward service is another user of the same group."""


class HasEnded(Exception):
    """The run is over, and docker starts its coordinator again: nothing is to be done. The message is why it ended."""


class Prepared(NamedTuple):
    files: RunDirectory
    command: list[str]


def coordinate(source: str, overrides: Sequence[str], environment: Mapping[str, str]) -> Prepared:
    """Prepares the run's directory for its coordinator; nothing is written where it cannot start.

    Raises ConfigError, HasEnded, or CannotStart where the run is live, finished, or does not fit the config.
    """
    config = config_of(source, [GROUP, *overrides], environment)
    check_config(config)
    files = RunDirectory(Path(config.run.directory) / config.run.name)
    shared = SharedDirectory.of_run(config.run.name)
    refuse_live(config, shared)
    wind_up(files, shared)
    refuse_ended(shared)
    prepare(files)
    refuse_finished(config, files, resume=False)
    begun = has_steps(files.ledger)
    if begun:
        require_fit(config, files)
    require_health(config)
    if begun:
        keep_earlier_config(config, files)
    else:
        begin(config, files)
    module = ["-P", "-m", "services.coordinator"]
    command = [sys.executable, *module, "--config", str(files.config), "--log-level", config.log.level]
    return Prepared(files, command)


def has_steps(ledger: Path) -> bool:
    """Whether a step of the run was finished. Raises CannotStart where the ledger cannot be read."""
    if not ledger.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
            made = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'steps'").fetchone() != (0,)
            return made and connection.execute("SELECT count(*) FROM steps").fetchone() != (0,)
    except sqlite3.Error as error:
        raise CannotStart(f"{ledger}: cannot be read: {error}; choose another QUARTET_RUN in .env") from error


def begin(config: Config, files: RunDirectory) -> None:
    """Before the first step nothing of a run is worth more than its config: another one may take its place."""
    text = to_toml(config)
    if files.config.is_file() and files.config.read_text() != text:
        set_earlier_attempt_aside(config, files)
        files.logs.mkdir()
    write_whole(files.config, text.encode())


def keep_to_itself(files: RunDirectory) -> None:
    """Locks the run's directory until this process ends, whatever it becomes. Raises CannotStart where somebody else
    has it."""
    descriptor = lock_folder(files.path)
    if descriptor is None:
        raise CannotStart(
            f"{files.path} is used by another coordinator, or by `quartet up`: stop that one, or choose another "
            "QUARTET_RUN in .env"
        )
    os.set_inheritable(descriptor, True)


def prepare(files: RunDirectory) -> None:
    """Makes the run's directory. Raises CannotStart where it cannot be written, and says whose it would have to be."""
    try:
        files.logs.mkdir(parents=True, exist_ok=True)
        if not os.access(files.path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except PermissionError as error:
        folder = next(path for path in (files.path, *files.path.parents) if os.access(path, os.F_OK))
        owner, user = folder.stat().st_uid, os.geteuid()
        other = f", or set QUARTET_UID={owner} (and QUARTET_GID) in .env" if owner else ""
        raise CannotStart(
            f"{files.path} cannot be written: {folder} belongs to user {owner}, the services run as user {user}: "
            f"sudo chown -R {user}:{os.getegid()} {folder}{other}"
        ) from error
    except OSError as error:
        raise CannotStart(f"{files.path} cannot be made: {error.strerror}") from error


def wind_up(files: RunDirectory, shared: SharedDirectory) -> None:
    """What a coordinator that was killed when its run was finished did not come to. Raises HasEnded then."""
    summary = read_summary(files) if shared.note.exists() else None
    if summary is None or not summary.finished:
        return
    lock = RunLock.take_dead(shared)
    if lock is not None:
        shared.leave_note(FINISHED)
        lock.remove_directory()
        raise HasEnded(FINISHED)


def refuse_ended(shared: SharedDirectory) -> None:
    """Docker has started a coordinator again whose run is over. Another container is a start that somebody wants."""
    if not shared.has_ended():
        return
    host, _, reason = shared.note.read_text().partition("\n")
    if host == socket.gethostname():
        raise HasEnded(reason or "its coordinator did not say why")
    shared.note.unlink()
