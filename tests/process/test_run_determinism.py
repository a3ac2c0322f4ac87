"""The same run is the same run: twice in a row, whoever generated and scored, and whoever was killed in it."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.whole_runs import FUNCTIONS, Ended, WaitUntil, WholeRun, finish

PHASES = {"GENERATE", "SCORE", "EVALUATE", "ADVANTAGE", "UPDATE", "PUBLISH"}
SERVICES = {"coordinator-0", "rollout-0", "reward-0", "critic-0", "trainer-0"}
Finished = tuple[WholeRun, Ended]


@pytest.fixture(scope="module")
def first(new_run: Callable[[], WholeRun]) -> Finished:
    """Two steps of 16 samples, an evaluation before and after them, seed 1."""
    run = new_run()
    return run, run.complete()


def values(run: WholeRun) -> list[tuple[int, dict[str, float]]]:
    """What depends on the seed alone: metrics without timings."""
    return [(line.step, line.values) for line in run.metrics()]


def step_values(run: WholeRun) -> list[tuple[int, dict[str, float]]]:
    """Without evaluations."""
    return [(line.step, line.values) for line in run.steps()]


def test_a_run_ends_with_0_and_leaves_nothing_in_memory(first: Finished) -> None:
    run, ended = first
    assert ended.code == 0, ended.err
    assert ended.err == ""
    run.assert_nothing_left()


def test_the_summary_has_every_figure(first: Finished) -> None:
    summary = first[0].summary()
    assert summary.finished
    assert (summary.steps, summary.samples, summary.masked_samples) == (2, 32, 0)
    assert (summary.rows_without_ground_truth, summary.rows_too_long) == (0, 0)
    for share in (summary.accuracy_first, summary.accuracy_last, summary.reward_first, summary.reward_last):
        assert share is not None
        assert 0 < share < 1, "exact_match of a model that is half right"
    assert set(summary.phase_s) >= PHASES
    assert all(seconds > 0 for seconds in summary.phase_s.values())
    assert sum(summary.phase_s.values()) < summary.wall_s * 2, "of five processes on two cores"
    assert 0.5 < summary.cache_hit_ratio < 1
    assert summary.epoch == 1


def test_the_figures_fit_each_other(first: Finished) -> None:
    run, ended = first
    before, *steps, after = run.metrics()
    summary = run.summary()
    assert [line.step for line in (before, *steps, after)] == [0, 1, 2, 2]
    assert (before.values["eval/accuracy"], after.values["eval/accuracy"]) == (
        summary.accuracy_first,
        summary.accuracy_last,
    )
    assert [steps[0].values["reward"], steps[1].values["reward"]] == [summary.reward_first, summary.reward_last]
    for line in steps:
        assert all(math.isfinite(value) for value in (*line.values.values(), *line.timings.values()))
        samples = [sample for sample in run.samples() if sample.step == line.step]
        assert [sample.sample for sample in samples] == list(range(16))
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        assert line.values["reward"] == pytest.approx(sum(rewards) / 16)
        assert {(sample.version_low, sample.version_high) for sample in samples} == {(line.step - 1, line.step - 1)}
    assert steps[0].values["policy/grad_norm"] > 0
    assert f"run {run.name}: 2 steps, 32 samples in" in ended.out


def test_ledger_and_logs_are_written(first: Finished) -> None:
    run, _ = first
    with sqlite3.connect(run.files.ledger) as ledger:
        records = [json.loads(record) for (record,) in ledger.execute("SELECT record FROM steps ORDER BY step")]
        samples = ledger.execute("SELECT step, wave, count(*) FROM samples GROUP BY step, wave").fetchall()
        states = {state for (state,) in ledger.execute("SELECT DISTINCT state FROM samples")}
        leases = {state for (state,) in ledger.execute("SELECT DISTINCT state FROM leases")}
        events = ledger.execute("SELECT kind, text FROM events").fetchall()
    ledger.close()
    rows = [(record["step"], record["version"], record["samples"], record["masked"]) for record in records]
    assert rows == [(1, 1, 16, 0), (2, 2, 16, 0)]
    assert samples == [(0, 1, 16), (1, 0, 16), (2, 0, 16), (2, 1, 16)]
    assert (states, leases) == ({"scored"}, {"done"})
    assert ("end", "finished") in events
    logs = {path.stem: path.read_text() for path in run.files.logs.iterdir()}
    assert set(logs) == SERVICES
    assert [name for name, text in logs.items() if "Traceback" in text or " ERROR " in text] == []
    assert "step 2/2 reward" in logs["coordinator-0"]
    for service in SERVICES - {"coordinator-0"}:
        assert "is ready after" in logs[service]


def test_a_finished_name_is_refused(first: Finished) -> None:
    run, _ = first
    samples = run.files.samples.read_bytes()
    ended = run.complete()
    assert ended.code == 2
    assert ended.err.splitlines() == [
        f"quartet up: run '{run.name}' is finished: choose another --name, or delete runs/{run.name}"
    ]
    assert run.files.samples.read_bytes() == samples
    assert not list(run.files.path.glob("attempt-*"))


def test_the_same_seed_gives_the_same_run(first: Finished, run: WholeRun) -> None:
    assert run.complete().code == 0
    assert run.files.samples.read_bytes() == first[0].files.samples.read_bytes()
    assert values(run) == values(first[0])


def test_another_seed_gives_another_run(first: Finished, run: WholeRun) -> None:
    """Its first step has the same weights, so that prompts and draws alone make the difference."""
    assert run.complete("run.seed=2", "run.steps=1", "eval.rows=0").code == 0
    mine, theirs = run.samples(), [sample for sample in first[0].samples() if sample.step == 1]
    assert len(mine) == len(theirs) == 16
    assert [sample.prompt for sample in mine] != [sample.prompt for sample in theirs]
    assert step_values(run)[0] != step_values(first[0])[0]


def test_more_replicas_give_the_same_run(first: Finished, run: WholeRun) -> None:
    assert run.complete("rollout.replicas=2", "reward.replicas=2", "reward.batch_size=3").code == 0
    assert run.files.samples.read_bytes() == first[0].files.samples.read_bytes()
    assert values(run) == values(first[0])
    for replica in (0, 1):
        assert "is ready after" in run.log("rollout", replica)
        assert "is ready after" in run.log("reward", replica)


def test_a_reward_replica_that_is_killed_while_it_scores_changes_nothing(
    first: Finished, run: WholeRun, wait_until: WaitUntil
) -> None:
    function = f"{FUNCTIONS / 'gated.py'}:exact"
    process = run.start(
        "reward.replicas=2", "reward.batch_size=4", "reward.timeout_s=60", f"reward.function={function}", "eval.rows=0"
    )  # fmt: skip
    wait_until(lambda: len(scoring(run)) == 2, "both reward replicas score", 60.0)
    victim = run.pid("reward", 1)
    assert victim in scoring(run)
    os.kill(victim, signal.SIGKILL)
    (run.folder / "go").touch()
    ended = finish(process)
    assert ended.code == 0, ended.err
    assert f"warning: reward-1 (process {victim}) killed by SIGKILL" in ended.err
    assert "started again as process" in ended.err
    assert 1 <= run.steps()[0].timings["retries"] <= 4, "the samples of the batch that died with it"
    assert run.summary().masked_samples == 0
    assert run.files.samples.read_bytes() == first[0].files.samples.read_bytes()
    assert step_values(run) == step_values(first[0])
    run.assert_nothing_left()


def scoring(run: WholeRun) -> list[int]:
    """Reward replicas whose scorer has begun."""
    return [int(Path(path).name.removeprefix("scoring-")) for path in run.folder.glob("scoring-*")]
