"""Whole runs whose rollouts are real vLLM engines on CPU: shared and copied weights, a killed replica, SmolLM2."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.config_loading import load_config, to_toml
from common.model import load_causal_lm
from common.processes import process_start
from common.weights.header import SetState, WeightsError, WeightState, read_state
from common.weights.layout import model_tensors
from tests.process.whole_runs import SMALL, WaitUntil, WholeRun
from tests.unit.model_support import CPU

pytestmark = pytest.mark.timeout(420)

CLOSE = 1e-4
"""Nats by which engine and trainer may differ in float32."""
ENDS_WITHIN = 240.0
GONE_WITHIN = 15.0
STARTED = re.compile(r"vLLM engine \(pid (\d+)\) runs on cpu by (\w+)")
OWN_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} rollout-0 \w+ ")
VLLM = "rollout.engine=vllm"


def complete(run: WholeRun, preset: str, *overrides: str) -> list[Path]:
    """A whole run that ends well; starting an engine takes longer than all that other runs do.

    Returns what its engine has mapped of /dev/shm beside the run's own directory.
    """
    settings = [part for override in overrides for part in ("--set", override)]
    process = run.command(sys.executable, "-m", "tools", "up", preset, "--name", run.name, *settings)
    run.wait_until(lambda: engines(run) or process.poll() is not None, "an engine", ENDS_WITHIN)
    mapped = [path for pid in engines(run) for path in mapped_memory(pid) if run.shared.path not in path.parents]
    _, err = process.communicate(timeout=ENDS_WITHIN)
    assert process.returncode == 0, f"{err}\n{run.log('rollout')}"
    assert run.summary().finished
    return mapped


def engines(run: WholeRun) -> list[int]:
    """Processes of the engines that have started, by the services' logs."""
    logs = run.files.logs.glob("rollout-*.log")
    return [int(pid) for log in logs for pid, _ in STARTED.findall(log.read_text())]


def mapped_memory(pid: int) -> set[Path]:
    """Files of /dev/shm that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line and "(deleted)" not in line}


def require_agreement(run: WholeRun, steps: int) -> None:
    """In every step: engine and trainer computed the same, and every sample is of the version before its step."""
    lines = run.steps()
    assert [line.step for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert line.values["engine_difference_max"] <= CLOSE
        assert abs(line.values["engine_kl"]) <= CLOSE
        assert line.values["tokens"] > 0
        assert line.values["masked"] == 0
    assert {(sample.step, sample.version_low, sample.version_high) for sample in run.samples()} == {
        (step, step - 1, step - 1) for step in range(1, steps + 1)
    }


def require_transport(run: WholeRun, transport: str, copied_bytes: int) -> None:
    """By the receipts of every publish, and by the engine's own word at its start."""
    ((_, started_by),) = STARTED.findall(run.log("rollout"))
    assert started_by == transport
    assert re.search(rf"policy@0: \d+ tensors by {transport}", run.log("rollout"))
    for line in run.steps():
        found = line.timings["weights_aliased"], line.timings["weights_copied"], line.timings["weights_copied_bytes"]
        assert found == (float(transport == "alias"), float(transport == "copy"), float(copied_bytes))
        assert 0 <= line.timings["weights_held_s"] <= line.timings["weights_proved_s"] < ENDS_WITHIN


def require_own_logs(run: WholeRun) -> None:
    """The service's log has its own lines alone; vLLM's are in the engine's, as vLLM writes them by default."""
    lines = run.log("rollout").splitlines()
    assert lines
    assert [line for line in lines if not OWN_LINE.match(line)] == []
    assert not any("vLLM" in line or "Triton" in line or "model loader" in line for line in lines if "(pid" not in line)
    assert "] Registered model loader" in (run.files.logs / "rollout-0.engine.log").read_text()


def require_nothing_left(run: WholeRun, wait_until: WaitUntil, mapped: Sequence[Path] = ()) -> None:
    """Of the engine too, whose processes carry names of their own, and neither of its shared memory."""
    pids = engines(run)
    assert pids
    wait_until(lambda: not any(map(process_start, pids)), f"the end of engines {pids}", GONE_WITHIN)
    run.assert_nothing_left(GONE_WITHIN)
    wait_until(lambda: not any(path.exists() for path in mapped), f"the end of {mapped}", GONE_WITHIN)


