"""Samples from the token cache as padded tensors, and a model's outputs at the positions that predict the response.

Prompts are padded on the left and responses on the right, so that every response starts at the same column:

    [ . . p p p | r r r e . ]      the logits at columns [P-1, P+T-1) predict the response
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from common.messages import SlotRef
from common.token_cache import TokenCache


@dataclass(frozen=True)
class Batch:
    """B samples, prompts padded to P and responses to T tokens."""

    refs: Sequence[SlotRef]
    input_ids: torch.Tensor
    """[B, P + T] int64."""
    attention_mask: torch.Tensor
    """[B, P + T] int64, 1 on prompt and response tokens."""
    position_ids: torch.Tensor
    """[B, P + T] int64, counted from each prompt's first token."""
    response_ids: torch.Tensor
    """[B, T] int64."""
    response_mask: torch.Tensor
    """[B, T] float32, 1 on the tokens that the policy sampled (tool output is 0)."""
    lengths: torch.Tensor
    """[B] int64, response tokens."""

    @property
    def width(self) -> int:
        return self.response_ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens that a forward pass computes on, padding not counted."""
        return int(self.attention_mask.sum())


def read_batch(cache: TokenCache, refs: Sequence[SlotRef], pad_id: int, device: torch.device) -> Batch:
    """Reads whole samples; ``refs`` in sample order, so that a batch is the same whatever order they ended in."""
    prompts = [cache.prompt_ids(ref) for ref in refs]
    lengths = [cache.scalars(ref).response_length for ref in refs]
    before, after = max(map(len, prompts)), max(lengths)
    ids = np.full((len(refs), before + after), pad_id, dtype=np.int64)
    attention = np.zeros_like(ids)
    mask = np.zeros((len(refs), after), dtype=np.float32)
    for row, (ref, prompt, length) in enumerate(zip(refs, prompts, lengths, strict=True)):
        ids[row, before - len(prompt) : before] = prompt
        ids[row, before : before + length] = cache.response("response_ids", ref)
        attention[row, before - len(prompt) : before + length] = 1
        mask[row, :length] = cache.response("response_mask", ref)
    positions = (attention.cumsum(1) - 1).clip(0)
    input_ids, attention_mask, position_ids, response_mask, response_lengths = (
        torch.from_numpy(array).to(device)
        for array in (ids, attention, positions, mask, np.array(lengths, dtype=np.int64))
    )
    return Batch(
        refs, input_ids, attention_mask, position_ids, input_ids[:, before:], response_mask, response_lengths
    )  # fmt: skip


def read_columns(cache: TokenCache, name: str, batch: Batch) -> torch.Tensor:
    """A per-token column of the batch's samples, [B, T] float32, 0 on padding."""
    rows = cache.rows(name, batch.refs, batch.width).astype(np.float32)
    inside = np.arange(batch.width) < batch.lengths.cpu().numpy()[:, None]
    return torch.from_numpy(np.where(inside, rows, np.float32(0.0))).to(batch.input_ids.device)


def write_columns(cache: TokenCache, name: str, batch: Batch, values: torch.Tensor) -> None:
    """Writes [B, T] into a per-token column, each row as far as its response goes."""
    host = values.detach().float().cpu().numpy()
    for row, (ref, length) in enumerate(zip(batch.refs, batch.lengths.tolist(), strict=True)):
        cache.column(name, ref)[:length] = host[row, :length]


def response_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Logits that predict the response tokens, [B, T, V] in the model's dtype."""
    output: Any = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids,
        use_cache=False, logits_to_keep=batch.width + 1,
    )  # fmt: skip
    return output.logits[:, :-1]


def response_states(backbone: nn.Module, batch: Batch) -> torch.Tensor:
    """Hidden states before each response token and after the last column, [B, T + 1, H]."""
    output: Any = backbone(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids, use_cache=False
    )
    return output.last_hidden_state[:, -(batch.width + 1) :]
