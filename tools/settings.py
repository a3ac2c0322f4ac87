"""Settings out of environment variables, as docker compose hands them on: ``QUARTET_ROLLOUT__TEMPERATURE=0.8``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from common.config import Config
from common.config_values import devices

PREFIX = "QUARTET_"
SEPARATOR = "__"
RUN = "QUARTET_RUN"
"""The run's name, short for ``QUARTET_RUN__NAME``."""
DEVICE = "QUARTET_DEVICE"
"""What device ``auto`` is: whoever sequences the run need not see the GPUs that the others compute on."""


def settings(environment: Mapping[str, str]) -> list[str]:
    """Overrides ``section.key=value``, as ``--set`` takes them: two underscores are a dot, and letters are small.

    An empty value is none: that is how compose hands on what nobody has set.
    """
    found = [
        f"{name.removeprefix(PREFIX).replace(SEPARATOR, '.').lower()}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX) and SEPARATOR in name and value
    ]
    return [*found, *([f"run.name={environment[RUN]}"] if environment.get(RUN) else [])]


def placed(config: Config, environment: Mapping[str, str]) -> Config:
    """The config with device ``auto`` resolved, where the environment says what it is."""
    device = environment.get(DEVICE, "")
    if not device:
        return config
    sections = [name for name, named in devices(config).items() if named == "auto"]
    changed = {name: msgspec.structs.replace(getattr(config, name), device=device) for name in sections}
    return msgspec.structs.replace(config, **changed)
