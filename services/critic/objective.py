"""The critic's objective: a clipped squared error (PPO2's value clipping). Pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.aggregation import Normalizer, aggregate, mean_over_tokens
from common.config import Aggregation


@dataclass(frozen=True, slots=True, eq=False)
class ValueLoss:
    """A micro-batch's share of the mini-batch's loss and metrics: scalars that add up over micro-batches and ranks."""

    loss: Tensor
    """Has the graph; the rest is detached."""
    clip_fraction: Tensor
    """Share of tokens whose clipped error is the larger one."""
    squared_error: Tensor
    """Mean over tokens of the unclipped squared error."""


def value_loss(
    value_preds: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    aggregation: Aggregation,
    normalizer: Normalizer,
) -> ValueLoss:
    """Half the aggregated maximum of the plain squared error and that of the prediction clipped around the old value.

    Args:
        value_preds: [rows, width], float, with gradient.
        old_values: [rows, width], values when the samples were evaluated.
        returns: [rows, width], what to predict.
        mask: [rows, width], nonzero on tokens that count.
        clip_range: a prediction further than this from its old value is clipped to it; 0 switches clipping off.
        aggregation: how tokens' losses become one number.
        normalizer: sizes of the global mini-batch.
    """
    outside = mask == 0
    preds, old, targets = (x.masked_fill(outside, 0.0) for x in (value_preds, old_values, returns))
    plain = (preds - targets).square()
    # Clamping the prediction itself, not its difference, leaves one inside the range exactly as it is.
    clipped = (preds.clamp(old - clip_range, old + clip_range) - targets).square() if clip_range > 0 else plain
    return ValueLoss(
        loss=0.5 * aggregate(torch.maximum(plain, clipped), mask, aggregation, normalizer),
        clip_fraction=mean_over_tokens((clipped > plain).to(plain.dtype), mask, normalizer),
        squared_error=mean_over_tokens(plain, mask, normalizer),
    )
