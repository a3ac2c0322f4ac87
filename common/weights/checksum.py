"""Position-weighted checksum of a tensor's bytes, the same on every device."""

from __future__ import annotations

import torch

CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Sum over all words of word × (position + 1), modulo 2^64, as a signed integer.

    Unlike a plain sum it changes when two words are exchanged. Words are as wide as the dtype; contiguous tensors only.
    """
    words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()]).flatten()
    weights = torch.arange(1, min(CHUNK, max(words.numel(), 1)) + 1, dtype=torch.int64, device=words.device)
    total = 0
    for index, chunk in enumerate(words.split(CHUNK)):
        weighted = chunk.to(torch.int64) * weights[: chunk.numel()]
        total += int(weighted.sum()) + index * CHUNK * int(chunk.to(torch.int64).sum())
    wrapped = total & 0xFFFFFFFFFFFFFFFF
    return wrapped - (1 << 64) if wrapped >= 1 << 63 else wrapped
