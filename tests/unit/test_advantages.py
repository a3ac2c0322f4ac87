"""Advantage estimators against slow oracles and against what must hold for any batch."""

from __future__ import annotations

import math
import typing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.config import PPOConfig
from services.coordinator.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    gae,
    grpo,
    masked_mean,
    masked_whiten,
    reinforce_pp,
    rloo,
    token_rewards,
)

Array = NDArray[np.float64]
ESTIMATORS = sorted(ADVANTAGES)


def test_a_score_is_on_the_last_masked_token_and_a_penalty_on_every_one() -> None:
    mask = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    scores = np.array([1.0, 2.0, -3.0, 4.0])
    expected = [[0.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, -3.0, 0.0], [0.0, 0.0, 0.0]]
    assert token_rewards(scores, mask).tolist() == expected
    penalised = token_rewards(scores, mask, np.full((4, 3), 0.25))
    assert penalised.tolist() == (np.array(expected) - 0.25 * mask).tolist()


def random_inputs(seed: int, rows: int = 7, width: int = 6) -> AdvantageInputs:
    """A batch whose masks have gaps and, in row 0, nothing at all; prompts have one to several samples."""
    random = np.random.default_rng(seed)
    mask = (random.random((rows, width)) < 0.7).astype(np.uint8)
    mask[0] = 0
    return AdvantageInputs(
        rewards=random.normal(size=(rows, width)),
        values=random.normal(size=(rows, width)),
        mask=mask,
        group=random.integers(0, 3, size=rows),
        bootstrap_values=random.normal(size=rows),
        baselines=random.normal(size=rows),
        gamma=0.9,
        lam=0.8,
    )


def values_of(inputs: AdvantageInputs) -> NDArray[np.float64]:
    assert inputs.values is not None
    return inputs.values


def bootstrap_of(inputs: AdvantageInputs) -> NDArray[np.float64]:
    assert inputs.bootstrap_values is not None
    return inputs.bootstrap_values


def slow_gae(inputs: AdvantageInputs) -> Array:
    """The definition: advantage = sum over later errors, on the tokens inside the mask only."""
    advantages = np.zeros(inputs.rewards.shape)
    for row in range(len(advantages)):
        tokens = np.flatnonzero(inputs.mask[row])
        value = [*values_of(inputs)[row, tokens], bootstrap_of(inputs)[row]]
        for k, token in enumerate(tokens):
            for j in range(k, len(tokens)):
                error = inputs.rewards[row, tokens[j]] + inputs.gamma * value[j + 1] - value[j]
                advantages[row, token] += (inputs.gamma * inputs.lam) ** (j - k) * error
    return advantages


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 6), width=st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_gae_equals_the_double_loop_over_tokens_with_gaps(seed: int, rows: int, width: int) -> None:
    inputs = random_inputs(seed, rows, width)
    result = gae(inputs)
    expected = slow_gae(inputs)
    np.testing.assert_allclose(result.advantages, expected, atol=1e-12)
    np.testing.assert_allclose(result.returns, expected + values_of(inputs) * inputs.mask, atol=1e-12)


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_gae_with_lambda_one_returns_the_discounted_rewards_and_the_bootstrap(seed: int) -> None:
    inputs = replace(random_inputs(seed), lam=1.0)
    returns = gae(inputs).returns
    for row in range(len(returns)):
        total = bootstrap_of(inputs)[row]
        for token in reversed(np.flatnonzero(inputs.mask[row])):
            total = inputs.rewards[row, token] + inputs.gamma * total
            assert returns[row, token] == pytest.approx(total, abs=1e-12)


def test_gae_bootstraps_only_the_sample_that_was_cut() -> None:
    inputs = AdvantageInputs(
        rewards=np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]),
        values=np.zeros((2, 3)),
        mask=np.array([[1, 1, 0], [1, 1, 0]]),
        group=np.array([0, 1]),
        bootstrap_values=np.array([0.0, 4.0]),
        gamma=0.5,
    )
    np.testing.assert_allclose(gae(inputs).advantages, [[0.5, 1.0, 0.0], [1.5, 3.0, 0.0]])


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_gae_whitens_advantages_and_leaves_returns_alone(seed: int) -> None:
    inputs = random_inputs(seed)
    plain, white = gae(inputs), gae(replace(inputs, whiten=True))
    np.testing.assert_array_equal(white.returns, plain.returns)
    np.testing.assert_allclose(white.advantages, masked_whiten(plain.advantages, inputs.mask))


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_whitened_tokens_have_mean_zero_and_unbiased_variance_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    mask = random.random((5, 6)) < 0.6
    mask[0, :2] = True
    white = masked_whiten(random.normal(3.0, 2.0, (5, 6)), mask)
    assert white[mask].mean() == pytest.approx(0.0, abs=1e-12)
    assert white[mask].var(ddof=1) == pytest.approx(1.0, abs=1e-6)
    assert not white[~mask].any()


@pytest.mark.parametrize("mask", [[[1, 1, 1]], [[0, 1, 0]], [[0, 0, 0]]])
def test_whitening_what_does_not_vary_gives_zeros(mask: list[list[int]]) -> None:
    np.testing.assert_allclose(masked_whiten(np.full((1, 3), 0.3), np.array(mask)), 0.0, atol=1e-9)


