"""`tensor_checksums` by torch operations alone, on any device; see `common.weights.checksum` for what it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

WORD = 8  # bytes taken at once: two words of the sum
LOW = (1 << 32) - 1
# Units of 8 bytes weighted at once. On a CPU, chunk and weights (512 KiB each) fit the cache; GPUs want large launches.
CPU_CHUNK = 1 << 16
DEVICE_CHUNK = 1 << 22


def torch_checksums(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """`tensor_checksums` by torch operations alone, on any device; the tensors are contiguous and on one device."""
    if not tensors:
        return ()
    longest = max(-(-tensor.nbytes // WORD) for tensor in tensors)
    device = tensors[0].device
    chunk = min(CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK, max(longest, 1))
    weights = torch.arange(1, 2 * chunk, 2, dtype=torch.int64, device=device)
    return tuple(torch.stack([weighted_sum(tensor, weights) for tensor in tensors]).tolist())


def weighted_sum(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Checksum of one contiguous tensor as an int64 scalar on its device.

    `weights` is the int64 vector 1, 3, 5, … on that device; its length is the number of word pairs taken at once.
    """
    data = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    aligned = data.data_ptr() % WORD == 0 and data.storage_offset() % WORD == 0
    whole = data.numel() // WORD
    for start in range(0, whole, weights.numel()):
        part = data[start * WORD : min(start + weights.numel(), whole) * WORD]
        # Torch views bytes as int64 only at multiples of 8; a clone starts at one.
        words = (part if aligned else part.clone()).view(torch.int64)
        total += _sum_pairs(words, weights, start)
    tail = data[whole * WORD :].to(torch.int64)
    if tail.numel():
        shifts = torch.arange(0, 8 * tail.numel(), 8, dtype=torch.int64, device=data.device)
        total += _sum_pairs((tail << shifts).sum(0, keepdim=True), weights, whole)
    return total


def _sum_pairs(pairs: torch.Tensor, weights: torch.Tensor, first: int) -> torch.Tensor | int:
    # low × (2 position + 1) + high × (2 position + 2)
    odd = weights[: pairs.numel()]
    if pairs.device.type == "cpu":
        return _sum_pairs_on_cpu(pairs.numpy().view(np.uint64), odd.numpy().view(np.uint64), first)
    high = (pairs >> 32) & LOW
    both = (pairs & LOW) + high
    return (both * odd).sum() + 2 * first * both.sum() + high.sum()


def _sum_pairs_on_cpu(pairs: npt.NDArray[np.uint64], odd: npt.NDArray[np.uint64], first: int) -> int:
    # As pair = low + 2^32 high, the sum over low + high is that over pair minus 2^32 − 1 times that over high: one
    # temporary, and numpy shifts and multiplies 64-bit integers several times faster than torch.
    high = pairs >> np.uint64(32)
    highs = int(high.sum())
    weighted = int(np.dot(pairs, odd)) + 2 * first * int(pairs.sum())
    weighted -= LOW * (int(np.dot(high, odd)) + 2 * first * highs)
    return (weighted + highs + (1 << 63)) % (1 << 64) - (1 << 63)
