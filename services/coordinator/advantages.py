"""Advantage estimators, selected by name from ``ADVANTAGES`` with the config key ``ppo.advantage``.

Every estimator is a pure function ``AdvantageInputs -> Advantages`` over the whole batch of a step. Arrays are
``[batch][response position]``; ``mask`` is 1 on the tokens of the response and 0 on padding and on gaps (tool output).
Tokens outside the mask count nowhere and get advantage and return 0. A row whose mask is empty (a sample that could not
be scored) counts in no statistic either, its group's included. All arithmetic is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

WHITEN_EPS: Final = 1e-8
"""Added to the variance in whitening."""
GRPO_EPS: Final = 1e-6
"""Added to a group's standard deviation in GRPO."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AdvantageInputs:
    """What an estimator may need, for B samples of up to T response tokens. Arrays of any real dtype are accepted.

    Raises:
        ValueError: if a shape does not fit, or ``group`` does not hold integers.
    """

    rewards: NDArray[Any]
    """[B, T]: reward of each token, a KL penalty included where it belongs to the reward."""
    mask: NDArray[Any]
    """[B, T]: nonzero on the tokens that count."""
    group: NDArray[Any]
    """[B] integers: samples of the same prompt share a number."""
    values: NDArray[Any] | None = None
    """[B, T]: the critic's value of the state before each token; only ``gae`` reads it."""
    bootstrap_values: NDArray[Any] | None = None
    """[B]: value after the last token of a sample cut by the length limit, 0 for one that ended; None: all 0."""
    baselines: NDArray[Any] | None = None
    """[B]: summed reward of the greedy response to the same prompt; only ``remax`` reads it."""
    gamma: float = 1.0
    """Discount per token that counts."""
    lam: float = 1.0
    """GAE's lambda."""
    whiten: bool = False
    """Whether ``gae`` whitens. REINFORCE++ always does, by its definition; the other estimators never do."""

    def __post_init__(self) -> None:
        if self.rewards.ndim != 2:
            raise ValueError(f"rewards must have shape [batch, tokens], not {list(self.rewards.shape)}")
        rows = self.rewards.shape[:1]
        expected = (
            ("mask", self.mask, self.rewards.shape),
            ("values", self.values, self.rewards.shape),
            ("group", self.group, rows),
            ("bootstrap_values", self.bootstrap_values, rows),
            ("baselines", self.baselines, rows),
        )
        for name, array, shape in expected:
            if array is not None and array.shape != shape:
                raise ValueError(f"{name} has shape {list(array.shape)}, expected {list(shape)} to fit rewards")
        if not np.issubdtype(self.group.dtype, np.integer):
            raise ValueError(f"group must hold integers, not {self.group.dtype}")


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """float64 [B, T] each, 0 outside the mask. ``returns`` is what a critic would be fitted to, never whitened."""

    advantages: FloatArray
    returns: FloatArray


AdvantageFunction = Callable[[AdvantageInputs], Advantages]


def token_rewards(scores: FloatArray, mask: FloatArray, penalty: FloatArray | None = None) -> FloatArray:
    """[B, T]: each score of [B] on its row's last masked token (nowhere in a row without one), less a penalty on each.

    ``mask`` and ``penalty`` are [B, T]; the penalty counts inside the mask alone.
    """
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    rewards = np.zeros_like(mask)
    rewards[np.arange(len(scores)), last] = np.where(mask.any(axis=1), scores, 0.0)
    return rewards if penalty is None else rewards - penalty * mask


def masked_mean(values: NDArray[Any], mask: NDArray[Any]) -> float:
    """Mean of ``values`` where ``mask`` is nonzero (same shape); 0 where nothing is."""
    inside = mask != 0
    count = int(np.count_nonzero(inside))
    return float(np.sum(values, where=inside, dtype=np.float64)) / count if count else 0.0


def masked_whiten(values: NDArray[Any], mask: NDArray[Any]) -> FloatArray:
    """Subtract the masked mean and divide by the root of the unbiased masked variance + 1e-8; 0 outside the mask.

    A single token has no unbiased variance: it becomes 0, as every constant does.
    """
    inside = mask != 0
    centred: FloatArray = np.where(inside, values - masked_mean(values, mask), 0.0)
    variance = float(np.sum(centred * centred)) / max(int(np.count_nonzero(inside)) - 1, 1)
    return centred / math.sqrt(variance + WHITEN_EPS)