def test_masked_mean_ignores_what_lies_outside() -> None:
    assert masked_mean(np.array([[1.0, math.nan], [3.0, math.inf]]), np.array([[1, 0], [1, 0]])) == 2.0
    assert masked_mean(np.ones((2, 2)), np.zeros((2, 2))) == 0.0


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=15)
def test_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    inputs = replace(random_inputs(seed), whiten=True)
    order = np.random.default_rng(seed + 1).permutation(len(inputs.mask))
    assert inputs.baselines is not None
    shuffled = replace(
        inputs,
        rewards=inputs.rewards[order],
        values=values_of(inputs)[order],
        mask=inputs.mask[order],
        group=inputs.group[order],
        bootstrap_values=bootstrap_of(inputs)[order],
        baselines=inputs.baselines[order],
    )
    before, after = ADVANTAGES[name](inputs), ADVANTAGES[name](shuffled)
    np.testing.assert_allclose(after.advantages, before.advantages[order], atol=1e-9)
    np.testing.assert_allclose(after.returns, before.returns[order], atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_outside_the_mask_is_read_or_written(name: str) -> None:
    inputs = random_inputs(5)
    outside = inputs.mask == 0
    spoiled = replace(
        inputs,
        rewards=np.where(outside, math.nan, inputs.rewards),
        values=np.where(outside, math.nan, values_of(inputs)),
    )
    before, after = ADVANTAGES[name](inputs), ADVANTAGES[name](spoiled)
    np.testing.assert_array_equal(after.advantages, before.advantages)
    np.testing.assert_array_equal(after.returns, before.returns)
    assert not after.advantages[outside].any()
    assert not after.returns[outside].any()
    assert after.advantages.any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_row_with_an_empty_mask_counts_nowhere(name: str) -> None:
    inputs = random_inputs(11)
    assert inputs.baselines is not None
    without = replace(
        inputs,
        rewards=inputs.rewards[1:],
        values=values_of(inputs)[1:],
        mask=inputs.mask[1:],
        group=inputs.group[1:],
        bootstrap_values=bootstrap_of(inputs)[1:],
        baselines=inputs.baselines[1:],
    )
    np.testing.assert_allclose(
        ADVANTAGES[name](inputs).advantages[1:], ADVANTAGES[name](without).advantages, atol=1e-12
    )


def outcome(scores: list[float], group: list[int]) -> AdvantageInputs:
    return AdvantageInputs(
        rewards=np.array([[0.0, score] for score in scores]), mask=np.ones((len(scores), 2)), group=np.array(group)
    )


def test_rloo_subtracts_the_mean_of_the_other_samples() -> None:
    advantages = rloo(outcome([1.0, 0.0, 2.0, 5.0, 4.0], [8, 3, 8, 8, 3])).advantages
    np.testing.assert_allclose(advantages[:, 0], [1.0 - 3.5, 0.0 - 4.0, 2.0 - 3.0, 5.0 - 1.5, 4.0 - 0.0])
    np.testing.assert_array_equal(advantages[:, 0], advantages[:, 1])


def test_grpo_standardises_within_the_group() -> None:
    advantages = grpo(outcome([1.0, 3.0, 10.0, 10.0], [0, 0, 1, 1])).advantages
    np.testing.assert_allclose(advantages[:, 1], [-math.sqrt(0.5), math.sqrt(0.5), 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_sample_alone_in_its_group_keeps_its_reward(name: str) -> None:
    np.testing.assert_allclose(ADVANTAGES[name](outcome([2.0], [9])).advantages, 2.0, atol=1e-5)


def test_reinforce_pp_discounts_per_token_that_counts() -> None:
    inputs = AdvantageInputs(
        rewards=np.array([[0.0, 0.0, 0.0, 1.0]]), mask=np.array([[1, 0, 1, 1]]), group=np.array([0]), gamma=0.5
    )
    result = reinforce_pp(inputs)
    np.testing.assert_allclose(result.returns, [[0.25, 0.0, 0.5, 1.0]])
    np.testing.assert_allclose(result.advantages, masked_whiten(result.returns, inputs.mask))


def test_remax_subtracts_the_greedy_reward_from_the_undiscounted_rewards_to_come() -> None:
    inputs = AdvantageInputs(
        rewards=np.array([[0.5, 0.0, 2.0, 0.0]]),
        mask=np.array([[1, 0, 1, 0]]),
        group=np.array([0]),
        baselines=np.array([1.5]),
        gamma=0.5,
    )
    np.testing.assert_allclose(ADVANTAGES["remax"](inputs).advantages, [[1.0, 0.0, 0.5, 0.0]])


def test_every_estimator_of_the_config_is_registered() -> None:
    assert set(typing.get_args(typing.get_type_hints(PPOConfig)["advantage"])) <= set(ADVANTAGES)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gae", {"values": None}, "needs values"),
        ("remax", {"baselines": None}, "needs baselines"),
        ("gae", {"values": np.zeros((7, 5))}, r"values has shape \[7, 5\], expected \[7, 6\]"),
        ("grpo", {"group": np.zeros(6, int)}, r"group has shape \[6\], expected \[7\]"),
        ("grpo", {"group": np.zeros(7)}, "group must hold integers"),
        ("grpo", {"rewards": np.zeros(7)}, r"rewards must have shape \[batch, tokens\]"),
    ],
)
def test_inputs_that_do_not_fit_are_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ADVANTAGES[name](replace(random_inputs(1), **change))
