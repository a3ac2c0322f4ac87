"""From a step's columns to rewards, advantages and returns per token: the cache around the pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from common.config import PPOConfig
from common.kl import KL_ESTIMATORS
from common.messages import SlotRef
from common.token_cache import TokenCache
from services.coordinator.advantages import ADVANTAGES, AdvantageInputs, token_rewards
from services.coordinator.sample import Sample

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BatchStatistics:
    """Means over the samples that count; per-token figures count masked tokens only."""

    samples: int = 0
    tokens: int = 0
    reward: float = 0.0
    accuracy: float = 0.0
    kl: float = 0.0
    """Mean log ratio to the reference per token, in nats."""
    kl_per_response: float = 0.0
    """Mean over responses of the summed log ratio to the reference, in nats."""
    engine_difference: float = 0.0
    """Mean absolute difference of the trainer's and the engine's logprobs, in nats."""
    engine_difference_max: float = 0.0
    engine_kl: float = 0.0
    """Mean KL(engine || trainer) per token, in nats: estimator k3 on the engine's samples (``common.kl``)."""
    value: float = 0.0
    returns: float = 0.0
    explained_variance: float = 0.0
    """1 - Var(returns - values) / Var(returns): how much of the returns the critic predicts."""
    response_length: float = 0.0
    cut_ratio: float = 0.0
    """Share of responses cut by the length limit."""


def write_advantages(
    cache: TokenCache, samples: Sequence[Sample], ppo: PPOConfig, kl_coefficient: float
) -> BatchStatistics:
    """Writes rewards, advantages (whitened over all samples) and returns; gives their statistics."""
    if not samples:
        return BatchStatistics()
    refs = [sample.ref for sample in samples]
    lengths = np.array([sample.length for sample in samples])
    width = max(1, int(lengths.max()))
    inside = np.arange(width) < lengths[:, None]
    mask = np.where(inside, cache.rows("response_mask", refs, width), 0).astype(np.float64)
    columns = _Columns(cache, refs, mask)
    logprobs = columns.read("logprobs")
    values = columns.read("values") if ppo.advantage == "gae" else None
    reference = columns.read("ref_logprobs") if ppo.kl.placement != "none" else logprobs
    cut = np.array([sample.finished is not None and sample.finished.finish_reason == "length" for sample in samples])
    bootstrap = None if values is None else np.where(cut, cache.rows("bootstrap_value", refs, 1)[:, 0], 0.0)
    scores = np.array([sample.score.reward if sample.score else 0.0 for sample in samples])
    penalty = None
    if ppo.kl.placement == "reward":
        penalty = kl_coefficient * KL_ESTIMATORS[ppo.kl.estimator](logprobs, reference, np.exp)
    rewards = token_rewards(scores, mask, penalty)
    result = ADVANTAGES[ppo.advantage](
        AdvantageInputs(
            rewards=rewards,
            mask=mask,
            group=np.array([sample.group for sample in samples]),
            values=values,
            bootstrap_values=bootstrap,
            gamma=ppo.gamma,
            lam=ppo.lam,
            whiten=ppo.whiten,
        )
    )
    for name, column in (("rewards", rewards), ("advantages", result.advantages), ("returns", result.returns)):
        cache.write_rows(name, refs, column.astype(np.float32))
    return replace(
        _differences(logprobs, columns.read("behaviour_logprobs"), mask),
        samples=len(samples), tokens=int(mask.sum()), reward=float(scores.mean()),
        accuracy=float(np.mean([sample.score.accuracy if sample.score else 0.0 for sample in samples])),
        kl=_token_mean((logprobs - reference) * mask, mask),
        kl_per_response=float(((logprobs - reference) * mask).sum(1).mean()),
        value=0.0 if values is None else _token_mean(values * mask, mask),
        returns=_token_mean(result.returns * mask, mask),
        explained_variance=0.0 if values is None else _explained_variance(values, result.returns, mask),
        response_length=float(lengths.mean()), cut_ratio=float(cut.mean()),
    )  # fmt: skip


def _differences(logprobs: Array, behaviour: Array, mask: Array) -> BatchStatistics:
    """How far trainer and engine are apart; both [B, T] are 0 outside the mask."""
    difference = np.abs(logprobs - behaviour)
    return BatchStatistics(
        engine_difference=_token_mean(difference, mask), engine_difference_max=float(difference.max()),
        engine_kl=_token_mean(KL_ESTIMATORS["k3"](behaviour, logprobs, np.exp), mask),
    )  # fmt: skip


def _token_mean(column: Array, mask: Array) -> float:
    """Of a column [B, T] that is 0 outside the mask."""
    return float(column.sum()) / max(float(mask.sum()), 1.0)


class _Columns:
    """Per-token columns of the samples, [B, T] float64, 0 outside the mask."""

    def __init__(self, cache: TokenCache, refs: Sequence[SlotRef], mask: Array) -> None:
        self.cache = cache
        self.refs = refs
        self.mask = mask

    def read(self, name: str) -> Array:
        rows = self.cache.rows(name, self.refs, self.mask.shape[1]).astype(np.float64)
        return np.where(self.mask > 0, rows, 0.0)


def _explained_variance(values: Array, returns: Array, mask: Array) -> float:
    inside = mask > 0
    variance = float(returns[inside].var()) if inside.any() else 0.0
    return 0.0 if variance == 0 else 1.0 - float((returns - values)[inside].var()) / variance
