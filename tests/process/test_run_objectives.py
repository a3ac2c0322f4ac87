"""Whole runs under other objectives and data than the presets': each part of PPO meets the others once."""

from __future__ import annotations

import json
import math

import pytest

from common.records import StepMetrics
from tests.process.whole_runs import WholeRun


def finite_steps(run: WholeRun, *overrides: str) -> list[StepMetrics]:
    """The steps of a run that ends well, every figure of it finite."""
    ended = run.complete("eval.rows=0", *overrides)
    assert ended.code == 0, ended.err
    steps = run.steps()
    for line in steps:
        assert [name for name, value in line.values.items() if not math.isfinite(value)] == []
    assert run.summary().finished
    run.assert_nothing_left()
    return steps


def test_kl_in_the_loss_entropy_dual_clip_and_several_epochs(run: WholeRun) -> None:
    (step,) = finite_steps(
        run,
        "run.steps=1",
        "ppo.kl.placement=loss",
        "ppo.kl.estimator=k3",
        "ppo.kl.coefficient=0.1",
        "ppo.entropy=0.01",
        "ppo.dual_clip=3.0",
        "ppo.clip_high=0.28",
        "ppo.aggregation=seq-mean-token-sum-norm",
        "trainer.epochs=3",
        "trainer.mini_batch=8",
        "trainer.optimizer.learning_rate=1e-3",
        "critic.value_clip=0.2",
        "critic.epochs=2",
    )
    assert step.values["kl_coefficient"] == 0.1
    assert step.values["policy/kl_loss"] > 0, "the policy has left the reference after the first mini-batch"
    assert step.values["policy/entropy"] > 0
    assert step.values["policy/ratio_max"] > 1
    assert "policy/dual_clip_fraction" in step.values
    assert step.values["critic/value_loss"] > 0


def test_gspo_with_grpo_needs_no_critic_and_skipped_rows_are_counted(run: WholeRun) -> None:
    rows = [
        {"prompt": "12+34=", "reward_model": {"ground_truth": "46"}, "data_source": "sums"},
        {"prompt": "11+22=", "reward_model": {"style": "rule"}},
        {"prompt": "1111+2222=", "reward_model": {"ground_truth": "3333"}},
        {"prompt": "50-19=", "ground_truth": "31"},
        {"prompt": "27+15=", "ground_truth": None},
        {"prompt": "80-31=", "reward_model": {"ground_truth": "49"}},
    ]
    (run.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = finite_steps(
        run,
        "ppo.loss=gspo",
        "ppo.advantage=grpo",
        "ppo.kl.placement=none",
        "ppo.aggregation=seq-mean-token-mean",
        "rollout.responses_per_prompt=4",
        "prompts.per_step=4",
        'prompts.train=["rows.jsonl"]',
    )
    assert [line.values["samples"] for line in steps] == [16, 16]
    assert "policy/grad_norm" in steps[0].values
    assert [name for line in steps for name in line.values if name.startswith("critic/")] == []
    assert sorted(path.stem for path in run.files.logs.iterdir()) == [
        "coordinator-0",
        "reward-0",
        "rollout-0",
        "trainer-0",
    ]
    samples = run.samples()
    assert {sample.origin for sample in samples} == {"rows.jsonl:1", "rows.jsonl:4", "rows.jsonl:6"}
    assert [len({sample.prompt for sample in samples[start : start + 4]}) for start in range(0, 32, 4)] == [1] * 8
    log = run.log("coordinator")
    assert "train rows: 2 without ground truth (rows.jsonl:2, rows.jsonl:5)" in log
    assert "rows.jsonl:3: skipped, its prompt has 11 tokens (prompts.max_tokens = 8)" in log
    summary = run.summary()
    assert (summary.rows_without_ground_truth, summary.rows_too_long) == (2, 1)


def test_adaptive_kl_and_responses_of_one_token(run: WholeRun) -> None:
    steps = finite_steps(
        run,
        "rollout.max_new_tokens=1",
        "ppo.kl.controller=adaptive",
        "ppo.kl.coefficient=0.05",
        "ppo.kl.target=6.0",
        "ppo.kl.horizon=100",
    )
    assert [line.values["response_length"] for line in steps] == [1, 1]
    assert {sample.response_length for sample in run.samples()} == {1}
    assert {sample.finish_reason for sample in run.samples()} <= {"length", "stop"}
    # A KL of nearly 0 under a target of 6 nats: the coefficient falls by the most it may, 20 % of 16 / 100 samples.
    first, second = (line.values["kl_coefficient"] for line in steps)
    assert first == 0.05
    assert second == pytest.approx(0.05 * (1 - 0.2 * 16 / 100))
