"""What the compose files say, read by docker compose itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compose.engine import COMMAND_S, FILES
from tests.conftest import ROOT

GPU = [{"capabilities": ["gpu"], "driver": "nvidia", "count": -1}]
ON_GPU = {"holder", "trainer", "critic", "rollout"}
Services = dict[str, dict[str, Any]]


def services(*files: str, settings: Path = Path("/dev/null")) -> Services:
    """Of the files of the repository, with the settings of a file in .env's format."""
    named = [word for name in files for word in ("-f", name)]
    command = ["docker", "compose", "--env-file", str(settings), *named, "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr
    found: Services = json.loads(done.stdout)["services"]
    return found


def devices(service: dict[str, Any]) -> object:
    return service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])


@pytest.fixture
def with_gpus(base: str) -> Services:
    return services("compose.yaml")


def test_who_computes_with_a_model_sees_all_gpus(with_gpus: Services) -> None:
    """CUDA IPC needs both sides to see both devices."""
    assert {name for name, service in with_gpus.items() if devices(service) == GPU} == ON_GPU
    assert all(devices(service) == [] for name, service in with_gpus.items() if name not in ON_GPU)
    assert with_gpus["coordinator"]["environment"]["QUARTET_DEVICE"] == "cuda"


def test_without_a_gpu_nobody_asks_for_one(base: str) -> None:
    found = services(*FILES)
    assert set(found) == {"pause", "coordinator", "trainer", "critic", "rollout", "reward"}
    assert all(devices(service) == [] for service in found.values())
    assert {service["environment"]["QUARTET_DEVICE"] for name, service in found.items() if name != "pause"} == {"cpu"}


def test_every_line_of_the_example_may_be_uncommented(base: str, tmp_path: Path) -> None:
    standing, examples = (ROOT / ".env.example").read_text().split("# Examples")

    def config(lines: str) -> Services:
        (tmp_path / "env").write_text("".join(f"{line.removeprefix('#')}\n" for line in lines.splitlines()[1:]))
        return services("compose.yaml", settings=tmp_path / "env")

    assert config(standing) == config(""), "what stands there is what holds without it"
    config(examples)


def test_nobody_has_more_rights_than_needed(with_gpus: Services) -> None:
    for name, service in with_gpus.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].split(":")[0] not in ("0", "root"), name
        assert service["restart"].startswith("on-failure"), name
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}, name
        assert name == "pause" or service["healthcheck"]["test"][:3] == ["CMD", "quartet", "health"], name


def test_user_code_has_its_own(with_gpus: Services) -> None:
    reward = with_gpus.pop("reward")
    assert reward["network_mode"] == "none"
    assert reward["user"] not in {service["user"] for service in with_gpus.values()}
    assert (reward.get("pid", ""), reward["pids_limit"]) == ("", 256)
    assert all(volume["read_only"] for volume in reward["volumes"])
    shares = {name for name, service in with_gpus.items() if service.get("pid") == "service:pause"}
    assert shares == {"coordinator", "holder", "trainer", "critic", "rollout"}
