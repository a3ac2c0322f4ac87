"""Settings out of environment variables, as docker compose hands them on: ``QUARTET_ROLLOUT__TEMPERATURE=0.8``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import msgspec

from common.config import Config
from common.config_loading import ConfigError, load_config
from common.config_values import devices
from common.run_files import RunDirectory
from tools.resume import DEFAULT

PREFIX = "QUARTET_"
SEPARATOR = "__"
RUN = "QUARTET_RUN"
"""The run's name."""
DEVICE = "QUARTET_DEVICE"
"""What device ``auto`` is: whoever sequences the run need not see the GPUs that the others compute on."""
OTHERS = frozenset(
    {"QUARTET_PRESET", "QUARTET_LOG", "QUARTET_SHM", "QUARTET_UID", "QUARTET_GID", "QUARTET_REWARD_UID",
     "QUARTET_REWARD_MEMORY", "QUARTET_IMAGE", "QUARTET_LOCK", "QUARTET_MODELS", "QUARTET_COMMIT",
     "QUARTET_COMPOSE_TESTS"}
)  # fmt: skip
"""What compose.yaml, the images and the tests read."""


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Overrides ``section.key=value``, as ``--set`` takes them: two underscores are a dot, and letters are small. Each
    with the variable that it comes from, ``NAME=value``.

    An empty value is none: that is how compose hands on what nobody has set. Raises ConfigError for a name that means
    nothing.
    """
    for name in environment:
        if name.startswith(PREFIX) and SEPARATOR not in name and name not in OTHERS | {RUN, DEVICE}:
            raise ConfigError(f"{name}: no such setting.{_meant(name)}")
    if environment.get(f"{RUN}{SEPARATOR}NAME"):
        raise ConfigError(f"{RUN}{SEPARATOR}NAME: the run's name is {RUN}")
    found = {
        f"{name.removeprefix(PREFIX).replace(SEPARATOR, '.').lower()}={value}": f"{name}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX) and SEPARATOR in name and value
    }
    run = environment.get(RUN)
    return found | ({f"run.name={run}": f"{RUN}={run}"} if run else {})


def _meant(name: str) -> str:
    close = get_close_matches(name, OTHERS | {RUN, DEVICE}, 1)
    if close:
        return f" Did you mean {close[0]}?"
    section, _, key = name.removeprefix(PREFIX).partition("_")
    return f" A key of the config has two underscores between section and key: {PREFIX}{section}__{key}" if key else ""


def config_of(source: str, overrides: Sequence[str], environment: Mapping[str, str]) -> Config:
    """A preset or file under the environment's settings and then the overrides, device ``auto`` resolved where the
    environment says what it is. Raises ConfigError."""
    found = settings(environment)
    config = load_config(source, [*found, *overrides], found)
    device = environment.get(DEVICE, "")
    if not device:
        return config
    sections = [name for name, named in devices(config).items() if named == "auto"]
    changed = {name: msgspec.structs.replace(getattr(config, name), device=device) for name in sections}
    return msgspec.structs.replace(config, **changed)


def run_config(environment: Mapping[str, str]) -> str:
    """The file with the config of the run that the environment names, as a coordinator wrote it; empty without one."""
    if not environment.get(RUN):
        return ""
    found = settings(environment)
    file = RunDirectory(Path(load_config(DEFAULT, list(found), found).run.directory) / environment[RUN]).config
    return str(file) if file.is_file() else ""
