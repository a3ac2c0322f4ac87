"""``quartet coordinate``: the coordinator alone, for docker compose, which starts the other services itself.

    first start              writes ``config.toml``, and becomes the coordinator
    unfinished run           goes on with it where the config is the same, or fits; else a list of differences
    started again by docker  after a kill the shared memory is there: the coordinator takes over what it finds
                             after an end by decision it is gone, and so are the replicas: nothing is started

``docker compose up`` starts everything anew, with an empty /dev/shm: then an unfinished run goes on.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common.config_checks import check_config
from common.config_loading import to_toml
from common.records import write_whole
from common.run_files import FINISHED, STOPPED, RunDirectory, SharedDirectory
from common.run_lock import RunLock
from tools.doctor.report import require_health
from tools.resume import CannotStart, keep_earlier_config, require_fit
from tools.settings import config_of
from tools.up import read_summary, refuse_finished, refuse_live

GROUP = "bus.group_access=true"
"""Under compose the reward service is another user of the same group."""


class HasEnded(Exception):
    """The run is finished or was stopped, and docker starts its coordinator again: nothing is to be done."""


class Prepared(NamedTuple):
    files: RunDirectory
    command: list[str]


def coordinate(source: str, overrides: Sequence[str], environment: Mapping[str, str]) -> Prepared:
    """Prepares the run's directory for its coordinator; nothing is written where it cannot start.

    Raises ConfigError, HasEnded, or CannotStart where the run is live, finished, ended, or does not fit the config.
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
    begun = files.ledger.is_file()
    if begun:
        require_fit(config, files)
    require_health(config)
    if begun:
        keep_earlier_config(config, files)
    else:
        write_whole(files.config, to_toml(config).encode())
    module = ["-P", "-m", "services.coordinator"]
    command = [sys.executable, *module, "--config", str(files.config), "--log-level", config.log.level]
    return Prepared(files, command)


def keep_to_itself(files: RunDirectory) -> None:
    """Locks the run's directory until this process ends, whatever it becomes: another /dev/shm knows nothing of this
    run. Raises CannotStart where somebody else has it."""
    descriptor = os.open(files.path, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(descriptor, True)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CannotStart(
            f"{files.path} is used by another coordinator, or by `quartet up`: stop that one, or choose another "
            "QUARTET_RUN in .env"
        ) from None


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
            f"sudo chown -R {user}:{os.getegid()} {folder.name}{other}"
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
        shared.note.write_text(FINISHED)
        lock.remove_directory()
        raise HasEnded(FINISHED)


def refuse_ended(shared: SharedDirectory) -> None:
    if not shared.has_ended():
        return
    reason = shared.note.read_text() or "its coordinator did not say why"
    if reason in (STOPPED, FINISHED):
        raise HasEnded(reason)
    raise CannotStart(
        f"the run has ended: {reason}. `docker compose down` and `docker compose up` start all services again, and go "
        "on with an unfinished run"
    )
