"""Services that die are started again by ``quartet up``: who, how often, what is told. Real processes and signals."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import Up, WaitUntil

from common.processes import ProcessEntry, is_alive, process_start, registered
from common.restarts import LONGEST_WAIT_S, Deaths, wait_before
from common.run_lock import holder, supervisor
from tools.clean import clean
from tools.display import read_status


@pytest.fixture
def up(run_name: str, tmp_path: Path, wait_until: WaitUntil) -> Iterator[Up]:
    case = Up(run_name, tmp_path, wait_until)
    yield case
    case.close()


def kill(up: Up, name: str) -> ProcessEntry:
    """Kills a service and waits until another process of that name is on the run's list; returns the dead one."""
    dead = up.latest(name)
    os.kill(dead.pid, signal.SIGKILL)
    up.wait_until(lambda: up.on_the_list().get(name, dead) != dead, f"{name} is started again")
    assert len([entry for entry in registered(up.shared.processes) if entry.pid == dead.pid]) == 0
    return dead


@pytest.mark.parametrize("victim", ["rollout-0", "reward-1", "critic-0", "trainer-0"])
def test_a_replica_that_is_killed_is_started_again(up: Up, victim: str) -> None:
    process = up.start({"coordinator-0": "wait"}, restarts=5)
    others = {name: entry for name, entry in up.running(6).items() if name != victim}
    dead = kill(up, victim)
    successor = up.latest(victim)
    up.wait_until(lambda: up.log(victim).count("is ready after") == 2, "its successor has joined the run")
    assert all(map(is_alive, others.values()))
    process.send_signal(signal.SIGTERM)
    code, _, err = up.finish(process)
    assert code == 143
    assert err.splitlines()[0] == (
        f"warning: {victim} (process {dead.pid}) killed by SIGKILL, started again as process {successor.pid} "
        "(death 1 of 5 without a finished step)"
    )
    assert len(err.splitlines()) == 2, err
    first, second = up.log(victim).split(
        f"---- {victim} started again after process {dead.pid}, killed by SIGKILL ----"
    )
    assert first.count("session leader True") == second.count("session leader True") == 1
    up.assert_nothing_left()


def test_a_coordinator_that_is_killed_is_started_to_take_over_and_the_replicas_stay(
    up: Up, wait_until: WaitUntil
) -> None:
    process = up.start({"coordinator-0": "wait|steps 2"}, restarts=5)
    others = {name: entry for name, entry in up.running(6).items() if name != "coordinator-0"}
    dead = kill(up, "coordinator-0")
    wait_until(lambda: up.log("trainer-0").count("trainer loaded") == 1, "the trainer has loaded once")
    assert all(map(is_alive, others.values()))
    code, out, err = up.finish(process)
    assert code == 0, err
    assert out.splitlines()[1].startswith("step 1/")
    assert f"coordinator-0 (process {dead.pid}) killed by SIGKILL, started again" in err
    assert err.count("\n") == 1
    second = up.log("coordinator-0").split("---- coordinator-0 started again")[1]
    assert "with 5 replicas, in epoch 2" in second
    up.assert_nothing_left()


