"""Which processes a run has, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.config import Config
from common.config_values import has_critic, uses_gpu
from common.run_files import RunDirectory

OWNER = "QUARTET_SERVICE"
"""Environment variable of a service, and of what it starts: the service's name."""


@dataclass(frozen=True)
class ServiceSpec:
    """One process to start."""

    service: str
    replica: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.service}-{self.replica}"


CommandFactory = Callable[[ServiceSpec, int], list[str]]
"""The command line of a service, whose parent is the process with this id."""


def planned_services(config: Config) -> list[ServiceSpec]:
    """The processes of a run: the coordinator, where a GPU is used the holder, for which others wait, and those."""
    return [
        ServiceSpec("coordinator", 0, 1),
        *([ServiceSpec("holder", 0, 1)] if uses_gpu(config) else []),
        *(ServiceSpec("rollout", number, config.rollout.threads) for number in range(config.rollout.replicas)),
        *(ServiceSpec("reward", number, 1) for number in range(config.reward.replicas)),
        *([ServiceSpec("critic", 0, config.critic.threads)] if has_critic(config) else []),
        ServiceSpec("trainer", 0, config.trainer.threads),
    ]


def service_command(config: Config, files: RunDirectory) -> CommandFactory:
    """How the services are started: ``python -P -m services.<name>``; -P keeps a user's own ``services`` folder out."""

    def command(spec: ServiceSpec, parent: int) -> list[str]:
        if spec.service == "coordinator":
            place = ["--config", str(files.config)]
        else:
            place = ["--run", config.run.name, "--replica", str(spec.replica)]
        common = ["--parent", str(parent), "--log-level", config.log.level]
        return [sys.executable, "-P", "-m", f"services.{spec.service}", *place, *common]

    return command


def package_environment() -> dict[str, str]:
    """This process's variables; under them ``python -P -m`` finds this package's modules in any folder."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path}


def service_environment(spec: ServiceSpec) -> dict[str, str]:
    threads = str(spec.threads)
    environment = {**package_environment(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads, OWNER: spec.name}
    if spec.service == "holder":  # what it allocates it exports, which expandable segments do not allow
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    return environment
