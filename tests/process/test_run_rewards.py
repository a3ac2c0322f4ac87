"""Whole runs whose reward function fails: an error masks its sample out and is counted; it is never a reward of 0."""

from __future__ import annotations

import math

import pytest

from tests.process.whole_runs import FUNCTIONS, WholeRun

SOMETIMES = FUNCTIONS / "sometimes.py"


def test_samples_that_cannot_be_scored_count_in_no_mean(run: WholeRun) -> None:
    ended = run.complete(f"reward.function={SOMETIMES}:score", "run.steps=1")
    assert ended.code == 0, ended.err
    samples = run.samples()
    masked = [sample for sample in samples if sample.masked]
    counted = [sample for sample in samples if not sample.masked]
    assert masked
    assert counted
    for sample in samples:
        truth = int(bytes(sample.ground_truth).strip(b'"'))
        assert sample.masked == (truth % 4 in (0, 1)), sample
    assert {(sample.reward, sample.accuracy) for sample in masked} == {(None, None)}
    rewards = [sample.reward for sample in counted if sample.reward is not None]
    assert min(rewards) == 1.0
    before, step, after = run.metrics()
    assert (step.values["samples"], step.values["masked"]) == (len(counted), len(masked))
    assert step.values["reward"] == pytest.approx(sum(rewards) / len(counted))
    for line in (before, after):
        assert line.values["eval/masked"] > 0
        assert line.values["eval/rows"] == 16
        assert line.values["eval/reward"] >= 1.0, "an error counted as 0 would pull the mean below every score"
    summary = run.summary()
    assert summary.masked_samples == len(masked)
    assert summary.reward_first == step.values["reward"]
    assert summary.accuracy_first is not None
    assert summary.accuracy_first >= 1.0
    assert all(math.isfinite(value) for value in step.values.values())
    assert f"16 samples ({len(masked)} masked, see runs/{run.name}/logs/coordinator-0.log)" in ended.out
    log = run.log("coordinator")
    assert "is masked out: not scored after 2 tries: sometimes.py:score raised ZeroDivisionError" in log
    assert "sometimes.py:score returned nan; expected a finite float" in log
    run.assert_nothing_left()


def test_a_function_that_always_raises_ends_the_run_before_its_first_step(run: WholeRun) -> None:
    ended = run.complete(f"reward.function={SOMETIMES}:never")
    assert ended.code == 1
    assert (
        "evaluation before the first step: none of 16 samples could be scored; the first: not scored after 2 tries: "
        "sometimes.py:never raised ConnectionError: the judge is not there" in ended.err
    )
    assert "mend what reward.* names, then go on with this run" in ended.err
    run.assert_nothing_left()


def test_steps_without_a_score_are_measured_as_such_and_the_third_in_a_row_ends_the_run(run: WholeRun) -> None:
    ended = run.complete(f"reward.function={SOMETIMES}:never", "run.steps=9", "eval.rows=0")
    assert ended.code == 1
    assert "steps 1 to 3: no sample could be scored; the first of step 3: not scored after 2 tries: " in ended.err
    first, second = run.metrics()
    for step in (first, second):
        assert step.values["masked"] == 16
        assert "reward" not in step.values
        assert "accuracy" not in step.values
    log = run.log("coordinator")
    assert (
        "step 1: none of 16 samples could be scored, so that nothing was learned; the first: not scored after 2 tries: "
        "sometimes.py:never raised ConnectionError: the judge is not there" in log
    )
    assert "nan" not in run.files.metrics.read_text().lower()
    run.assert_nothing_left()
