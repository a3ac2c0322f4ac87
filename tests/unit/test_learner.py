"""The optimizer of a model: schedules, clipping, skipped steps, float32 masters, weight decay."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.config import (
    OptimizerConfig,
)
from common.learner import MAX_SKIPPED, Learner, NonFiniteGradients, learning_rate


def optimizer(**fields: Any) -> OptimizerConfig:
    plain: dict[str, Any] = {"learning_rate": 1.0, "max_grad_norm": 0.0}
    return OptimizerConfig(**(plain | fields))


def rates(config: OptimizerConfig, total: int) -> list[float]:
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


# ---------------------------------------------------------------- learning rate


def test_constant_without_warmup() -> None:
    assert rates(optimizer(learning_rate=0.5, min_ratio=0.1), 4) == [0.5] * 4


def test_warmup_rises_linearly_to_the_peak() -> None:
    assert rates(optimizer(warmup_steps=4), 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_falls_to_min_ratio_at_the_last_step() -> None:
    assert rates(optimizer(warmup_steps=2, schedule="linear", min_ratio=0.2), 6) == pytest.approx(
        [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    )
    assert rates(optimizer(schedule="linear"), 4) == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_cosine_falls_to_min_ratio_at_the_last_step() -> None:
    found = rates(optimizer(learning_rate=2.0, warmup_steps=1, schedule="cosine", min_ratio=0.1), 5)
    assert found == pytest.approx([2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 4))) for i in range(5)])
    assert found[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_as_long_as_the_run_and_steps_past_its_end(schedule: Any) -> None:
    assert rates(optimizer(warmup_steps=3, schedule=schedule), 3) == pytest.approx([1 / 3, 2 / 3, 1.0])
    config = optimizer(schedule=schedule, min_ratio=0.3)
    assert learning_rate(config, 9, 5) == learning_rate(config, 5, 5)


def test_start_step_sets_the_rate_that_is_applied() -> None:
    model = nn.Linear(1, 1, bias=False)
    before = float(model.weight.detach())
    learner = Learner(model, optimizer(learning_rate=0.4, warmup_steps=4, eps=1e-12), total_steps=10)
    assert learner.start_step(1) == pytest.approx(0.1)
    learner.accumulate(model.weight.sum())
    learner.apply()
    assert float(model.weight.detach()) == pytest.approx(before - 0.1)


# ---------------------------------------------------------------- gradients


def weight_and_learner(config: OptimizerConfig, size: int = 2) -> tuple[torch.Tensor, Learner]:
    model = nn.Linear(size, 1, bias=False)
    nn.init.ones_(model.weight)
    return model.weight, Learner(model, config, 1)


def first_moment(learner: Learner) -> torch.Tensor:
    (state,) = learner.optimizer.state.values()
    return state["exp_avg"] / (1.0 - learner.config.betas[0])


def test_clipping_scales_the_gradient_to_the_limit_and_reports_the_norm_before() -> None:
    weight, learner = weight_and_learner(optimizer(max_grad_norm=0.5))
    learner.accumulate((weight * torch.tensor([3.0, 4.0])).sum())
    step = learner.apply()
    assert (step.norm, step.applied) == (pytest.approx(5.0), True)
    assert first_moment(learner)[0].tolist() == pytest.approx([0.3, 0.4], rel=1e-5)


@pytest.mark.parametrize("limit", [0.0, 6.0])
def test_gradients_within_the_limit_or_without_one_stay(limit: float) -> None:
    weight, learner = weight_and_learner(optimizer(max_grad_norm=limit))
    learner.accumulate((weight * torch.tensor([3.0, 4.0])).sum())
    assert learner.apply().norm == pytest.approx(5.0)
    assert first_moment(learner)[0].tolist() == pytest.approx([3.0, 4.0])


def test_clipping_is_over_all_parameters_together() -> None:
    model = nn.ParameterDict({"a": torch.ones(2, 2), "b": torch.ones(3)})
    learner = Learner(model, optimizer(max_grad_norm=1.0), 1)
    learner.accumulate(3.0 * model["a"].sum() + 4.0 * model["b"].sum())
    assert learner.apply().norm == pytest.approx(math.sqrt(4 * 9 + 3 * 16))
    moments = [state["exp_avg"].flatten() / 0.1 for state in learner.optimizer.state.values()]
    assert float(torch.cat(moments).norm()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_dropped(bad: float, limit: float, caplog: pytest.LogCaptureFixture) -> None:
    weight, learner = weight_and_learner(optimizer(learning_rate=0.1, max_grad_norm=limit))
    with caplog.at_level(logging.WARNING, "learner"):
        learner.accumulate((weight * torch.tensor([bad, 1.0])).sum())
        assert not learner.apply().applied
    assert "this optimizer step is skipped (1 in a row)" in caplog.text
    assert weight.tolist() == [[1.0, 1.0]]
    assert not learner.optimizer.state
    learner.accumulate(weight.sum())
    assert learner.apply().applied
    assert torch.isfinite(weight).all()
    assert bool((weight < 1.0).all()), "the step after is taken"


def test_the_third_in_a_row_raises_and_a_good_one_starts_the_count_again() -> None:
    weight, learner = weight_and_learner(optimizer(learning_rate=1e-3))

    def step(value: float) -> None:
        learner.accumulate((weight * value).sum())
        learner.apply()

    assert MAX_SKIPPED == 3
    for value in (math.nan, math.nan, 1.0, math.inf, math.nan):
        step(value)
    with pytest.raises(NonFiniteGradients, match=r"3 optimizer steps in a row.*learning_rate"):
        step(math.nan)
    assert torch.isfinite(weight).all()


# ---------------------------------------------------------------- float32 masters, weight decay


def test_half_precision_model_learns_from_steps_below_its_resolution() -> None:
    """At 1.0 the next bfloat16 below is 1 - 2^-8; a hundred steps of 1e-4 would each round back to 1.0."""
    model = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    learner = Learner(model, optimizer(learning_rate=1e-4, eps=1e-12), 1)
    for _ in range(10):
        learner.accumulate(model.weight.sum())
        learner.apply()
    assert model.weight.tolist() == [[1.0] * 4]
    for _ in range(90):
        learner.accumulate(model.weight.sum())
        learner.apply()
    assert model.weight.dtype == torch.bfloat16
    assert learner.masters[0].detach().numpy() == pytest.approx(np.full((1, 4), 0.99), abs=1e-5)
    assert torch.equal(model.weight, learner.masters[0].bfloat16())


def test_half_precision_gradients_are_summed_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    learner = Learner(model, optimizer(), 1)
    for share in [1.0] + [2.0**-9] * 256:
        learner.accumulate((model.weight * share).sum())
    assert learner.apply().norm == pytest.approx(1.5)


def test_float32_model_is_its_own_master() -> None:
    model = nn.Linear(3, 2)
    learner = Learner(model, optimizer(), 1)
    assert all(parameter is master for parameter, master in zip(learner.parameters, learner.masters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay_is_of_matrices_alone(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(3, 2)).to(dtype)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    learner = Learner(model, optimizer(learning_rate=0.5, weight_decay=0.5), 1)
    learner.accumulate(torch.stack([parameter.float().sum() for parameter in model.parameters()]).sum() * 0.0)
    learner.apply()
    for name, parameter in model.named_parameters():
        assert parameter.unique().tolist() == [0.75 if parameter.ndim == 2 else 1.0], name


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    learner = Learner(model, optimizer(weight_decay=0.1), 1)
    learner.accumulate(model(torch.ones(1, 2)).sum())
    learner.apply()
    assert torch.equal(model.bias, before)


# ---------------------------------------------------------------- state


def two_layers(dtype: torch.dtype, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def learn(model: nn.Module, learner: Learner, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(6, 5, generator=generator).to(next(model.parameters()).dtype)
    learner.start_step(step)
    for half in inputs.split(3):
        learner.accumulate(model(half).float().square().mean())
    assert learner.apply().applied


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def fill_from(saved: dict[str, torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def read(targets: dict[str, torch.Tensor]) -> None:
        for key, tensor in targets.items():
            tensor.copy_(saved[key])

    return read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_that_takes_a_state_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    config = optimizer(learning_rate=0.03, weight_decay=0.1, max_grad_norm=0.5, schedule="cosine", warmup_steps=2)
    model = two_layers(dtype, 1)
    learner = Learner(model, config, 6)
    for step in (1, 2, 3):
        learn(model, learner, step)
    weights, state = copied(dict(model.named_parameters())), copied(learner.state())
    for step in (4, 5):
        learn(model, learner, step)

    other = two_layers(dtype, 2)
    later = Learner(other, config, 6)
    learn(other, later, 1)  # whatever it learnt before is forgotten
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
    later.load_state(state.keys(), fill_from(state), 2)
    assert later.skipped_in_row == 2
    for step in (4, 5):
        learn(other, later, step)
    found, expected = dict(other.named_parameters()) | later.state(), dict(model.named_parameters()) | learner.state()
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert not torch.equal(expected["0.weight"], weights["0.weight"]), "nothing was learnt: nothing is tested"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_by_names_and_as_large_as_it_says(dtype: torch.dtype) -> None:
    model = two_layers(dtype, 1)
    model[1].weight.requires_grad_(False)
    learner = Learner(model, optimizer(learning_rate=0.1), 1)
    names = {"0.weight", "0.bias", "1.bias", "2.weight", "2.bias"}
    masters = {f"master.{name}" for name in names} if dtype == torch.bfloat16 else set[str]()
    assert learner.state().keys() == masters
    learn(model, learner, 1)
    state = learner.state()
    assert state.keys() == masters | {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in names}
    assert learner.state_names() == (masters, state.keys() - masters)
    assert learner.full_bytes() == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reset_learner_is_a_new_one(dtype: torch.dtype) -> None:
    model = two_layers(dtype, 1)
    learner = Learner(model, optimizer(learning_rate=0.03), 4)
    learn(model, learner, 1)
    learner.accumulate(model(torch.ones(1, 5, dtype=dtype)).sum())
    learner.skipped_in_row = 1
    with torch.no_grad():
        for parameter, first in zip(model.parameters(), two_layers(dtype, 1).parameters(), strict=True):
            parameter.copy_(first)
    learner.reset()
    fresh = two_layers(dtype, 1)
    new = Learner(fresh, optimizer(learning_rate=0.03), 4)
    assert learner.skipped_in_row == 0
    for step in (1, 2):
        learn(model, learner, step)
        learn(fresh, new, step)
    assert all(torch.equal(mine, its) for mine, its in zip(model.parameters(), fresh.parameters(), strict=True))
