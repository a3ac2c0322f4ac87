"""KL estimators and controllers of the KL coefficient."""

from __future__ import annotations

import math
import subprocess
import sys
import typing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import KLConfig
from common.kl import KL_ESTIMATORS
from services.coordinator.kl_control import AdaptiveKL, FixedKL, kl_controller

NAMES = sorted(KL_ESTIMATORS)


@pytest.mark.parametrize("name", NAMES)
@given(logprobs=st.lists(st.tuples(st.floats(-40, 0), st.floats(-40, 0)), min_size=1, max_size=8))
@settings(deadline=None, max_examples=40)
def test_numpy_and_torch_agree(name: str, logprobs: list[tuple[float, float]]) -> None:
    policy, reference = np.array(logprobs).T
    by_numpy = KL_ESTIMATORS[name](policy, reference, np.exp)
    by_torch = KL_ESTIMATORS[name](torch.tensor(policy), torch.tensor(reference), torch.exp)
    np.testing.assert_allclose(by_torch.numpy(), by_numpy, atol=1e-9)
    if name != "k1":
        assert (by_numpy >= 0).all()


@pytest.mark.parametrize("name", ["k1", "k3"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_expectation_over_the_policy_is_the_kl_divergence(name: str, seed: int) -> None:
    policy, reference = np.log(np.random.default_rng(seed).dirichlet(np.full(7, 3.0), size=2))
    exact = math.fsum(np.exp(policy) * (policy - reference))
    estimates = KL_ESTIMATORS[name](policy, reference, np.exp)
    assert float(np.sum(np.exp(policy) * estimates)) == pytest.approx(exact, abs=1e-9)


def test_expected_gradient_of_k2_is_that_of_the_kl_divergence() -> None:
    logits, other = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    estimate = (policy.exp().detach() * KL_ESTIMATORS["k2"](policy, reference, torch.exp)).sum()
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], exact)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("k1", [-0.5, 30.0]), ("abs", [0.5, 30.0]), ("k2", [0.125, 450.0]), ("k3", [0.1487212707, 10])],
)
def test_known_values_and_the_clamps_of_k3(name: str, expected: list[float]) -> None:
    policy, reference = np.array([-1.0, -1.0]), np.array([-0.5, -31.0])
    np.testing.assert_allclose(KL_ESTIMATORS[name](policy, reference, np.exp), expected, atol=1e-9)
    # Without its clamps the exponential of 800 nats would overflow.
    assert KL_ESTIMATORS["k3"](np.array([-800.0]), np.array([0.0]), np.exp)[0] == 10.0


def test_every_estimator_of_the_config_is_registered() -> None:
    assert set(typing.get_args(typing.get_type_hints(KLConfig)["estimator"])) == set(KL_ESTIMATORS)


def test_the_coordinators_mathematics_do_not_import_torch() -> None:
    modules = "common.kl, services.coordinator.advantages, services.coordinator.kl_control"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_adaptive_controller_moves_towards_its_target_by_clipped_relative_errors() -> None:
    controller = AdaptiveKL(0.2, target=6.0, horizon=1000.0)
    controller.observe(6.6, 100)
    assert controller.coefficient == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    controller.observe(600.0, 100)
    assert controller.coefficient == pytest.approx(0.2 * 1.01 * 1.02)
    controller.observe(-5.0, 100)
    assert controller.coefficient == pytest.approx(0.2 * 1.01 * 1.02 * 0.98)


def test_controllers_come_from_the_config_and_resume() -> None:
    fixed = kl_controller(KLConfig(coefficient=0.3), samples_per_step=64)
    assert isinstance(fixed, FixedKL)
    fixed.observe(100.0, 64)
    assert fixed.coefficient == 0.3
    adaptive = kl_controller(
        KLConfig(controller="adaptive", coefficient=0.3, target=2.0, horizon=640.0),
        samples_per_step=64,
        coefficient=0.5,
    )
    adaptive.observe(2.0, 64)
    assert adaptive.coefficient == 0.5
    adaptive.observe(4.0, 64)
    assert adaptive.coefficient == pytest.approx(0.5 * 1.02)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_broken_kl_is_refused_by_either_controller(kl: float) -> None:
    for controller in (FixedKL(0.1), AdaptiveKL(0.1, 6.0, 1000.0)):
        with pytest.raises(ValueError, match="expected a finite number"):
            controller.observe(kl, 10)
        assert controller.coefficient == 0.1


def test_a_horizon_that_could_turn_the_sign_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ppo\.kl\.horizon = 10\.0 is too short"):
        kl_controller(KLConfig(controller="adaptive", horizon=10.0), samples_per_step=64)
    with pytest.raises(ValueError, match="target > 0"):
        AdaptiveKL(0.1, 0.0, 10.0)
