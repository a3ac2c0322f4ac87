"""What may change in the config of a run that is continued."""

from __future__ import annotations

import pytest

from common.config import Config
from common.config_changes import MAY_CHANGE, STEPS, changes, flat, identity_digest, may_change, misfits
from common.config_loading import load_config

BEFORE = load_config(
    "tiny", ["run.steps=10", "trainer.optimizer.schedule=constant", "critic.optimizer.schedule=constant"]
)


def now(*overrides: str, before: Config = BEFORE) -> Config:
    settings = [f"{key}={value!r}" for key, value in flat(before).items() if key.startswith("run.") and value != ""]
    schedules = [f"{name}.optimizer.schedule=constant" for name in ("trainer", "critic")]
    return load_config("tiny", [*(s.replace("'", '"') for s in settings), *schedules, *overrides])


def test_the_same_config_fits() -> None:
    assert changes(BEFORE, now()) == []
    assert misfits(BEFORE, now()) == []


@pytest.mark.parametrize(
    "override",
    ["run.steps=11", "run.directory=elsewhere", "rollout.replicas=3", "reward.replicas=0", "reward.timeout_s=99",
     "eval.every=7", "checkpoint.keep=9", "restart.limit=0", "weights.transport=copy", "cache.slots=4096",
     "timeouts.start=1", "log.level=debug", "rollout.vllm.kv_cache_mib=64"],
)  # fmt: skip
def test_what_no_number_depends_on_may_change(override: str) -> None:
    after = now(override)
    assert [change.key for change in changes(BEFORE, after)] == [override.partition("=")[0]]
    assert misfits(BEFORE, after) == []
    assert identity_digest(after) == identity_digest(BEFORE)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed=2", "run.seed: was 1, now 2"),
        ("model.dtype=bfloat16", 'model.dtype: was "float32", now "bfloat16"'),
        ('prompts.train=["x.jsonl"]', 'prompts.train: was ["quartet:tiny/train.jsonl"], now ["x.jsonl"]'),
        ("trainer.micro_batch=2", f"trainer.micro_batch: was {BEFORE.trainer.micro_batch}, now 2"),
        ("ppo.kl.coefficient=0.5", f"ppo.kl.coefficient: was {BEFORE.ppo.kl.coefficient}, now 0.5"),
        ("eval.rows=3", f"eval.rows: was {BEFORE.eval.rows}, now 3"),
        ("run.steps=9", "run.steps: was 10, now 9 (it may only grow)"),
    ],
)
def test_what_numbers_depend_on_may_not(override: str, words: str) -> None:
    after = now(override)
    assert [str(misfit) for misfit in misfits(BEFORE, after)] == [words]
    assert (identity_digest(after) == identity_digest(BEFORE)) is override.startswith("run.steps")


@pytest.mark.parametrize("learner", ["trainer", "critic"])
def test_more_steps_do_not_fit_a_learning_rate_that_ends_with_the_last(learner: str) -> None:
    schedule = f"{learner}.optimizer.schedule=cosine"
    (misfit,) = misfits(now(schedule), now(schedule, "run.steps=11"))
    assert misfit.key == STEPS
    assert misfit.why.startswith(f"{learner}.optimizer.schedule = cosine: the steps before would have had other")
    assert (
        misfits(now(schedule, "ppo.advantage=grpo"), now(schedule, "ppo.advantage=grpo", "run.steps=11")) == []
    ) is (learner == "critic"), "a critic that is not there has no schedule"


def test_an_option_that_is_gone_is_a_difference() -> None:
    task = "prompts.reasoning_gym.options={min_terms = 2, max_terms = 2}"
    less = "prompts.reasoning_gym.options={min_terms = 2}"
    (misfit,) = misfits(now(task), now(less))
    assert str(misfit) == "prompts.reasoning_gym.options.max_terms: was 2, now not set"


def test_every_key_that_may_change_is_there() -> None:
    keys = flat(BEFORE)
    for allowed in MAY_CHANGE:
        assert any(key == allowed or key.startswith(f"{allowed}.") for key in keys), allowed
    assert not may_change("rollout.rows")
    assert not may_change("runs.directory")