def gae(inputs: AdvantageInputs) -> Advantages:
    """Generalized advantage estimation (Schulman et al. 2015, equation 16), whitened if asked for.

    Raises:
        ValueError: without ``values``.
    """
    if inputs.values is None:
        raise ValueError("advantage 'gae' needs values [batch, tokens] from a critic, got none")
    inside = inputs.mask != 0
    values = np.where(inside, inputs.values, 0.0)
    # Transposed and contiguous, so that each step of the recursion reads whole cache lines.
    inside_t = np.ascontiguousarray(inside.T)
    values_t = np.ascontiguousarray(values.T)
    rewards_t = np.ascontiguousarray(inputs.rewards.T, dtype=np.float64)
    advantages_t = np.zeros_like(values_t)
    next_value = _per_row(inputs.bootstrap_values, inside.shape[0])
    advantage = np.zeros(inside.shape[0])
    decay = inputs.gamma * inputs.lam
    for t in range(len(inside_t) - 1, -1, -1):
        counts = inside_t[t]
        error = rewards_t[t] + inputs.gamma * next_value - values_t[t]
        # Outside the mask both pass through unchanged: a gap is no step in time.
        advantage = np.where(counts, error + decay * advantage, advantage)
        next_value = np.where(counts, values_t[t], next_value)
        advantages_t[t] = advantage
    advantages = np.where(inside, advantages_t.T, 0.0)
    returns = advantages + values
    return Advantages(masked_whiten(advantages, inside) if inputs.whiten else advantages, returns)


def grpo(inputs: AdvantageInputs) -> Advantages:
    """Summed reward, standardised within its group (Shao et al. 2024, section 4.1.2), on every token."""
    groups = _Groups.of(inputs)
    return _outcome(inputs, groups.centred / (groups.deviation + GRPO_EPS))


def dr_grpo(inputs: AdvantageInputs) -> Advantages:
    """Summed reward minus its group's mean, without the division by the deviation (Liu et al. 2025)."""
    return _outcome(inputs, _Groups.of(inputs).centred)


def rloo(inputs: AdvantageInputs) -> Advantages:
    """Summed reward minus the mean of the *other* samples of its group (Ahmadian et al. 2024, equation 7).

    A sample without others keeps its reward.
    """
    groups = _Groups.of(inputs)
    # r - (n * mean - r) / (n - 1) is the same as (r - mean) * n / (n - 1).
    return _outcome(inputs, groups.centred * groups.size / np.maximum(groups.size - 1, 1))


def reinforce_pp(inputs: AdvantageInputs) -> Advantages:
    """Discounted return of each token, whitened over the batch (REINFORCE++, Hu et al. 2025)."""
    returns = _returns(inputs, inputs.gamma)
    return Advantages(masked_whiten(returns, inputs.mask), returns)


def reinforce_pp_baseline(inputs: AdvantageInputs) -> Advantages:
    """Summed reward minus its group's mean, whitened over the tokens of the batch (REINFORCE++, Hu et al. 2025)."""
    centred = dr_grpo(inputs)
    return Advantages(masked_whiten(centred.advantages, inputs.mask), centred.returns)


def remax(inputs: AdvantageInputs) -> Advantages:
    """Sum of the rewards still to come minus the greedy response's summed reward (Li et al. 2023, equation 5).

    Raises:
        ValueError: without ``baselines``.
    """
    if inputs.baselines is None:
        raise ValueError("advantage 'remax' needs baselines [batch], the greedy responses' summed rewards, got none")
    baselines = _per_row(inputs.baselines, inputs.rewards.shape[0])
    advantages = np.where(inputs.mask != 0, _returns(inputs, 1.0) - baselines[:, None], 0.0)
    return Advantages(advantages, _returns(inputs, inputs.gamma))


ADVANTAGES: Final[dict[str, AdvantageFunction]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
}
"""Estimators by the value of ``ppo.advantage``."""


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Per row [B]: its summed reward minus its group's mean, the group's deviation, the rows that count in the group.

    A group of one has mean 0 and deviation 1.
    """

    centred: FloatArray
    deviation: FloatArray
    size: FloatArray

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> _Groups:
        inside = inputs.mask != 0
        counts = inside.any(axis=1).astype(np.float64)
        scores = np.where(inside, inputs.rewards, 0.0).sum(axis=1)
        members = np.unique(inputs.group, return_inverse=True)[1]
        size = np.bincount(members, counts).astype(np.float64)
        alone = size < 2
        mean = np.where(alone, 0.0, np.bincount(members, scores) / np.maximum(size, 1))
        centred = scores - mean[members]
        variance = np.bincount(members, counts * centred * centred) / np.maximum(size - 1, 1)
        deviation = np.where(alone, 1.0, np.sqrt(variance))
        return cls(centred, deviation[members], size[members])


def _outcome(inputs: AdvantageInputs, per_row: FloatArray) -> Advantages:
    """One advantage a row, on each of its tokens."""
    return Advantages(np.where(inputs.mask != 0, per_row[:, None], 0.0), _returns(inputs, inputs.gamma))


def _returns(inputs: AdvantageInputs, gamma: float) -> FloatArray:
    """[B, T]: discounted sum of the rewards from each token on; gaps take no time."""
    inside = inputs.mask != 0
    rewards = np.where(inside, inputs.rewards, 0.0)
    returns = np.zeros_like(rewards)
    running = np.zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = np.where(inside[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return np.where(inside, returns, 0.0)


def _per_row(array: NDArray[Any] | None, rows: int) -> FloatArray:
    return np.zeros(rows) if array is None else array.astype(np.float64)