def test_tiny_trains_on_shared_weights(run: WholeRun, wait_until: WaitUntil) -> None:
    mapped = complete(run, "tiny", *SMALL, VLLM)
    require_agreement(run, 2)
    require_transport(run, "alias", 0)
    require_own_logs(run)
    summary = run.summary()
    assert summary.accuracy_first is not None
    assert summary.accuracy_last is not None
    assert run.steps()[1].values["kl"] != 0, "the policy did not move: nothing is tested"
    require_nothing_left(run, wait_until, mapped)


def test_tiny_trains_on_copied_weights(run: WholeRun, wait_until: WaitUntil) -> None:
    complete(run, "tiny", *SMALL, VLLM, "eval.rows=0", "weights.transport=copy", "weights.bucket_mib=1")
    require_agreement(run, 2)
    model = load_causal_lm(load_config("tiny").model, CPU)
    require_transport(run, "copy", sum(tensor.nbytes for tensor in model_tensors(model).values()))
    assert "(weights.transport = 'copy')" in run.log("rollout")
    require_nothing_left(run, wait_until)


class ByHand:
    """A run without a supervisor, each service started by its own command, as containers are."""

    def __init__(self, run: WholeRun, *overrides: str) -> None:
        self.run = run
        config = load_config("tiny", [*SMALL, *overrides, f"run.name={run.name}", "run.directory=runs"])
        run.files.logs.mkdir(parents=True)
        (run.folder / "run.toml").write_text(to_toml(config))
        self.coordinator = self.start("coordinator", "--config", "run.toml")
        for service in ("rollout", "reward", "trainer"):
            self.start(service, "--run", run.name)

    def start(self, service: str, *arguments: str, log: str = "") -> subprocess.Popen[str]:
        path = self.run.files.logs / f"{service}-{log or 0}.log"
        command = [sys.executable, "-m", f"services.{service}", *arguments]
        return self.run.command("sh", "-c", 'exec "$@" > "$0" 2>&1', str(path), *command)


def first_update(policy: Path) -> bool:
    """Whether it is under way in the set; which may not be there, or just be made."""
    try:
        return read_state(policy) == SetState(WeightState.WRITING, 1)
    except WeightsError:
        return False


def test_a_replica_killed_in_the_middle_of_an_update_is_replaced_by_one_with_the_right_version(
    run: WholeRun, wait_until: WaitUntil
) -> None:
    hand = ByHand(run, VLLM, "eval.rows=0", "ppo.advantage=reinforce_pp", "trainer.epochs=40")
    policy = run.shared.weights / "policy"
    wait_until(lambda: first_update(policy), "the first update", ENDS_WITHIN / 2)
    victim = run.pid("rollout")
    ((engine, _),) = STARTED.findall(run.log("rollout"))
    os.kill(victim, signal.SIGKILL)
    assert read_state(policy) == SetState(WeightState.WRITING, 1), "the update was over: nothing is tested"
    hand.start("rollout", "--run", run.name, "--replica", "0", log="again")
    wait_until(lambda: process_start(int(engine)) == 0, "the end of the killed replica's engine", GONE_WITHIN)
    code = hand.coordinator.wait(ENDS_WITHIN)
    log = run.log("coordinator")
    assert code == 0, log
    assert f"rollout 0 (pid {victim}) is gone" in log
    assert log.count("rollout 0 is ready") == 2
    assert run.summary().finished
    require_agreement(run, 2)
    assert [line.values["samples"] for line in run.steps()] == [16, 16]
    again = (run.files.logs / "rollout-again.log").read_text()
    assert len(STARTED.findall(again)) == 1
    assert "policy@1: " in again, "the new replica has not proved the version of the update in which the old one died"
    assert "policy@0: " not in again
    require_nothing_left(run, wait_until)


def test_smollm2_trains_on_shared_weights(
    run: WholeRun, wait_until: WaitUntil, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine heads for three of keys, 49152 tokens tied to the embedding, thirty layers, a chat template."""
    monkeypatch.setenv("QUARTET_MODELS", str(smollm2))
    complete(
        run, "smollm2", VLLM, "run.steps=1", "prompts.per_step=4", "rollout.rows=4", "rollout.max_new_tokens=6",
        "rollout.threads=1", "eval.rows=0", "ppo.advantage=reinforce_pp", "log.samples=0",
    )  # fmt: skip
    require_agreement(run, 1)
    require_transport(run, "alias", 0)
    assert len(run.samples()) == 4
    require_nothing_left(run, wait_until)
