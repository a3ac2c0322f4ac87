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


def test_a_function_that_always_raises_leaves_nothing_to_measure_and_says_so(run: WholeRun) -> None:
    ended = run.complete(f"reward.function={SOMETIMES}:never", "run.steps=1")
    assert ended.code == 0, ended.err
    summary = run.summary()
    assert (summary.samples, summary.masked_samples) == (16, 16)
    figures = (summary.accuracy_first, summary.accuracy_last, summary.reward_first, summary.reward_last)
    assert figures == (None, None, None, None)
    assert "16 samples (16 masked, see " in ended.out
    assert "reward    not measured" in ended.out
    before, step, after = run.metrics()
    assert (before.values, after.values) == ({"eval/rows": 16, "eval/masked": 16},) * 2
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
