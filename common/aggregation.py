"""How the losses of tokens become one number (config keys ``ppo.aggregation`` and ``critic.aggregation``).

Every aggregation is linear in the tokens' losses, with weights that depend on the *global* mini-batch alone. So the
aggregated losses of micro-batches, and of ranks, add up to the loss of the whole mini-batch, and so do gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.config import Aggregation


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Sizes of the global mini-batch: over all its micro-batches and ranks."""

    tokens: int
    """Tokens inside the mask."""
    rows: int
    """Rows with at least one token inside the mask; rows whose mask is empty do not count."""
    width: int
    """Positions of a row, padding included."""

    @classmethod
    def of(cls, mask: Tensor) -> Normalizer:
        """Sizes of the batch whose mask [rows, width] this is."""
        inside = mask != 0
        return cls(tokens=int(inside.sum()), rows=int(inside.any(dim=1).sum()), width=mask.shape[1])

    @classmethod
    def total(cls, masks: Iterable[Tensor], width: int) -> Normalizer:
        """Sizes of a mini-batch cut into micro-batches with these masks; ``width`` is the longest possible response."""
        parts = [cls.of(mask) for mask in masks]
        return cls(tokens=sum(part.tokens for part in parts), rows=sum(part.rows for part in parts), width=width)


def aggregate(per_token: Tensor, mask: Tensor, mode: Aggregation, normalizer: Normalizer) -> Tensor:
    """This micro-batch's share of the aggregated loss: a scalar, 0 where nothing is inside the mask.

    Args:
        per_token: [rows, width], float; must be finite inside the mask only.
        mask: [rows, width], nonzero on tokens that count. Rows are whole: a row is never split over micro-batches.
        mode: a key of ``AGGREGATIONS``.
        normalizer: sizes of the global mini-batch.
    """
    inside = mask != 0
    row_weights = AGGREGATIONS[mode](inside.sum(dim=1, keepdim=True).to(per_token.dtype), normalizer)
    return (per_token.masked_fill(~inside, 0.0) * row_weights).sum()


def mean_over_tokens(per_token: Tensor, mask: Tensor, normalizer: Normalizer) -> Tensor:
    """This micro-batch's share of a mean over the global mini-batch's tokens, for metrics: a detached scalar."""
    return aggregate(per_token.detach(), mask, "token-mean", normalizer)


RowWeights = Callable[[Tensor, Normalizer], Tensor]
"""(tokens of each row [rows, 1], sizes) -> weight of each of the row's tokens [rows, 1]."""


def _token_mean(lengths: Tensor, normalizer: Normalizer) -> Tensor:
    return torch.ones_like(lengths) / max(normalizer.tokens, 1)


def _seq_mean_token_sum(lengths: Tensor, normalizer: Normalizer) -> Tensor:
    return torch.ones_like(lengths) / max(normalizer.rows, 1)


def _seq_mean_token_mean(lengths: Tensor, normalizer: Normalizer) -> Tensor:
    return 1.0 / (lengths.clamp(min=1.0) * max(normalizer.rows, 1))


def _seq_mean_token_sum_norm(lengths: Tensor, normalizer: Normalizer) -> Tensor:
    return torch.ones_like(lengths) / (max(normalizer.rows, 1) * max(normalizer.width, 1))


AGGREGATIONS: Final[dict[Aggregation, RowWeights]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
