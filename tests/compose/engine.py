"""A Docker engine for the tests, and one compose project on it. Nothing is left when a project is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tests.conftest import ROOT, wait_until

OFF = "QUARTET_COMPOSE_TESTS"
"""Set to ``off`` these tests are left out, for a quick local run."""
ENGINE_S, BUILD_S, COMMAND_S = 600, 900, 180
USER = "1000:1000"
FILES = ("compose.yaml", "compose.cpu.yaml")


def base_image() -> str:
    """BASE_IMAGE, where that is set; else brings up an engine and a base image. Fails loudly where that cannot be."""
    if given := os.environ.get("BASE_IMAGE"):
        return given
    script = '. .ci/docker-engine.sh && docker_engine_up >&2 && printf %s "$BASE_IMAGE"'
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=ENGINE_S, check=False
    )
    assert done.returncode == 0, (
        f"no Docker engine could be had for the compose tests ({OFF}=off leaves them out):\n{done.stderr[-3000:]}"
    )
    return done.stdout


class Project:
    """``docker compose`` on a copy of the compose files, with a project name, a run and a folder of its own."""

    def __init__(self, folder: Path, base: str, **settings: str) -> None:
        self.name = f"quartet-test-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.more: list[str] = []
        """Further compose files in its folder."""
        self.seen: set[str] = set()
        """Ids of its containers."""
        for name in FILES:
            shutil.copy(ROOT / name, folder)
        for name in ("runs", "data"):
            (folder / name).mkdir()
            shutil.chown(folder / name, *map(int, USER.split(":")))
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("QUARTET_")},
            "BASE_IMAGE": base, "DOCKER_BUILDKIT": "1", "QUARTET_IMAGE": "quartet-test", "QUARTET_SHM": "1gb",
        }  # fmt: skip
        self.set(**settings)

    def set(self, **settings: str) -> None:
        (self.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def compose(self, *words: str, within: float = COMMAND_S, folder: Path | None = None) -> tuple[int, str]:
        """Exit code and all output of a command."""
        names = (*FILES, *self.more)
        files = [part for name in names for part in ("-f", str((folder or self.folder) / name))]
        done = subprocess.run(
            ["docker", "compose", "-p", self.name, *files, *words], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=within, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def do(self, *words: str, within: float = COMMAND_S, folder: Path | None = None) -> str:
        code, output = self.compose(*words, within=within, folder=folder)
        assert code == 0, f"docker compose {' '.join(words)}: exit code {code}\n{output[-3000:]}"
        return output

    def build(self) -> None:
        """Out of the repository itself; the compose files in the project's folder are the same."""
        self.do("build", within=BUILD_S, folder=ROOT)

    def copy_code(self) -> None:
        """What images are built of, into the project's folder, so that a test may change it."""
        for name in ("common", "services", "tools", "Dockerfiles"):
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (".dockerignore", "requirements.lock", "requirements-gpu.lock"):
            shutil.copy(ROOT / name, self.folder)

    # ------------------------------------------------------------ looking

    def logs(self, service: str) -> str:
        return self.do("logs", "--no-color", "--no-log-prefix", service)

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine knows of the containers of a service, by number."""
        label = f"label=com.docker.compose.project={self.name}"
        ids = docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).split()
        self.seen.update(ids)
        found = cast("list[dict[str, Any]]", json.loads(docker("inspect", *ids))) if ids else []
        mine = [item for item in found if item["Config"]["Labels"]["com.docker.compose.service"] == service]
        return sorted(mine, key=lambda item: int(item["Config"]["Labels"]["com.docker.compose.container-number"]))

    def health(self, service: str) -> str:
        """As ``docker compose ps`` shows it: starting, healthy or unhealthy."""
        return str(self.containers(service)[0]["State"]["Health"]["Status"])

    def exit_codes(self) -> dict[str, int | None]:
        """By container; None: it runs."""
        services = self.do("config", "--services").split()
        return {
            item["Name"].lstrip("/").removeprefix(f"{self.name}-"): item["State"]["ExitCode"]
            if item["State"]["Status"] == "exited"
            else None
            for service in services
            for item in self.containers(service)
        }

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def steps(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0

    def ledger(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(f"file:{self.run / 'ledger.sqlite'}?mode=ro", uri=True, timeout=30)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def until(self, holds: Callable[[], bool], what: str, within: float = 120.0) -> float:
        """Waits; returns the seconds. Fails with every service's last lines."""
        began = time.monotonic()
        try:
            wait_until(holds, what, within)
        except BaseException:
            print(self.compose("logs", "--tail", "15")[1], self.exit_codes())
            raise
        return time.monotonic() - began

    # ------------------------------------------------------------ killing and leaving

    def kill(self, service: str, index: int = 0) -> None:
        """SIGKILL from outside: ``docker kill`` would have the engine not start it again."""
        os.kill(int(self.containers(service)[index]["State"]["Pid"]), signal.SIGKILL)

    def down(self) -> None:
        self.do("down", "--volumes", "--timeout", "10")

    def left(self) -> list[str]:
        """Containers, volumes and networks of this project, and mounts of its /dev/shm."""
        label = f"label=com.docker.compose.project={self.name}"
        commands: Sequence[tuple[str, ...]] = (
            ("ps", "--all", "--quiet"), ("volume", "ls", "--quiet"), ("network", "ls", "--quiet"),
        )  # fmt: skip
        found = [line for words in commands for line in docker(*words, "--filter", label).split()]
        mounts = Path("/proc/mounts").read_text()
        return [*found, *(f"{identity} in /proc/mounts" for identity in self.seen if identity in mounts)]


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
    return done.stdout