def test_a_coordinator_that_never_had_the_lock_leaves_nothing_to_take_over(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "hang|steps 1"}, restarts=5)
    wait_until((up.files.path / "coordinator-0.hang").exists, "the coordinator hangs before it has the lock")
    os.kill(int((up.files.path / "coordinator-0.hang").read_text()), signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 0, err
    assert up.log("coordinator-0").count("session leader True") == 2


def test_a_run_whose_coordinator_is_being_started_again_is_not_taken_for_dead(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait|hang|wait"}, restarts=5)
    seen = up.running(6)
    os.kill(seen["coordinator-0"].pid, signal.SIGKILL)
    wait_until((up.files.path / "coordinator-0.hang").exists, "the second coordinator hangs before it has the lock")
    assert holder(up.shared) is None
    assert supervisor(up.shared) == process.pid
    assert clean(up.run) == []
    assert is_alive(seen["trainer-0"])
    told = up.quartet("status", up.run)
    assert told.stdout == f"{up.run}: its coordinator was killed; `quartet up` (process {process.pid}) starts another\n"
    second = up.quartet("up", "--name", up.run)
    assert second.returncode == 2
    assert f"run '{up.run}' is live: process {process.pid} is about to start its coordinator again" in second.stderr
    os.kill(int((up.files.path / "coordinator-0.hang").read_text()), signal.SIGKILL)
    wait_until(lambda: holder(up.shared) is not None, "the third coordinator has the lock")
    assert is_alive(seen["trainer-0"])
    process.send_signal(signal.SIGTERM)
    assert up.finish(process)[0] == 143
    up.assert_nothing_left()


def test_a_service_that_keeps_dying_ends_the_run_after_the_limit(up: Up) -> None:
    began = time.monotonic()
    code, _, err = up.finish(up.start({"coordinator-0": "wait", "critic-0": "exit 3"}, restarts=2))
    assert code == 1
    first, second, last = [line for line in err.splitlines() if not line.startswith((" ", "Stopping"))]
    reason = r": critic gives up: a reason to find in its log$"
    assert re.match(rf"warning: critic-0 .* exited with code 3, started again .*\(death 1 of 2 .*\){reason}", first)
    assert re.match(rf"warning: critic-0 .* exited with code 3, started again .*\(death 2 of 2 .*\){reason}", second)
    assert re.match(r"error: critic-0 \(process \d+\) exited with code 3; death 3 without a finished step", last)
    assert "with restart.limit = 2. Last lines of " in last
    assert "    critic gives up: a reason to find in its log" in err
    assert up.log("critic-0").count("critic gives up") == 3
    assert time.monotonic() - began > wait_before(2), "the second start waits"
    up.assert_nothing_left()


def test_a_finished_step_is_a_new_beginning(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "steps 200"}, restarts=1)
    up.running(6)
    for _ in range(2):
        status = read_status(up.shared)
        before = status.step if status else 0
        kill(up, "rollout-0")
        wait_until(lambda before=before: (s := read_status(up.shared)) is not None and s.step > before + 1, "a step")
    process.send_signal(signal.SIGTERM)
    code, _, err = up.finish(process)
    assert code == 143
    assert err.count("(death 1 of 1 without a finished step)") == 2


@pytest.mark.parametrize(("name", "code"), [("coordinator-0", 1), ("coordinator-0", 2), ("trainer-0", 2)])
def test_an_end_by_decision_is_final(up: Up, name: str, code: int) -> None:
    ended, _, err = up.finish(up.start({"coordinator-0": "wait", name: f"exit {code}"}, restarts=5))
    assert ended == 1
    assert re.match(rf"error: {name} \(process \d+\) exited with code {code}\. Last lines of ", err)
    assert "started again" not in err
    assert up.log(name).count("gives up") == 1
    up.assert_nothing_left()


def test_the_holder_is_not_started_again(up: Up) -> None:
    process = up.start({"coordinator-0": "wait"}, "trainer.device=cuda:0", restarts=5)
    pid = up.running(7)["holder-0"].pid
    os.kill(pid, signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 1
    assert err.startswith(f"error: holder-0 (process {pid}) killed by SIGKILL. ")
    up.assert_nothing_left()


def test_whoever_dies_while_the_run_stops_stays_dead(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait", "trainer-0": "deaf"}, restarts=5, stop_s=600.0)
    wait_until((up.files.path / "deaf").exists, "trainer ignores SIGTERM")
    wait_until(lambda: "trainer-0" in up.on_the_list(), "it is registered")
    trainer = up.latest("trainer-0").pid  # now: the list goes with the coordinator
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("SIGTERM: stopping")
    os.kill(trainer, signal.SIGKILL)
    code, _, err = up.finish(process)
    assert (code, err) == (143, "")
    assert up.log("trainer-0").count("trainer-0 started") == 1
    up.assert_nothing_left()


def test_a_run_stops_at_once_while_a_restart_waits(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait", "critic-0": "exit 3"}, restarts=50)
    wait_until(lambda: up.log("critic-0").count("gives up") >= 4, "the waits have grown")
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert up.finish(process)[0] == 143
    assert time.monotonic() - asked < 4.0
    up.assert_nothing_left()


@pytest.mark.parametrize("kind", ["spawn", "leave", "daemon"])
def test_what_a_dead_service_left_is_gone_when_its_successor_starts(up: Up, wait_until: WaitUntil, kind: str) -> None:
    process = up.start({"coordinator-0": "wait", "rollout-0": f"{kind}|"}, restarts=5)
    up.running(6)
    child = int((up.files.path / f"rollout-0.{kind}").read_text())
    assert process_start(child)
    kill(up, "rollout-0")
    assert not process_start(child)
    process.send_signal(signal.SIGTERM)
    assert up.finish(process)[0] == 143


def test_what_a_living_service_has_set_going_survives_the_death_of_another(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait", "reward-0": "daemon"}, restarts=5)
    up.running(6)
    child = int((up.files.path / "reward-0.daemon").read_text())
    kill(up, "rollout-0")
    assert process_start(child)
    process.send_signal(signal.SIGTERM)
    assert up.finish(process)[0] == 143
    assert not process_start(child)


def test_the_stacks_of_a_service_that_is_stuck_in_a_computation_are_in_its_log(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait", "trainer-0": "compute"}, restarts=5, stop_s=1.0)
    wait_until(lambda: "trainer-0" in up.on_the_list() and "computes" in up.log("trainer-0"), "the trainer computes")
    stuck = up.latest("trainer-0")
    os.kill(stuck.pid, signal.SIGUSR1)
    wait_until(lambda: "Thread 0x" in up.log("trainer-0") and "in main" in up.log("trainer-0"), "stacks in the log")
    shown = up.log("trainer-0")
    assert re.search(r"thread 0x\w+ .*\n  File \".*fake_service\.py\", line \d+ in ready", shown, re.IGNORECASE), shown
    assert re.search(r"fake_service\.py\", line \d+ in main", shown), "the main thread's stack as well"
    assert is_alive(stuck)
    process.send_signal(signal.SIGTERM)
    assert up.finish(process)[0] == 143
    up.assert_nothing_left()


def test_deaths_are_counted_from_the_furthest_step() -> None:
    deaths = Deaths(5)
    assert [deaths.count("trainer-0", step) for step in (0, 0, 3, 3, 4)] == [1, 2, 1, 2, 1]
    assert deaths.count("critic-0", 4) == 1
    assert [deaths.count("trainer-0", step) for step in (2, 4, 5)] == [2, 3, 1]


def test_the_wait_grows_to_its_longest() -> None:
    waits = [wait_before(number) for number in range(1, 8)]
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, LONGEST_WAIT_S, LONGEST_WAIT_S]
