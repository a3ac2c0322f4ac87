"""The policy's objective, selected by name from ``POLICY_LOSSES`` with the config key ``ppo.loss``.

Pure functions of tensors [rows, width]. What they return is the micro-batch's *share* of the mini-batch's loss and
metrics: shares add up over micro-batches and ranks, so that the result does not depend on how a batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.aggregation import Normalizer, aggregate, mean_over_tokens
from common.config import Aggregation
from common.kl import KL_ESTIMATORS

MAX_LOG_RATIO: Final = 20.0
"""The log ratio of new and old policy is clamped to +- this many nats."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyBatch:
    """A micro-batch, all [rows, width]. Values outside the mask are never read, not even NaN."""

    logprobs: Tensor
    """Log probabilities of the sampled tokens under the policy being trained, with gradient."""
    old_logprobs: Tensor
    """The same under the policy at the start of the step."""
    advantages: Tensor
    mask: Tensor
    """Nonzero on tokens that count."""
    importance_weights: Tensor | None = None
    """Factor of each token's loss, for samples of an older policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The objective's part of ``ppo``; names as there."""

    clip_low: float
    clip_high: float
    dual_clip: float = 0.0
    """0 switches the dual clip off."""
    aggregation: Aggregation = "token-mean"


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Scalars. All but ``ratio_max`` add up over micro-batches and ranks; of ``ratio_max`` take the maximum."""

    loss: Tensor
    """Has the graph; the rest is detached."""
    clip_fraction: Tensor
    """Share of tokens whose ratio is clipped to the loss's cost."""
    dual_clip_fraction: Tensor
    """Share of tokens whose loss is bounded by the dual clip."""
    approx_kl: Tensor
    """Mean over tokens of the k3 estimate of KL(old || new), in nats; of the sequence's ratio under GSPO."""
    ratio_max: Tensor
    """Largest ratio of new and old probability inside the mask; 0 where nothing is."""


PolicyLossFunction = Callable[[PolicyBatch, PolicyOptions, Normalizer], PolicyLoss]


def policy_loss(batch: PolicyBatch, options: PolicyOptions, normalizer: Normalizer) -> PolicyLoss:
    """PPO's clipped surrogate on each token's ratio (Schulman et al. 2017, equation 7), with separate bounds.

    With ``dual_clip`` c, the loss of a token with negative advantage A is at most -A * c (Ye et al. 2020, equation 5).
    """
    log_ratio = _log_ratio(batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _clipped_surrogate(log_ratio, batch, options, normalizer)


def gspo_loss(batch: PolicyBatch, options: PolicyOptions, normalizer: Normalizer) -> PolicyLoss:
    """The clipped surrogate on the whole sequence's ratio, the exponential of the masked mean log ratio.

    Gradients flow through each token by itself, the GSPO-token form (Zheng et al. 2025, equation 14).

    Raises:
        ValueError: if ``dual_clip`` is on, which GSPO does not have.
    """
    if options.dual_clip > 0:
        raise ValueError(f"loss 'gspo' has no dual clip: set ppo.dual_clip to 0 instead of {options.dual_clip}")
    log_ratio = _log_ratio(batch)
    lengths = (batch.mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    sequence = (log_ratio.detach().sum(dim=1, keepdim=True) / lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # The value is the sequence's, the derivative the token's own.
    return _clipped_surrogate(sequence + (log_ratio - log_ratio.detach()), batch, options, normalizer)


POLICY_LOSSES: Final[dict[str, PolicyLossFunction]] = {"ppo": policy_loss, "gspo": gspo_loss}
"""Losses by the value of ``ppo.loss``."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A quantity per token [rows, width] and its factor in the objective."""

    per_token: Tensor
    coefficient: float


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """Scalars that add up over micro-batches and ranks."""

    loss: Tensor
    """What is differentiated: policy loss - entropy bonus + KL penalty."""
    policy_loss: Tensor
    """The policy loss alone, detached."""
    entropy: Tensor
    """Mean over tokens, in nats, detached; 0 where there is no such term."""
    kl: Tensor
    """Mean over tokens, in nats, detached; 0 where there is no such term."""


def compose(
    policy: PolicyLoss,
    mask: Tensor,
    aggregation: Aggregation,
    normalizer: Normalizer,
    *,
    entropy: Term | None = None,
    kl: Term | None = None,
) -> Objective:
    """Add the entropy bonus and the KL penalty (``ppo.kl.placement = "loss"``), aggregated like the policy loss."""
    loss = policy.loss
    none = torch.zeros_like(policy.loss.detach())
    if entropy is not None and entropy.coefficient != 0:
        loss = loss - entropy.coefficient * aggregate(entropy.per_token, mask, aggregation, normalizer)
    if kl is not None and kl.coefficient != 0:
        loss = loss + kl.coefficient * aggregate(kl.per_token, mask, aggregation, normalizer)
    return Objective(
        loss=loss,
        policy_loss=policy.loss.detach(),
        entropy=none if entropy is None else mean_over_tokens(entropy.per_token, mask, normalizer),
        kl=none if kl is None else mean_over_tokens(kl.per_token, mask, normalizer),
    )


def _log_ratio(batch: PolicyBatch) -> Tensor:
    """Log ratio of new and old policy, [rows, width], 0 outside the mask; its gradient never sees padding."""
    return (batch.logprobs - batch.old_logprobs).masked_fill(batch.mask == 0, 0.0)


def _clipped_surrogate(
    log_ratio: Tensor, batch: PolicyBatch, options: PolicyOptions, normalizer: Normalizer
) -> PolicyLoss:
    ratio = log_ratio.exp()
    advantages = batch.advantages.masked_fill(batch.mask == 0, 0.0)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    losses = torch.maximum(plain, clipped)
    bounded = torch.zeros_like(losses, dtype=torch.bool)
    if options.dual_clip > 0:
        bound = -advantages * options.dual_clip
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
    if batch.importance_weights is not None:
        losses = losses * batch.importance_weights.masked_fill(batch.mask == 0, 0.0)
    fixed = log_ratio.detach()
    approx_kl = KL_ESTIMATORS["k3"](torch.zeros_like(fixed), fixed, torch.exp)
    return PolicyLoss(
        loss=aggregate(losses, batch.mask, options.aggregation, normalizer),
        clip_fraction=mean_over_tokens((clipped > plain).to(losses.dtype), batch.mask, normalizer),
        dual_clip_fraction=mean_over_tokens(bounded.to(losses.dtype), batch.mask, normalizer),
        approx_kl=mean_over_tokens(approx_kl, batch.mask, normalizer),
        ratio_max=ratio.detach().masked_fill(batch.mask == 0, 0.0).max(),
    )


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """KL to the reference policy per token [rows, width], in nats, with gradient; 0 outside the mask.

    ``estimator`` is a key of ``common.kl.KL_ESTIMATORS``.
    """
    outside = mask == 0
    return KL_ESTIMATORS[estimator](
        logprobs.masked_fill(outside, 0.0), ref_logprobs.masked_fill(outside, 0.0), torch.exp
    )
