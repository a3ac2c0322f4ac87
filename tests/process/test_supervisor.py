"""``quartet up``: services start, are watched, blamed and stopped. Real processes, signals, logs, terminal."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import ENDS_WITHIN, Up, WaitUntil

from common.config_loading import load_config
from common.processes import is_alive, process_start, registered

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def up(run_name: str, tmp_path: Path, wait_until: WaitUntil) -> Iterator[Up]:
    case = Up(run_name, tmp_path, wait_until)
    yield case
    case.close()


def test_a_run_to_its_end_leaves_files_and_nothing_else(up: Up) -> None:
    process = up.start({"coordinator-0": "steps 3"}, "rollout.threads=2", "run.steps=3", "run.seed=7")
    up.running(6)
    code, out, err = up.finish(process)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    expected = "reward 0.100  accuracy 0.050  kl 0.010  12.5 samples/s  0.5 s/step  left 1m15s"
    assert lines[0] == "step 0/3  held-out accuracy 0.500  on 40 rows  left 1m15s"
    assert lines[1] == f"step 1/3  {expected}"
    assert [line.split("  ")[0] for line in lines[:4]] == ["step 0/3", "step 1/3", "step 2/3", "step 3/3"]
    assert lines[4] == f"run {up.run}: 3 steps, 384 samples in 12s"
    assert "0.500 -> 0.900" in lines[5]
    assert "0.450 -> 0.850" in lines[6]
    assert "GENERATE 7.0 s" in lines[7]
    up.assert_nothing_left()
    config = load_config(str(up.files.config))
    assert (config.run.seed, config.run.steps, config.rollout.threads) == (7, 3, 2)
    names = sorted(path.stem for path in up.files.logs.iterdir())
    assert names == ["coordinator-0", "critic-0", "reward-0", "reward-1", "rollout-0", "trainer-0"]
    assert "rollout-0 started, threads 2, session leader True" in up.log("rollout-0")
    assert "trainer-0 started, threads 1, session leader True" in up.log("trainer-0")


def test_no_critic_is_started_without_gae(up: Up) -> None:
    code, _, err = up.finish(
        up.start({"coordinator-0": "steps 1"}, "ppo.advantage=grpo", "rollout.responses_per_prompt=2")
    )
    assert (code, err) == (0, "")
    assert not (up.files.logs / "critic-0.log").exists()


@pytest.mark.parametrize("victim", ["coordinator-0", "rollout-0", "critic-0", "trainer-0"])
def test_whoever_is_killed_is_named_with_its_log(up: Up, victim: str) -> None:
    process = up.start({"coordinator-0": "wait"})
    pid = up.running(6)[victim].pid
    os.kill(pid, signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 1
    first = err.splitlines()[0]
    assert first.startswith(f"error: {victim} (process {pid}) killed by SIGKILL. Last lines of ")
    assert first.endswith(f"{victim}.log:")
    assert f"    {victim} started, threads 1" in err
    assert err.count("error: ") == 1
    up.assert_nothing_left()


def test_a_run_on_a_gpu_has_a_holder_and_does_not_go_on_without_it(up: Up) -> None:
    process = up.start({"coordinator-0": "wait"}, "trainer.device=cuda:0")
    pid = up.running(7)["holder-0"].pid
    os.kill(pid, signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 1
    assert err.startswith(f"error: holder-0 (process {pid}) killed by SIGKILL")
    up.assert_nothing_left()


def test_a_service_that_gives_up_is_named_with_its_reason(up: Up) -> None:
    code, _, err = up.finish(up.start({"coordinator-0": "wait", "critic-0": "exit 3"}))
    assert code == 1
    assert re.search(r"^error: critic-0 \(process \d+\) exited with code 3\. ", err)
    assert "    critic gives up: a reason to find in its log" in err
    up.assert_nothing_left()


def test_ending_without_being_told_is_a_death_even_with_code_0(up: Up) -> None:
    code, _, err = up.finish(up.start({"coordinator-0": "wait", "trainer-0": "exit 0"}, stop_s=1.0))
    assert code == 1
    assert re.search(r"^error: trainer-0 \(process \d+\) exited with code 0 before the coordinator said stop", err)
    up.assert_nothing_left()


def test_the_coordinator_is_not_blamed_for_a_death_before_its_own(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait"})
    seen = up.running(6)
    os.kill(process.pid, signal.SIGSTOP)  # so that it hears of both deaths at the same time
    for victim in ("trainer-0", "coordinator-0"):
        os.kill(seen[victim].pid, signal.SIGKILL)
        wait_until(lambda victim=victim: not is_alive(seen[victim]), f"{victim} is dead")
    os.kill(process.pid, signal.SIGCONT)
    code, _, err = up.finish(process)
    assert code == 1
    assert err.startswith("error: trainer-0 ")


def test_one_of_several_reward_replicas_may_die_and_the_last_may_not(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait"})
    seen = up.running(6)
    os.kill(seen["reward-1"].pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(seen["reward-1"]), "reward-1 is dead")
    assert process.stderr is not None
    ready, _, _ = select.select([process.stderr], [], [], ENDS_WITHIN)
    assert ready, "no warning was printed"
    assert is_alive(seen["trainer-0"])
    os.kill(seen["reward-0"].pid, signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 1
    assert re.match(r"warning: reward-1 \(process \d+\) killed by SIGKILL", err)
    assert "The run goes on with reward-0" in err
    assert re.search(r"^error: reward-0 \(process \d+\) killed by SIGKILL", err, re.MULTILINE)
    up.assert_nothing_left()


@pytest.mark.parametrize(("sig", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_every_service_cleanly(up: Up, sig: signal.Signals, expected: int) -> None:
    process = up.start({"coordinator-0": "wait"})
    up.running(6)
    asked = time.monotonic()
    process.send_signal(sig)
    code, _, err = up.finish(process)
    assert code == expected
    assert time.monotonic() - asked < 4.0
    assert err.splitlines() == [f"{sig.name}: stopping, at most 4 s (once more kills at once)"]
    up.assert_nothing_left()


def test_a_service_that_does_not_obey_is_killed_at_the_limit(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait", "trainer-0": "deaf"}, stop_s=2.5)
    wait_until((up.files.path / "deaf").exists, "trainer ignores SIGTERM")
    process.send_signal(signal.SIGTERM)
    code, _, err = up.finish(process)
    assert code == 143
    assert "warning: still running after timeouts.stop = 2.5 s, killed: trainer-0" in err
    up.assert_nothing_left()


def test_the_holder_ends_after_those_that_compute_on_its_memory(up: Up, wait_until: WaitUntil) -> None:
    """Here the supervisor itself has to stop everybody: the coordinator is dead."""
    process = up.start({"coordinator-0": "wait", "trainer-0": "deaf"}, "trainer.device=cuda:0", stop_s=20.0)
    wait_until((up.files.path / "deaf").exists, "trainer ignores SIGTERM")
    wait_until(lambda: len(registered(up.shared.processes)) == 7, "all are registered")
    seen = {entry.service: entry for entry in registered(up.shared.processes)}
    os.kill(seen["coordinator"].pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(seen[name]) for name in ("rollout", "critic")), "others stop")
    assert is_alive(seen["trainer"])
    assert is_alive(seen["holder"])
    os.kill(seen["trainer"].pid, signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 1
    assert "still running after" not in err
    up.assert_nothing_left()


def test_a_second_ctrl_c_kills_at_once(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait", "trainer-0": "deaf"}, stop_s=600.0)
    wait_until((up.files.path / "deaf").exists, "trainer ignores SIGTERM")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("SIGINT: stopping")
    process.send_signal(signal.SIGINT)
    code, _, err = up.finish(process)
    assert code == 130
    assert "killing what is left" in err
    up.assert_nothing_left()


def test_what_a_dead_service_started_goes_with_it(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait", "reward-1": "spawn"})
    seen = up.running(6)
    child = int((up.files.path / "reward-1.spawn").read_text())
    assert process_start(child)
    os.kill(seen["reward-1"].pid, signal.SIGKILL)
    wait_until(lambda: process_start(child) == 0, "the dead service's child is gone")
    assert process.poll() is None


def quartet(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=ENDS_WITHIN, check=False)


def test_a_live_and_a_finished_name_are_refused(up: Up) -> None:
    process = up.start({"coordinator-0": "steps 6"})
    coordinator = up.running(6)["coordinator-0"].pid
    second = quartet("up", "--name", up.run, cwd=up.folder)
    assert second.returncode == 2
    assert f"run '{up.run}' is live: its coordinator is process {coordinator}" in second.stderr
    shown = json.loads(quartet("status", up.run, "--json", cwd=up.folder).stdout)
    assert [(state["state"], state["pid"], state["status"]["phase"]) for state in shown] == [
        ("live", coordinator, "GENERATE")
    ]
    assert quartet("clean", up.run, cwd=up.folder).stdout == "nothing to clean\n"
    assert up.finish(process)[0] == 0
    third = quartet("up", "--name", up.run, cwd=up.folder)
    assert third.returncode == 2
    assert f"run '{up.run}' is finished: choose another --name, or delete runs/{up.run}" in third.stderr
    assert third.stderr.count("\n") == 1
    assert "0.500 -> 0.900" in quartet("status", up.run, cwd=up.folder).stdout
    from_elsewhere = quartet("status", up.run, "--directory", str(up.folder / "runs"), cwd=up.folder.parent)
    assert "0.500 -> 0.900" in from_elsewhere.stdout
    assert not list(up.files.path.glob("attempt-*"))


def test_a_wrong_config_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = quartet("up", "--set", "rollout.temprature=1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "rollout.temprature" in done.stderr
    assert "rollout.temperature" in done.stderr
    assert not (tmp_path / "runs").exists()
