"""Losses against scalar oracles, and what must hold however a mini-batch is cut."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.aggregation import AGGREGATIONS, Normalizer, aggregate
from common.config import Aggregation, PPOConfig
from services.critic.objective import value_loss
from services.trainer.objective import (
    POLICY_LOSSES,
    PolicyBatch,
    PolicyOptions,
    Term,
    compose,
    gspo_loss,
    kl_to_reference,
    policy_loss,
)

MODES: list[Aggregation] = sorted(AGGREGATIONS)
ROWS, WIDTH = 6, 5


def number(scalar: Tensor) -> float:
    return float(scalar.detach())


def random_matrices(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def random_mask(seed: int) -> Tensor:
    """With gaps; row 1 is empty."""
    mask = (torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) < 0.7).to(torch.uint8)
    mask[1] = 0
    mask[0, 0] = 1
    return mask


def random_batch(seed: int) -> PolicyBatch:
    old, new, advantages, weights = random_matrices(seed, 4)
    return PolicyBatch(
        logprobs=(old + 0.4 * new).requires_grad_(),
        old_logprobs=old,
        advantages=advantages,
        mask=random_mask(seed),
        importance_weights=weights.exp(),
    )


def rows_of(batch: PolicyBatch, rows: slice) -> PolicyBatch:
    return PolicyBatch(**{field.name: getattr(batch, field.name)[rows] for field in fields(batch)})


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def slow_aggregate(per_token: Callable[[int, int], float], mask: Tensor, mode: str) -> float:
    """The README of the conformance cases, word by word."""
    rows = [[per_token(i, t) for t in range(WIDTH) if mask[i, t]] for i in range(ROWS) if mask[i].any()]
    sums = [sum(row) for row in rows]
    by_mode = {
        "token-mean": sum(sums) / sum(len(row) for row in rows),
        "seq-mean-token-sum": sum(sums) / len(rows),
        "seq-mean-token-mean": sum(total / len(row) for total, row in zip(sums, rows, strict=True)) / len(rows),
        "seq-mean-token-sum-norm": sum(total / WIDTH for total in sums) / len(rows),
    }
    return by_mode[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
def test_policy_loss_equals_the_scalar_oracle(mode: Aggregation, dual_clip: float) -> None:
    batch = random_batch(3)

    def per_token(i: int, t: int) -> float:
        ratio = math.exp(number(batch.logprobs[i, t] - batch.old_logprobs[i, t]))
        advantage = number(batch.advantages[i, t])
        loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.9), 1.3))
        if dual_clip and advantage < 0:
            loss = min(loss, -advantage * dual_clip)
        assert batch.importance_weights is not None
        return loss * number(batch.importance_weights[i, t])

    options = PolicyOptions(clip_low=0.1, clip_high=0.3, dual_clip=dual_clip, aggregation=mode)
    result = policy_loss(batch, options, Normalizer.of(batch.mask))
    assert number(result.loss) == pytest.approx(slow_aggregate(per_token, batch.mask, mode), abs=1e-12)
    assert (number(result.dual_clip_fraction) > 0) == (dual_clip > 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@given(seed=st.integers(0, 2**31), cut=st.integers(1, ROWS - 1))
@settings(deadline=None, max_examples=10)
def test_policy_losses_gradients_and_metrics_add_up_over_micro_batches(
    name: str, mode: Aggregation, seed: int, cut: int
) -> None:
    batch = random_batch(seed)
    normalizer = Normalizer.of(batch.mask)
    options = PolicyOptions(clip_low=0.1, clip_high=0.3, dual_clip=2.0 if name == "ppo" else 0.0, aggregation=mode)
    whole = POLICY_LOSSES[name](batch, options, normalizer)
    parts = [
        POLICY_LOSSES[name](rows_of(batch, rows), options, normalizer) for rows in (slice(0, cut), slice(cut, ROWS))
    ]
    for field in ("loss", "clip_fraction", "dual_clip_fraction", "approx_kl"):
        total = sum(number(getattr(part, field)) for part in parts)
        assert total == pytest.approx(number(getattr(whole, field)), abs=1e-12), field
    assert max(number(part.ratio_max) for part in parts) == number(whole.ratio_max)
    split = sum((gradient(part.loss, batch.logprobs) for part in parts), torch.zeros(ROWS, WIDTH))
    torch.testing.assert_close(split, gradient(whole.loss, batch.logprobs), atol=1e-12, rtol=0)
    assert split.any()


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 2**31), cut=st.integers(1, ROWS - 1))
@settings(deadline=None, max_examples=10)
def test_value_losses_gradients_and_metrics_add_up_over_micro_batches(mode: Aggregation, seed: int, cut: int) -> None:
    preds, old, returns = random_matrices(seed, 3)
    mask = random_mask(seed)
    leaf = preds.requires_grad_()
    normalizer = Normalizer.of(mask)

    def run(rows: slice) -> dict[str, Tensor]:
        tensors = (x[rows] for x in (leaf, old, returns, mask))
        result = value_loss(*tensors, clip_range=0.5, aggregation=mode, normalizer=normalizer)
        gradients = gradient(result.loss, leaf)
        metrics = {name: getattr(result, name) for name in ("loss", "clip_fraction", "squared_error")}
        return {"gradient": gradients, **metrics}

    whole, first, second = run(slice(0, ROWS)), run(slice(0, cut)), run(slice(cut, ROWS))
    for name, expected in whole.items():
        torch.testing.assert_close(first[name] + second[name], expected, atol=1e-12, rtol=0)
    assert whole["gradient"].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip_range", [0.0, 0.4])
def test_value_loss_equals_the_scalar_oracle(mode: Aggregation, clip_range: float) -> None:
    preds, old, returns = random_matrices(4, 3)
    mask = random_mask(4)

    def per_token(i: int, t: int) -> float:
        value, anchor, target = number(preds[i, t]), number(old[i, t]), number(returns[i, t])
        clipped = min(max(value, anchor - clip_range), anchor + clip_range) if clip_range else value
        return 0.5 * max((value - target) ** 2, (clipped - target) ** 2)

    normalizer = Normalizer.of(mask)
    result = value_loss(preds, old, returns, mask, clip_range=clip_range, aggregation=mode, normalizer=normalizer)
    assert number(result.loss) == pytest.approx(slow_aggregate(per_token, mask, mode), abs=1e-12)
    assert (number(result.clip_fraction) > 0) == (clip_range > 0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_what_lies_outside_the_mask_reaches_neither_loss_nor_gradient(name: str) -> None:
    batch = random_batch(8)
    outside = batch.mask == 0
    logprobs = batch.logprobs.detach().masked_fill(outside, -math.inf).requires_grad_()
    spoiled = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs.masked_fill(outside, -math.inf),
        advantages=batch.advantages.masked_fill(outside, math.nan),
        mask=batch.mask,
        importance_weights=batch.importance_weights,
    )
    options, normalizer = PolicyOptions(clip_low=0.2, clip_high=0.2), Normalizer.of(batch.mask)
    expected = POLICY_LOSSES[name](batch, options, normalizer)
    result = POLICY_LOSSES[name](spoiled, options, normalizer)
    assert number(result.loss) == number(expected.loss)
    torch.testing.assert_close(gradient(result.loss, logprobs), gradient(expected.loss, batch.logprobs))
    assert number(result.ratio_max) == number(expected.ratio_max)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_has_loss_zero_and_no_gradient(mode: Aggregation) -> None:
    batch = replace(random_batch(2), mask=torch.zeros(ROWS, WIDTH))
    options = PolicyOptions(clip_low=0.2, clip_high=0.2, aggregation=mode)
    result = policy_loss(batch, options, Normalizer.of(batch.mask))
    assert number(result.loss) == 0.0
    assert not gradient(result.loss, batch.logprobs).any()


def single(log_ratio: list[float], advantage: list[float]) -> PolicyBatch:
    zeros = torch.zeros(1, len(log_ratio), dtype=torch.float64)
    return PolicyBatch(
        logprobs=torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True),
        old_logprobs=zeros,
        advantages=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.ones_like(zeros),
    )


def test_clipping_stops_the_gradient_only_where_it_would_go_further() -> None:
    high, low = math.log(1.5), math.log(0.5)
    batch = single([high, high, low, low], [1.0, -1.0, 1.0, -1.0])
    result = policy_loss(batch, PolicyOptions(clip_low=0.2, clip_high=0.3), Normalizer.of(batch.mask))
    torch.testing.assert_close(
        gradient(result.loss, batch.logprobs), torch.tensor([[0.0, 1.5, -0.5, 0.0]], dtype=torch.float64) / 4
    )
    assert number(result.clip_fraction) == pytest.approx(0.5)
    assert number(result.loss) == pytest.approx((-1.3 + 1.5 - 0.5 + 0.8) / 4)


def test_log_ratio_is_clamped_to_twenty_nats() -> None:
    batch = single([35.0], [-1.0])
    result = policy_loss(batch, PolicyOptions(clip_low=0.2, clip_high=0.2), Normalizer.of(batch.mask))
    assert number(result.loss) == pytest.approx(math.exp(20.0))
    assert not gradient(result.loss, batch.logprobs).any()


def test_gspo_uses_the_sequence_ratio_and_each_tokens_own_gradient() -> None:
    batch = single([0.3, -0.2, 0.05], [1.0, 2.0, -1.0])
    result = gspo_loss(batch, PolicyOptions(clip_low=0.2, clip_high=0.2), Normalizer.of(batch.mask))
    ratio = math.exp(0.05)
    assert number(result.loss) == pytest.approx(-ratio * 2.0 / 3)
    torch.testing.assert_close(gradient(result.loss, batch.logprobs), -ratio * batch.advantages / 3)


def test_gspo_refuses_a_dual_clip() -> None:
    batch = random_batch(1)
    options = PolicyOptions(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    with pytest.raises(ValueError, match=r"ppo\.dual_clip"):
        gspo_loss(batch, options, Normalizer.of(batch.mask))


def test_objective_subtracts_the_entropy_bonus_and_adds_the_kl_penalty() -> None:
    batch = random_batch(6)
    reference, entropy = random_matrices(9, 2)
    normalizer = Normalizer.of(batch.mask)
    policy = policy_loss(batch, PolicyOptions(clip_low=0.2, clip_high=0.2), normalizer)
    kl = kl_to_reference(batch.logprobs, reference.masked_fill(batch.mask == 0, math.nan), batch.mask, "k2")
    result = compose(policy, batch.mask, "seq-mean-token-sum", normalizer, entropy=Term(entropy, 0.3), kl=Term(kl, 0.7))
    mean_entropy = aggregate(entropy, batch.mask, "seq-mean-token-sum", normalizer)
    difference = (batch.logprobs - reference) * batch.mask
    mean_kl = (0.5 * difference**2).sum() / normalizer.rows
    torch.testing.assert_close(result.loss, policy.loss - 0.3 * mean_entropy + 0.7 * mean_kl)
    torch.testing.assert_close(
        gradient(result.loss, batch.logprobs),
        gradient(policy.loss, batch.logprobs) + 0.7 * difference.detach() / normalizer.rows,
    )
    assert number(result.kl) == pytest.approx(number(mean_kl) * normalizer.rows / normalizer.tokens)
    assert number(result.policy_loss) == number(policy.loss)


def test_objective_without_terms_is_the_policy_loss() -> None:
    batch = random_batch(6)
    policy = policy_loss(batch, PolicyOptions(clip_low=0.2, clip_high=0.2), Normalizer.of(batch.mask))
    result = compose(policy, batch.mask, "token-mean", Normalizer.of(batch.mask))
    assert number(result.loss) == number(policy.loss)
    assert number(result.entropy) == number(result.kl) == 0.0


def test_every_choice_of_the_config_is_registered() -> None:
    assert set(typing.get_args(Aggregation)) == set(AGGREGATIONS)
    assert set(typing.get_args(typing.get_type_hints(PPOConfig)["loss"])) == set(POLICY_LOSSES)
