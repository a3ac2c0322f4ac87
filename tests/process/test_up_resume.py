"""``quartet up --resume``: goes on in the same directory, with a config that fits, or says why not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config_loading import load_config, to_toml
from tests.process.supervised import Up, WaitUntil
from tools.display import read_status


@pytest.fixture
def up(run_name: str, tmp_path: Path, wait_until: WaitUntil) -> Iterator[Up]:
    case = Up(run_name, tmp_path, wait_until)
    yield case
    case.close()


def interrupt(up: Up, *overrides: str) -> None:
    """A run that is stopped after its second step."""
    process = up.start({"coordinator-0": "steps 200"}, *overrides)
    up.running(6)
    up.wait_until(lambda: (status := read_status(up.shared)) is not None and status.step > 2, "the third step")
    process.send_signal(signal.SIGTERM)
    assert up.finish(process)[0] == 143
    assert up.files.metrics.read_text().count("\n") >= 3


def test_an_unfinished_run_goes_on_in_its_directory(up: Up) -> None:
    interrupt(up, "run.seed=7")
    config, metrics = up.files.config.read_text(), up.files.metrics.read_text()
    code, out, err = up.finish(up.start({"coordinator-0": "steps 1"}, resume=True))
    assert code == 0, err
    assert err == f"run '{up.run}' goes on in runs/{up.run}\n"
    assert up.files.config.read_text() == config
    assert up.files.metrics.read_text().startswith(metrics)
    assert out.count("step 1/") == 1, "what was shown before is not shown again"
    assert not list(up.files.path.glob("attempt-*"))
    assert not list(up.files.path.glob("config-*"))
    assert up.log("coordinator-0").count("---- coordinator-0 resumed ----") == 1
    second = up.log("trainer-0").split("---- trainer-0 resumed ----")[1]
    assert second.startswith("\ntrainer-0 started, threads 1, session leader True")
    up.assert_nothing_left()


def test_a_config_that_changes_no_number_is_taken_and_the_old_one_kept(up: Up) -> None:
    interrupt(up, "trainer.optimizer.schedule=constant", "critic.optimizer.schedule=constant")
    before = up.files.config.read_text()
    changed = ("run.steps=500", "reward.replicas=1", "timeouts.generate=7", "restart.limit=3")
    code, _, err = up.finish(up.start({"coordinator-0": "steps 1"}, *changed, resume=True))
    assert code == 0, err
    assert f"goes on in runs/{up.run}; its config has changed, the one before is runs/{up.run}/config-1.toml\n" in err
    assert (up.files.path / "config-1.toml").read_text() == before
    now = load_config(str(up.files.config))
    assert (now.run.steps, now.reward.replicas, now.timeouts.generate, now.restart.limit) == (500, 1, 7.0, 3)


def test_a_config_that_does_not_fit_is_refused_with_the_differences(up: Up) -> None:
    interrupt(up)
    kept = sorted(path.name for path in up.files.path.iterdir())
    wrong = ("run.seed=8", "rollout.temperature=0.5", "run.steps=1", "timeouts.generate=7")
    code, _, err = up.finish(up.start({"coordinator-0": "steps 1"}, *wrong, resume=True))
    assert code == 2
    assert err.splitlines() == [
        f"run '{up.run}' cannot be resumed: the config does not fit runs/{up.run}/config.toml:",
        "  run.seed: was 1, now 8",
        "  run.steps: was 200, now 1 (it may only grow)",
        "  rollout.temperature: was 1.0, now 0.5",
        f"Resume it with its own config (`quartet up --resume --name {up.run}`), or choose another --name",
    ]
    assert sorted(path.name for path in up.files.path.iterdir()) == kept


def test_a_preset_may_be_named_and_must_fit_too(up: Up) -> None:
    interrupt(up)
    refused = up.quartet("up", "tiny", "--resume", "--name", up.run)
    assert refused.returncode == 2
    assert f"quartet up: run '{up.run}' cannot be resumed: the config does not fit" in refused.stderr
    assert "\n  trainer.optimizer.warmup_steps: was 0, now " in refused.stderr
    assert "reward.replicas" not in refused.stderr


def test_a_run_that_never_was_is_not_resumed(up: Up) -> None:
    refused = up.quartet("up", "--resume", "--name", up.run)
    assert refused.returncode == 2
    assert f"quartet up: run '{up.run}' cannot be resumed: runs/{up.run} holds no earlier run" in refused.stderr
    assert not (up.folder / "runs").exists()
    named = up.quartet("up", "tiny", "--resume", "--name", up.run)
    assert named.returncode == 2
    assert f"quartet up: run '{up.run}' cannot be resumed: runs/{up.run} holds no earlier run" in named.stderr
    assert not (up.folder / "runs").exists()


def test_resume_needs_a_name_or_a_config(up: Up) -> None:
    refused = up.quartet("up", "--resume", "--set", "run.steps=3")
    assert refused.returncode == 2
    assert "quartet up: --resume: which run? Give its --name, or the preset or file" in refused.stderr


def test_a_finished_run_is_not_resumed(up: Up) -> None:
    assert up.finish(up.start({"coordinator-0": "steps 1"}))[0] == 0
    refused = up.quartet("up", "--resume", "--name", up.run)
    assert refused.returncode == 2
    assert f"quartet up: run '{up.run}' is finished: there is nothing to resume" in refused.stderr


def test_a_live_run_is_not_resumed(up: Up) -> None:
    process = up.start({"coordinator-0": "wait"})
    up.running(6)
    refused = up.quartet("up", "--resume", "--name", up.run)
    assert refused.returncode == 2
    assert f"run '{up.run}' is live" in refused.stderr
    process.send_signal(signal.SIGTERM)
    assert up.finish(process)[0] == 143


def test_the_status_of_an_unfinished_run_says_how_to_go_on(up: Up) -> None:
    interrupt(up)
    told = up.quartet("status", up.run)
    assert f"not finished; its files are in runs/{up.run}; `quartet up --resume --name {up.run}` goes on" in told.stdout
    folder = up.folder / "runs"
    told = up.quartet("status", up.run, "--directory", str(folder))
    assert f"`quartet up --resume --name {up.run} --set run.directory={folder}` goes on" in told.stdout


def test_a_coordinator_that_dies_before_it_has_the_lock_resumes_again(up: Up, wait_until: WaitUntil) -> None:
    interrupt(up)
    process = up.start({"coordinator-0": "steps 200|hang|steps 1"}, restarts=1, resume=True)
    wait_until((up.files.path / "coordinator-0.hang").exists, "the coordinator hangs before it has the lock")
    os.kill(int((up.files.path / "coordinator-0.hang").read_text()), signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 0, err
    assert up.log("coordinator-0").count("session leader True") == 3


def test_a_config_of_another_version_is_told(up: Up) -> None:
    interrupt(up)
    text = to_toml(load_config(str(up.files.config))).replace("[ppo]", "[ppo]\nforgotten = 1")
    up.files.config.write_text(text)
    refused = up.quartet("up", "tiny", "--resume", "--name", up.run)
    assert refused.returncode == 2
    assert f"run '{up.run}' cannot be resumed: ppo.forgotten: no such key" in refused.stderr
