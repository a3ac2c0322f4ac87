"""``quartet up --resume``: finds the unfinished run that is to be continued, and checks that the config fits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from common.config import Config
from common.config_changes import misfits
from common.config_loading import ConfigError, load_config, to_toml
from common.records import write_whole
from common.run_files import RunDirectory

NAME = "run.name"
DEFAULT = "tiny"
"""The preset of who names none."""
EARLIER_CONFIG = "config-"


class CannotStart(Exception):
    """The run cannot be started as asked; nothing was changed. The message says what to do."""


def resumed_config(source: str | None, overrides: Sequence[str]) -> Config:
    """The config to go on with: ``source``, or without one the run's own, under the overrides.

    Raises ConfigError, or CannotStart where no run is named or there is none of that name.
    """
    if source is not None:
        return load_config(source, overrides)
    places = [override for override in overrides if override.partition("=")[0].strip() in (NAME, "run.directory")]
    if not any(place.partition("=")[0].strip() == NAME for place in places):
        raise CannotStart("--resume: which run? Give its --name, or the preset or file that it was started with")
    place = load_config(DEFAULT, places).run
    return load_config(str(earlier(RunDirectory(Path(place.directory) / place.name), place.name)), overrides)


def earlier(files: RunDirectory, name: str) -> Path:
    """The config that a run was started with; raises CannotStart where there is no such run."""
    if not files.config.is_file():
        raise CannotStart(
            f"run '{name}' cannot be resumed: {files.path} holds no earlier run. Start it without --resume, or name "
            "the folder of runs by --set run.directory=FOLDER"
        )
    return files.config


def require_fit(config: Config, files: RunDirectory) -> None:
    """Raises CannotStart, with the list of differences, where the earlier run was another."""
    name = config.run.name
    try:
        before = load_config(str(earlier(files, name)))
    except ConfigError as error:
        raise CannotStart(f"run '{name}' cannot be resumed: {error}") from error
    differences = misfits(before, config)
    if differences:
        listed = "".join(f"\n  {difference}" for difference in differences)
        raise CannotStart(
            f"run '{name}' cannot be resumed: the config does not fit {files.config}:{listed}\n"
            f"Resume it with its own config (`quartet up --resume --name {name}`), or choose another --name"
        )


def keep_earlier_config(config: Config, files: RunDirectory) -> Path | None:
    """Writes the config down where it has changed. Returns where the one before is kept now."""
    text = to_toml(config).encode()
    if files.config.read_bytes() == text:
        return None
    number = next_number((path.stem for path in files.path.glob(f"{EARLIER_CONFIG}*.toml")), EARLIER_CONFIG)
    kept = files.path / f"{EARLIER_CONFIG}{number}.toml"
    kept.hardlink_to(files.config)
    write_whole(files.config, text)
    return kept


def next_number(names: Iterable[str], prefix: str) -> int:
    """One more than the highest number that follows ``prefix`` in these names; 1 where there is none."""
    numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
