"""From the columns of a step to rewards, advantages, returns and statistics, in a real token cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import Raw

from common.config import KLConfig, PPOConfig
from common.messages import FinishedSample, FinishReason, Score
from common.token_cache import TokenCache
from services.coordinator.advantages import AdvantageInputs, gae
from services.coordinator.batch_advantages import BatchStatistics, write_advantages
from services.coordinator.prompts import Prompt
from services.coordinator.row import Row
from services.coordinator.sample import Sample
from tests.unit.model_support import put_column, put_sample, token_cache


@pytest.fixture
def cache() -> Iterator[TokenCache]:
    with token_cache(max_response=6) as cache:
        yield cache


def put(
    cache: TokenCache,
    length: int,
    reward: float = 0.0,
    finish: FinishReason = "stop",
    mask: Sequence[int] | None = None,
    group: int = 0,
    accuracy: float = 0.0,
    bootstrap: float = 0.0,
    **columns: Sequence[float],
) -> Sample:
    """A finished and scored sample; columns that are not given are 0."""
    ref = put_sample(cache, [3, 4], list(range(5, 5 + length)))
    if mask is not None:
        cache.column("response_mask", ref)[:length] = mask
    put_column(cache, "bootstrap_value", ref, [bootstrap])
    for name, values in columns.items():
        assert len(values) == length
        put_column(cache, name, ref, values)
    row = Row(prompt="", ground_truth=Raw(b"null"), metadata=Raw(b"null"), source="", origin="rows.jsonl:1")
    prompt = Prompt(index=0, text="", key=b"", length=2, ids=None, row=row)
    return Sample(
        index=ref.slot,
        group=group,
        prompt=prompt,
        ref=ref,
        finished=FinishedSample(ref=ref, length=length, finish_reason=finish, version_low=1, version_high=1),
        score=Score(ref=ref, reward=reward, accuracy=accuracy),
    )


def ppo(placement: Any = "none", estimator: Any = "k1", **fields: Any) -> PPOConfig:
    plain: dict[str, Any] = {"lam": 1.0, "whiten": False, "kl": KLConfig(placement=placement, estimator=estimator)}
    return PPOConfig(**(plain | fields))


def column(cache: TokenCache, name: str, sample: Sample) -> list[float]:
    return cache.column(name, sample.ref).tolist()


def close(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-6)


# ---------------------------------------------------------------- rewards


def test_reward_sits_on_the_last_response_token(cache: TokenCache) -> None:
    samples = [put(cache, 3, reward=2.0), put(cache, 1, reward=-1.0), put(cache, 6, reward=0.5, finish="length")]
    write_advantages(cache, samples, ppo(), 0.0)
    assert column(cache, "rewards", samples[0]) == [0, 0, 2, 0, 0, 0]
    assert column(cache, "rewards", samples[1]) == [-1, 0, 0, 0, 0, 0]
    assert column(cache, "rewards", samples[2]) == [0, 0, 0, 0, 0, 0.5]


def test_reward_sits_on_the_last_masked_token_where_a_gap_ends_the_response(cache: TokenCache) -> None:
    sample = put(cache, 5, reward=2.0, mask=[1, 0, 1, 0, 0])
    write_advantages(cache, [sample], ppo(), 0.0)
    assert column(cache, "rewards", sample) == [0, 0, 2, 0, 0, 0]
    assert column(cache, "returns", sample) == [2, 0, 2, 0, 0, 0]


def test_kl_is_subtracted_from_the_reward_of_every_token(cache: TokenCache) -> None:
    logprobs, reference = [-1.0, -2.0, -3.0], [-1.5, -1.0, -3.0]
    samples = [
        put(cache, 3, reward=2.0, logprobs=logprobs, ref_logprobs=reference),
        put(cache, 2, reward=1.0, logprobs=[-1.0, -1.0], ref_logprobs=[-1.2, -1.0]),
    ]
    write_advantages(cache, samples, ppo("reward"), 0.1)
    assert column(cache, "rewards", samples[0])[:4] == close(-0.05, 0.1, 2.0, 0.0)
    assert column(cache, "rewards", samples[1])[:3] == close(-0.02, 1.0, 0.0)
    assert column(cache, "returns", samples[0])[:3] == close(2.05, 2.1, 2.0)


@pytest.mark.parametrize(
    ("estimator", "penalty"), [("k1", 0.5), ("abs", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5)]
)
def test_kl_estimator_is_the_configured_one(cache: TokenCache, estimator: str, penalty: float) -> None:
    sample = put(cache, 1, logprobs=[-1.0], ref_logprobs=[-1.5])
    write_advantages(cache, [sample], ppo("reward", estimator), 0.2)
    assert column(cache, "rewards", sample)[0] == pytest.approx(-0.2 * penalty, abs=1e-6)


@pytest.mark.parametrize("placement", ["loss", "none"])
def test_kl_elsewhere_is_not_in_the_reward(cache: TokenCache, placement: str) -> None:
    sample = put(cache, 2, reward=1.0, logprobs=[-1.0, -1.0], ref_logprobs=[-2.0, -2.0])
    statistics = write_advantages(cache, [sample], ppo(placement), 0.1)
    assert column(cache, "rewards", sample)[:2] == [0.0, 1.0]
    assert statistics.kl == (1.0 if placement == "loss" else 0.0)


# ---------------------------------------------------------------- bootstrap, gaps, whitening


def test_only_a_response_cut_by_the_length_limit_bootstraps(cache: TokenCache) -> None:
    """Both are as long as the batch is wide: the finish reason decides, not the width."""
    stopped, cut = (put(cache, 2, 1.0, finish, bootstrap=8.0, values=[0.5, 0.25]) for finish in ("stop", "length"))
    write_advantages(cache, [stopped, cut], ppo(gamma=0.5), 0.0)
    assert column(cache, "returns", stopped)[:2] == close(0.5, 1.0)
    assert column(cache, "advantages", stopped)[:2] == close(0.0, 0.75)
    assert column(cache, "returns", cut)[:2] == close(2.5, 5.0)
    assert column(cache, "advantages", cut)[:2] == close(2.0, 4.75)


def test_bootstrap_of_a_short_response_follows_its_own_last_token(cache: TokenCache) -> None:
    """A response can be cut before the widest one of the batch ends."""
    short = put(cache, 1, 0.0, "length", bootstrap=4.0)
    write_advantages(cache, [short, put(cache, 5)], ppo(gamma=0.5), 0.0)
    assert column(cache, "returns", short) == [2, 0, 0, 0, 0, 0]


def test_gaps_take_no_time_and_carry_value_and_advantage(cache: TokenCache) -> None:
    nan = float("nan")
    sample = put(
        cache,
        4,
        reward=1.0,
        mask=[1, 0, 0, 1],
        values=[0.1, 99.0, nan, 0.3],
        logprobs=[-1.0, 5.0, nan, -1.0],
        ref_logprobs=[-1.0, -5.0, 0.0, -1.0],
    )
    statistics = write_advantages(cache, [sample], ppo("reward", gamma=0.5, lam=0.9), 0.1)
    assert column(cache, "rewards", sample)[:4] == close(0.0, 0.0, 0.0, 1.0)
    assert column(cache, "advantages", sample)[:4] == close(0.05 + 0.45 * 0.7, 0.0, 0.0, 0.7)
    assert column(cache, "returns", sample)[:4] == close(0.465, 0.0, 0.0, 1.0)
    assert statistics.tokens == 2
    assert statistics.value == pytest.approx(0.2)
    assert statistics.kl == 0.0


def test_advantages_are_whitened_over_the_whole_batch_and_returns_are_not(cache: TokenCache) -> None:
    samples = [put(cache, length, reward=float(length), values=[0.1] * length) for length in (1, 3, 6)]
    write_advantages(cache, samples, ppo(whiten=True, lam=0.95), 0.0)
    found = np.concatenate([cache.response("advantages", sample.ref) for sample in samples])
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(found.var(ddof=1)) == pytest.approx(1.0, abs=1e-5)
    for i, length in enumerate((1, 3, 6)):
        rewards = np.zeros((1, length))
        rewards[0, -1] = length
        alone = gae(
            AdvantageInputs(
                rewards=rewards,
                mask=np.ones((1, length)),
                group=np.zeros(1, np.int64),
                values=np.full((1, length), 0.1, np.float32),
                lam=0.95,
            )
        )
        assert cache.response("returns", samples[i].ref) == pytest.approx(alone.returns[0], abs=1e-6)


def test_result_does_not_depend_on_the_slots_order_in_memory(cache: TokenCache) -> None:
    samples = [put(cache, length, reward=float(length % 3), values=[0.2 * length] * length) for length in (2, 6, 1, 4)]
    first = write_advantages(cache, samples, ppo(whiten=True), 0.0)
    before = [column(cache, "advantages", sample) for sample in samples]
    backwards = write_advantages(cache, samples[::-1], ppo(whiten=True), 0.0)
    assert backwards.explained_variance == pytest.approx(first.explained_variance)
    for sample, expected in zip(samples, before, strict=True):
        assert column(cache, "advantages", sample) == close(*expected)


def test_groups_are_those_of_the_prompts(cache: TokenCache) -> None:
    """Without a critic: leave-one-out within each group, whatever lies in the values."""
    nan = float("nan")
    rewards = {0: (1.0, 0.0), 1: (3.0, 1.0)}
    samples = [
        put(cache, 1, reward, group=group, values=[nan], bootstrap=nan) for group in (0, 1) for reward in rewards[group]
    ]
    statistics = write_advantages(cache, samples, ppo(advantage="rloo"), 0.0)
    assert [column(cache, "advantages", sample)[0] for sample in samples] == close(1.0, -1.0, 2.0, -2.0)
    assert (statistics.value, statistics.explained_variance) == (0.0, 0.0)


# ---------------------------------------------------------------- statistics


def test_statistics(cache: TokenCache) -> None:
    samples = [
        put(
            cache,
            2,
            reward=1.0,
            accuracy=1.0,
            values=[0.5, 0.5],
            logprobs=[-1.0, -2.0],
            ref_logprobs=[-1.5, -2.0],
            behaviour_logprobs=[-1.25, -2.0],
        ),
        put(
            cache,
            4,
            reward=3.0,
            finish="length",
            mask=[1, 0, 1, 1],
            values=[2.5, 50.0, 2.5, 2.5],
            logprobs=[-1.0, 9.0, -1.0, -1.0],
            ref_logprobs=[-1.0, 0.0, -2.0, -1.0],
            behaviour_logprobs=[-1.0, -9.0, -1.0, -0.5],
        ),
    ]
    found = write_advantages(cache, samples, ppo("loss"), 0.3)
    assert (found.samples, found.tokens) == (2, 5)
    assert (found.reward, found.accuracy) == (2.0, 0.5)
    assert found.kl == pytest.approx(1.5 / 5)
    assert found.kl_per_response == pytest.approx((0.5 + 1.0) / 2)
    assert found.engine_difference == pytest.approx((0.25 + 0.5) / 5)
    assert found.engine_difference_max == 0.5
    assert found.value == pytest.approx((2 * 0.5 + 3 * 2.5) / 5)
    assert found.returns == pytest.approx((2 * 1.0 + 3 * 3.0) / 5)
    assert found.response_length == 3.0
    assert found.cut_ratio == 0.5
    assert found.explained_variance == pytest.approx(1.0), "returns minus values is 0.5 everywhere"


def test_explained_variance_of_values_that_predict_nothing_is_zero(cache: TokenCache) -> None:
    samples = [put(cache, 1, reward, values=[0.7]) for reward in (0.0, 1.0, 5.0)]
    assert write_advantages(cache, samples, ppo(), 0.0).explained_variance == pytest.approx(0.0, abs=1e-6)
    same = [put(cache, 1, 1.0, values=[value]) for value in (0.0, 1.0)]
    assert write_advantages(cache, same, ppo(), 0.0).explained_variance == 0.0


def test_no_samples() -> None:
    with token_cache() as cache:
        assert write_advantages(cache, [], ppo(), 0.1) == BatchStatistics()


def test_a_sample_whose_mask_is_empty_counts_in_nothing_but_the_reward(cache: TokenCache) -> None:
    alone = [put(cache, 2, reward=1.0, values=[0.1, 0.2]), put(cache, 3, reward=2.0, values=[0.3, 0.2, 0.1])]
    write_advantages(cache, alone, ppo(whiten=True), 0.1)
    expected = [column(cache, "advantages", sample) for sample in alone]
    empty = put(cache, 4, reward=9.0, mask=[0] * 4, values=[5.0] * 4, logprobs=[-3.0] * 4)
    statistics = write_advantages(cache, [*alone, empty], ppo("reward", whiten=True), 0.1)
    for name in ("rewards", "advantages", "returns"):
        assert column(cache, name, empty) == [0.0] * 6, name
    for sample, values in zip(alone, expected, strict=True):
        assert column(cache, "advantages", sample) == close(*values)
    assert statistics.tokens == 5


def test_a_batch_whose_masks_are_all_empty(cache: TokenCache) -> None:
    samples = [put(cache, length, reward=1.0, mask=[0] * length, values=[0.5] * length) for length in (1, 3)]
    found = write_advantages(cache, samples, ppo("reward", whiten=True), 0.1)
    assert (found.samples, found.tokens, found.explained_variance, found.kl) == (2, 0, 0.0, 0.0)
    for sample in samples:
        for name in ("rewards", "advantages", "returns"):
            assert column(cache, name, sample) == [0.0] * 6, name
