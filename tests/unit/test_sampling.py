"""Drawing tokens: the distribution that is drawn from, its logprobs, and random numbers that belong to one sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Sampling
from services.rollout.engines.sampling import draw, filter_logits, sample_uniforms

ALMOST_ONE = 1.0 - 2.0**-53
"""The largest number that a generator of [0, 1) gives."""


def sampling(temperature: float = 1.0, greedy: bool = False, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=1, greedy=greedy, top_k=top_k, top_p=top_p)


def uniforms(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def draw_many(logits: torch.Tensor, how: Sampling, count: int) -> torch.Tensor:
    """Counts of each token in ``count`` draws from one row of logits."""
    numbers = torch.from_numpy(np.random.default_rng(3).random(count))
    ids, _ = draw(logits.expand(count, -1), numbers, how)
    return torch.bincount(ids, minlength=logits.shape[-1])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected).square() / expected)[expected > 0].sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_softmax_at_the_temperature(temperature: float) -> None:
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(5)) * 1.5
    counts = draw_many(logits, sampling(temperature), 40_000)
    right = torch.softmax(logits[0].double() / temperature, -1)
    # 23 degrees of freedom: above 60 has probability 4e-5; the wrong temperature gives hundreds.
    assert chi_square(counts, right) < 60
    assert chi_square(counts, torch.softmax(logits[0].double() / (temperature * 1.15), -1)) > 100


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(3, 1.0, 3), (0, 0.7, 2), (2, 0.99, 2), (4, 0.85, 3)])
def test_frequencies_follow_the_filtered_distribution(top_k: int, top_p: float, kept: int) -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.2, 0.3, 0.05])
    counts = draw_many(probabilities.log().unsqueeze(0), sampling(top_k=top_k, top_p=top_p), 20_000)
    best = torch.zeros(5, dtype=torch.float64).scatter(0, probabilities.argsort(descending=True)[:kept], 1.0)
    expected = probabilities * best / (probabilities * best).sum()
    assert counts[best == 0].sum() == 0
    assert chi_square(counts, expected) < 30


def test_one_number_decides_one_token() -> None:
    """Token i is drawn exactly where the cumulative probability first exceeds the number."""
    numbers = uniforms(0.0, 0.2499999, 0.2500001, 0.4999, 0.5001, 0.7499, 0.7501, ALMOST_ONE)
    ids, _ = draw(torch.zeros(8, 4), numbers, sampling())
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_ends_of_the_unit_interval_never_draw_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf, -torch.inf]])
    ids, logprobs = draw(logits.expand(4, -1), uniforms(0.0, 0.4999, 0.5, ALMOST_ONE), sampling())
    assert ids.tolist() == [1, 1, 3, 3]
    assert torch.isfinite(logprobs).all()


@given(st.integers(0, 10_000), st.floats(0.0, ALMOST_ONE), st.integers(1, 12), st.floats(0.05, 1.0))
def test_what_is_drawn_has_positive_probability(seed: int, number: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 8
    ids, logprobs = draw(logits, uniforms(number), sampling(top_k=top_k, top_p=top_p))
    assert 0 <= int(ids) < 12
    assert math.isfinite(float(logprobs))


def test_underflowing_tail_is_not_drawn() -> None:
    """Probabilities that underflow to 0 in float64 lie at the very end of the cumulative distribution."""
    logits = torch.tensor([[0.0, -2000.0, -3000.0]])
    ids, logprobs = draw(logits, uniforms(ALMOST_ONE), sampling())
    assert ids.tolist() == [0]
    assert logprobs.tolist() == [0.0]


def test_logprobs_are_those_of_the_sampled_distribution() -> None:
    logits = torch.randn(64, 10, generator=torch.Generator().manual_seed(2))
    numbers = torch.from_numpy(np.random.default_rng(1).random(64))
    for how in (
        sampling(),
        sampling(0.6),
        sampling(1.4, top_k=4),
        sampling(0.8, top_p=0.6),
        sampling(0.7, greedy=True),
    ):
        ids, logprobs = draw(logits, numbers, how)
        for row in range(64):
            scaled = (logits[row] / how.temperature).double()
            allowed = torch.ones(10, dtype=torch.bool)
            order = scaled.argsort(descending=True)
            if how.top_k:
                allowed[order[how.top_k :]] = False
            if how.top_p < 1:
                before = torch.softmax(scaled, -1)[order].cumsum(0) - torch.softmax(scaled, -1)[order]
                allowed[order[before >= how.top_p]] = False
            expected = torch.log_softmax(scaled.masked_fill(~allowed, -torch.inf), -1)[ids[row]]
            assert float(logprobs[row]) == pytest.approx(float(expected), abs=1e-5)
    assert logprobs.dtype == torch.float32


def test_greedy_takes_the_most_likely_token_whatever_the_number() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(4))
    ids, _ = draw(logits, uniforms(0.0, 0.2, 0.5, 0.9, ALMOST_ONE), sampling(2.0, greedy=True))
    assert torch.equal(ids, logits.argmax(-1))


def test_rows_do_not_influence_each_other() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(6))
    numbers = uniforms(0.1, 0.55, 0.93)
    together = draw(logits, numbers, sampling(0.9, top_k=5, top_p=0.9))
    for row in range(3):
        alone = draw(logits[row : row + 1], numbers[row : row + 1], sampling(0.9, top_k=5, top_p=0.9))
        assert [int(alone[0]), float(alone[1])] == [int(together[0][row]), float(together[1][row])]


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(8)).bfloat16()
    _, logprobs = draw(logits, uniforms(0.3), sampling(greedy=True))
    assert float(logprobs) == pytest.approx(float(torch.log_softmax(logits.double(), -1).max()), abs=1e-5)


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [(0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3]), (0.95, [1, 2, 3, 4]), (1e-6, [1])],
)
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, nucleus: list[int]) -> None:
    logits = logits_of(0.04, 0.4, 0.2, 0.3, 0.06)
    kept = filter_logits(logits, 0, top_p)[0]
    assert torch.isfinite(kept).nonzero().flatten().tolist() == nucleus
    assert torch.equal(kept[nucleus], logits[0, nucleus])


def test_top_p_counts_within_top_k() -> None:
    """Renormalised over the two best, 0.4 / 0.7 is already 0.57."""
    kept = filter_logits(logits_of(0.04, 0.4, 0.2, 0.3, 0.06), 2, 0.5)[0]
    assert torch.isfinite(kept).nonzero().flatten().tolist() == [1]


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    assert torch.isfinite(filter_logits(torch.zeros(2, 7), 3, 1.0)).sum(1).tolist() == [3, 3]


def test_filters_that_are_off_or_wide_change_nothing() -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(9))
    for top_k in (0, 5, 50):
        assert torch.equal(filter_logits(logits, top_k, 1.0), logits)


def test_uniforms_are_a_function_of_seed_step_and_sample() -> None:
    assert np.array_equal(sample_uniforms(1, 2, 3, 20), sample_uniforms(1, 2, 3, 20))
    assert np.array_equal(sample_uniforms(1, 2, 3, 20)[:5], sample_uniforms(1, 2, 3, 5))


def test_uniforms_differ_between_seeds_steps_and_samples() -> None:
    keys = [(seed, step, sample) for seed in (0, 1, 2**63) for step in (0, 1, 7) for sample in (0, 1, 2, 4095)]
    firsts = {sample_uniforms(*key, count=1)[0] for key in keys}
    assert len(firsts) == len(keys)


def test_uniforms_of_neighbouring_samples_are_uniform_and_uncorrelated() -> None:
    numbers = np.stack([sample_uniforms(1, 1, sample, 64) for sample in range(512)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = torch.from_numpy(np.bincount((numbers * 16).astype(np.int64).ravel(), minlength=16))
    assert chi_square(counts, torch.full((16,), 1 / 16, dtype=torch.float64)) < 45
    assert abs(float(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1])) < 0.02
    assert abs(float(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1])) < 0.02
