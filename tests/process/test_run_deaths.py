"""Whole runs that are stopped or killed: what ends, what is said, and that nothing is left in memory."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from common.processes import children
from tests.process.whole_runs import ENDLESS, GONE_WITHIN, WaitUntil, WholeRun, finish


def test_ctrl_c_ends_everything_cleanly_and_there_is_one_coordinator(run: WholeRun) -> None:
    process = run.start(*ENDLESS)
    run.reach(2)
    config = str(run.files.config.relative_to(run.folder))
    second = finish(run.command(sys.executable, "-m", "services.coordinator", "--config", config))
    assert second.code == 1
    (line,) = second.err.splitlines()
    assert f"process {run.pid('coordinator')} coordinates it" in line
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130
    assert time.monotonic() - asked < GONE_WITHIN
    assert ended.err.splitlines() == ["SIGINT: stopping, at most 10 s (once more kills at once)"]
    run.assert_nothing_left()
    summary = run.summary()
    assert not summary.finished
    assert summary.steps >= 1
    assert len(run.steps()) == summary.steps
    assert "the run was stopped" in run.log("trainer")
    assert "Traceback" not in "".join(path.read_text() for path in run.files.logs.iterdir())


@pytest.mark.parametrize("service", ["rollout", "reward"])
def test_a_replica_that_is_killed_comes_back_and_the_run_goes_on(run: WholeRun, service: str) -> None:
    process = run.start(*ENDLESS)
    run.reach(2)
    victim = run.pid(service)
    os.kill(victim, signal.SIGKILL)
    run.wait_until(lambda: f"{service} 0 is ready" in successors_log(run, service, victim), "its successor", 30.0)
    status = run.status()
    assert status is not None
    run.reach(status.step + 2)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended.err
    warning, asked = ended.err.splitlines()
    assert re.match(
        rf"warning: {service}-0 \(process {victim}\) killed by SIGKILL, started again as process \d+ ", warning
    )
    assert asked.startswith("SIGINT: stopping")
    assert [line.step for line in run.steps()] == list(range(1, 1 + len(run.steps())))
    run.assert_nothing_left()


def successors_log(run: WholeRun, service: str, victim: int) -> str:
    return run.log(service).partition(f"---- {service}-0 started again after process {victim}, killed by SIGKILL")[2]


def test_without_restarts_a_killed_coordinator_is_named_with_its_last_lines(run: WholeRun) -> None:
    process = run.start(*ENDLESS, "restart.limit=0")
    run.reach(2)
    victim = run.pid("coordinator")
    os.kill(victim, signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 1
    first, *tail = ended.err.splitlines()
    log = f"runs/{run.name}/logs/coordinator-0.log"
    assert first == f"error: coordinator-0 (process {victim}) killed by SIGKILL. Last lines of {log}:"
    assert any(re.search(r"^    .* coordinator INFO step \d+/1000000 reward", line) for line in tail)
    assert ended.err.count("error: ") == 1
    run.assert_nothing_left()


def test_without_restarts_a_trainer_that_is_killed_in_an_update_ends_the_run_and_is_named(run: WholeRun) -> None:
    process = run.start(*ENDLESS, "trainer.epochs=1000000", "restart.limit=0")
    run.reach(1, "UPDATE")
    victim = run.pid("trainer")
    os.kill(victim, signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 1
    assert ended.err.startswith(f"error: trainer-0 (process {victim}) killed by SIGKILL. Last lines of ")
    assert "    " in ended.err
    assert ended.err.count("error: ") == 1
    log = run.log("coordinator")
    # Whether the coordinator sees the death itself or is first told to stop by the supervisor, who saw it, is a race.
    assert f"trainer 0 (pid {victim}) is gone: its process ended" in log
    assert re.search(r"the run failed in step 1, phase UPDATE: trainer 0 died|stopped in step 1, phase UPDATE", log)
    assert "Traceback" not in log
    assert not run.summary().finished
    run.assert_nothing_left()


def test_nothing_outlives_a_killed_supervisor(run: WholeRun) -> None:
    process = run.start(*ENDLESS)
    run.reach(2)
    assert len(run.processes()) == 8, "supervisor, guardian, five services and the reward functions' child"
    process.kill()
    ended = finish(process)
    assert ended.err == f"warning: `quartet up` is gone: stopping run '{run.name}', at most 10 s\n"
    run.assert_nothing_left(within=0.0)
    assert not run.summary().finished
    assert "the run was stopped" in run.log("trainer")


def test_nothing_outlives_the_cleaning_after_supervisor_guardian_and_coordinator(
    run: WholeRun, wait_until: WaitUntil
) -> None:
    process = run.start(*ENDLESS)
    run.reach(2)
    (guardian,) = (parent for parent, started in children().items() if run.pid("trainer") in started)
    os.kill(process.pid, signal.SIGSTOP)  # so that it sees nobody's end
    for pid in (guardian, run.pid("coordinator"), process.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not run.processes(), "the end of every process", GONE_WITHIN)
    assert {"tokens", "weights", "bus.sock"} <= set(os.listdir(run.shared.path))
    assert finish(process).err == ""
    cleaned = run.quartet("clean", run.name)
    assert cleaned.code == 0
    assert cleaned.out.startswith(f"{run.name}: removed {run.shared.path} ")
    run.assert_nothing_left()
    assert run.quartet("clean", run.name).out == "nothing to clean\n"
