"""The coordinator's own process with scripted replicas: it finishes, is stopped in every phase, and fails at once."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.config_loading import load_config, to_toml
from common.messages import Role
from common.run_files import RunDirectory, SharedDirectory
from tests.wire.wire_support import Processes

STOP_S = 4.0
ROLES: tuple[Role, ...] = ("rollout", "reward", "critic", "trainer")
Wait = Callable[..., None]


class Run:
    """One coordinator and its replicas. What the coordinator logs is in ``log``."""

    def __init__(self, name: str, folder: Path, wait_until: Wait, *more: str) -> None:
        self.wait_until = wait_until
        self.shared = SharedDirectory.of_run(name)
        self.files = RunDirectory(folder / name)
        self.replicas = Processes(self.shared, folder)
        self.logs = folder / "coordinator.log"
        overrides = (
            f"run.name={name}", f"run.directory={folder}", "run.steps=3", "prompts.per_step=8", "eval.rows=0",
            "checkpoint.snapshot_every=1", "rollout.replicas=1",
            f"timeouts.stop={STOP_S}", "timeouts.start=20", "timeouts.heartbeat=0.2", *more,
            "trainer.mini_batch=0", "trainer.micro_batch=4", "trainer.optimizer.warmup_steps=0",
            "critic.mini_batch=0", "critic.micro_batch=4", "critic.optimizer.warmup_steps=0",
        )  # fmt: skip
        self.config = folder / "config.toml"
        self.config.write_text(to_toml(load_config("tiny", overrides)))
        self.coordinator = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.coordinator", "--config", str(self.config)]
        with self.logs.open("ab") as log:
            return subprocess.Popen(command, stderr=log)

    def join(self, *words: str, without: Role | None = None) -> None:
        """Starts a replica of every role; a word that names a phase is meant for whoever works in it."""
        for role in ROLES:
            if role != without:
                self.replicas.start(role, 0, *words)

    def began(self, role: Role, phase: str) -> None:
        self.wait_until(lambda: f"began {phase}" in "\n".join(self.replicas.noted(role)), f"{role} in {phase}")

    @property
    def log(self) -> str:
        return self.logs.read_text()

    def ended(self, within: float) -> int:
        self.wait_until(lambda: self.coordinator.poll() is not None, "the end of the coordinator", within)
        assert not self.shared.path.exists(), "the run's directory in shared memory is left"
        return self.coordinator.returncode

    def replicas_ended(self) -> list[int | None]:
        self.wait_until(lambda: all(process.poll() is not None for process in self.replicas.started), "their end", 3.0)
        return [process.returncode for process in self.replicas.started]

    def close(self) -> None:
        self.coordinator.kill()
        self.coordinator.wait()
        self.replicas.close()


@pytest.fixture
def run(run_name: str, tmp_path: Path, wait_until: Wait) -> Iterator[Run]:
    started = Run(run_name, tmp_path, wait_until)
    yield started
    started.close()


def test_a_run_ends_with_0_and_stops_everybody(run: Run) -> None:
    run.join()
    assert run.ended(30.0) == 0, run.log
    assert run.replicas_ended() == [0, 0, 0, 0]
    summary = json.loads(run.files.summary.read_text())
    assert (summary["finished"], summary["steps"], summary["samples"]) == (True, 3, 24)
    assert summary["trained_model"] == "final@3"
    assert summary["phase_s"].keys() == {
        "GENERATE",
        "SCORE",
        "EVALUATE",
        "ADVANTAGE",
        "UPDATE",
        "PUBLISH",
        "CHECKPOINT",
    }
    assert run.replicas.noted("trainer").count("saved final") == 1
    assert sorted(path.parent.name for path in run.files.checkpoints.glob("*/state.json")) == ["step-2", "step-3"]
    metrics = [json.loads(line) for line in run.files.metrics.read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert [line["values"]["policy/loss"] for line in metrics] == [0.5] * 3
    assert [line["values"]["samples"] for line in metrics] == [8] * 3


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        (None, "START"), ("rollout", "APPLY"), ("rollout", "GENERATE"), ("reward", "SCORE"), ("critic", "EVALUATE"),
        ("trainer", "UPDATE"),
    ],
)  # fmt: skip
def test_sigterm_ends_it_in_every_phase_within_timeouts_stop(run: Run, role: Role | None, phase: str) -> None:
    if role is None:
        run.join(without="trainer")
        run.wait_until(lambda: run.log.count("is ready") == 3, "three of four")
    else:
        run.join(f"block:{phase}")
        run.began(role, phase)
    since = time.monotonic()
    run.coordinator.send_signal(signal.SIGTERM)
    assert run.ended(STOP_S) == 1
    assert time.monotonic() - since < STOP_S / 2
    assert set(run.replicas_ended()) == {0}
    assert "stopped in step" in run.log
    assert "Traceback" not in run.log
    assert json.loads(run.files.summary.read_text())["finished"] is False


def test_a_replica_that_does_not_stop_is_killed(run: Run) -> None:
    run.join("gil:60", without="critic")
    run.replicas.start("critic")
    run.began("rollout", "GENERATE")
    run.coordinator.send_signal(signal.SIGTERM)
    assert run.ended(STOP_S) == 1
    assert run.replicas_ended() == [-9, 0, 0, 0]
    assert "rollout 0" in run.log
    assert "does not stop and is killed" in run.log


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("fail-load",), r"trainer 0 .* did not get ready: .*RuntimeError: there is no such model"),
        (("raise:UPDATE",), r"trainer 0 failed in UPDATE of step 1: ValueError: a scripted exception"),
        (("raise:CHECKPOINT",), r"trainer 0 failed in CHECKPOINT of step 3: ValueError: a scripted exception"),
    ],
)
def test_a_run_whose_trainer_fails_ends_at_once_and_says_so(run: Run, words: tuple[str, ...], reason: str) -> None:
    run.join(without="trainer")
    run.wait_until(lambda: run.log.count("is ready") == 3, "three of four")
    run.replicas.start("trainer", 0, *words)
    assert run.ended(8.0) == 1
    (line,) = [line for line in run.log.splitlines() if "the run failed in step" in line]
    assert re.search(reason, line), run.log
    assert "Traceback" not in run.log
    run.replicas_ended()


@pytest.mark.parametrize("role", ["trainer", "critic"])
@pytest.mark.parametrize("word", ["die:UPDATE", "die-done:UPDATE", "die-done:EVALUATE"])
def test_a_run_whose_learner_dies_goes_on_with_its_successor(run: Run, role: Role, word: str) -> None:
    run.join(without=role)
    first = run.replicas.start(role, 0, word)
    run.wait_until(lambda: first.poll() is not None, f"the death of the {role}")
    run.replicas.start(role, 1, *(["again"] if role == "trainer" else []))
    assert run.ended(30.0) == 0, run.log
    assert f"{role} 0 (pid {first.pid}) is gone" in run.log
    summary = json.loads(run.files.summary.read_text())
    assert (summary["finished"], summary["steps"], summary["samples"]) == (True, 3, 24)
    metrics = [json.loads(line) for line in run.files.metrics.read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert [line.startswith("restored 0") for line in run.replicas.noted(role, 1)].count(True) == (role == "trainer")


def test_a_coordinator_that_is_killed_is_followed_by_one_that_goes_on(run: Run) -> None:
    run.join("block:UPDATE")
    run.began("trainer", "UPDATE")
    run.coordinator.kill()
    run.coordinator.wait()
    run.coordinator = run.start()
    run.wait_until(lambda: "still holds work" in run.log, "the trainer's greeting")
    run.replicas.go()
    assert run.ended(30.0) == 0, run.log
    assert run.replicas_ended() == [0, 0, 0, 0]
    summary = json.loads(run.files.summary.read_text())
    assert (summary["finished"], summary["steps"], summary["samples"], summary["epoch"]) == (True, 3, 24, 2)
    phases: dict[Role, str] = {"trainer": "UPDATE", "critic": "UPDATE", "rollout": "GENERATE"}
    for role, phase in phases.items():
        assert sum(line.startswith(f"began {phase}") for line in run.replicas.noted(role)) == 3, role


def test_a_run_has_one_coordinator(run: Run) -> None:
    run.wait_until(run.shared.status.exists, "the first coordinator")
    second = run.start()
    assert second.wait(20.0) == 1
    assert f"process {run.coordinator.pid} coordinates it" in run.log
    assert run.shared.path.exists()
    run.coordinator.send_signal(signal.SIGTERM)
    assert run.ended(STOP_S) == 1


def test_a_bad_config_is_one_clear_line(run: Run) -> None:
    run.config.write_text("[run]\nstepz = 3\n")
    second = run.start()
    assert second.wait(20.0) == 2
    assert "stepz" in run.log
    assert "Traceback" not in run.log
