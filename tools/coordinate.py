"""``quartet coordinate``: the coordinator alone, for docker compose, which starts the other services itself.

    first start              writes ``config.toml``, and becomes the coordinator
    unfinished run           goes on with it where the config is the same, or fits; else a list of differences
    started again by docker  after a kill the shared memory is there: the coordinator takes over what it finds
                             after an end by decision it is gone, and so are the replicas: nothing is started

``docker compose up`` starts everything anew, with an empty /dev/shm: then an unfinished run goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.config_checks import check_config
from common.config_loading import load_config, to_toml
from common.records import write_whole
from common.run_files import RunDirectory, SharedDirectory
from tools.doctor.report import require_health
from tools.resume import CannotStart, keep_earlier_config, require_fit
from tools.settings import placed, settings
from tools.up import refuse_finished, refuse_live

GROUP = "bus.group_access=true"
"""Under compose the reward service is another user of the same group."""


def coordinate(source: str, overrides: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Prepares the run's directory and returns the command line of its coordinator.

    Raises ConfigError, or CannotStart where the run is live, finished, ended, or does not fit the config.
    """
    config = placed(load_config(source, [GROUP, *settings(environment), *overrides]), environment)
    check_config(config)
    files = RunDirectory(Path(config.run.directory) / config.run.name)
    shared = SharedDirectory.of_run(config.run.name)
    refuse_live(config, shared)
    refuse_ended(shared)
    prepare(files)
    refuse_finished(config, files, resume=False)
    if files.config.is_file():
        require_fit(config, files)
        keep_earlier_config(config, files)
    else:
        write_whole(files.config, to_toml(config).encode())
    require_health(config)
    note_start(shared).touch()
    module = ["-P", "-m", "services.coordinator"]
    return [sys.executable, *module, "--config", str(files.config), "--log-level", config.log.level]


def prepare(files: RunDirectory) -> None:
    try:
        files.logs.mkdir(parents=True, exist_ok=True)
        if not os.access(files.path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        owner = next(path for path in (files.path, *files.path.parents) if path.exists()).stat().st_uid
        raise CannotStart(
            f"{files.path} cannot be written: {error.strerror}. It, or the folder above it, belongs to user {owner}, "
            f"the services run as user {os.geteuid()}: set QUARTET_UID={owner} (and QUARTET_GID) in .env, or give "
            "the folder to that user"
        ) from error


def note_start(shared: SharedDirectory) -> Path:
    """A file beside the run's shared directory: this /dev/shm has had a coordinator of the run."""
    return shared.path.with_name(f".{shared.path.name}-started")


def refuse_ended(shared: SharedDirectory) -> None:
    if note_start(shared).exists() and not shared.path.exists():
        raise CannotStart(
            "the run has ended: its last lines in this log say why. `docker compose up` starts all services again, "
            "and goes on with an unfinished run"
        )
