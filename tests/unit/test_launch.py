"""Which processes a run has: the holder only where a GPU is used, and then first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.config import Config, CriticConfig, PPOConfig, RolloutConfig, TrainerConfig
from common.config_values import gpu_present, uses_gpu
from common.run_files import RunDirectory
from tools.launch import ServiceSpec, planned_services, service_command, service_environment


def config(rollout: str, trainer: str, critic: str, advantage: str = "gae") -> Config:
    return Config(
        rollout=RolloutConfig(device=rollout),
        trainer=TrainerConfig(device=trainer),
        critic=CriticConfig(device=critic),
        ppo=PPOConfig(advantage=advantage),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("devices", "used"),
    [
        (("cpu", "cpu", "cpu"), False),
        (("cuda", "cpu", "cpu"), True),
        (("cpu", "cuda:1", "cpu"), True),
        (("cpu", "cpu", "cuda:0"), True),
        (("cpu", "cpu", "cuda:0", "grpo"), False),
    ],
)
def test_the_holder_is_planned_where_a_service_of_the_run_is_on_a_gpu(devices: tuple[str, ...], used: bool) -> None:
    found = config(*devices)
    assert uses_gpu(found) is used
    services = [spec.service for spec in planned_services(found)]
    assert ("holder" in services) is used
    assert services[: 2 if used else 1] == (["coordinator", "holder"] if used else ["coordinator"])


@pytest.mark.parametrize(("visible", "hidden"), [("", True), ("-1", True), ("0", False), (None, False)])
def test_auto_is_a_gpu_where_one_can_be_seen(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, hidden: bool
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("common.config_values._GPU_DRIVER", os.devnull)  # a device file that every machine has
    assert gpu_present() is not hidden
    assert uses_gpu(config("auto", "cpu", "cpu")) is not hidden
    monkeypatch.setattr("common.config_values._GPU_DRIVER", "/dev/no-such-driver")
    assert not uses_gpu(config("auto", "auto", "auto"))


def test_the_holder_allocates_what_can_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    holder = service_environment(ServiceSpec("holder", 0, 1))
    assert holder["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in holder
    assert service_environment(ServiceSpec("trainer", 0, 1))["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_every_service_learns_whose_child_it_is(tmp_path: Path) -> None:
    found = config("cpu", "cpu", "cpu")
    for spec in planned_services(found):
        command = service_command(found, RunDirectory(tmp_path))(spec, 77)
        assert command[command.index("--parent") + 1] == "77"


def test_what_a_service_starts_can_be_told_to_be_its_own() -> None:
    assert service_environment(ServiceSpec("reward", 3, 1))["QUARTET_SERVICE"] == "reward-3"
