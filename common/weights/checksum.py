"""Position-weighted checksums of tensors' bytes: the same on every device, cheap enough for every step.

A tensor's checksum is the sum over its 4-byte little-endian words of word × (position + 1), modulo 2^64. The words are
taken as unsigned and half as wide as the sum, so that one change cannot wrap around to nothing: |difference| < 2^32 and
position + 1 < 2^32 multiply to less than 2^64, and to zero only where one of them is zero.

Always found in a tensor below 16 GiB: a changed word, so any flipped bit, and any exchange of two words that differ.
Several independent changes, torn updates, shifted or missing data and other tensors' data: but for about 1 in 2^64.
Not found: changes made to cancel out, another dtype or shape over the same bytes, and zero bytes added at the end
(compare these beside it).
It is no cryptographic hash: it guards against mistakes, not against an adversary.

Addition modulo 2^64 commutes, so blocking, threads and the order of atomic additions cannot change the result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger("weights")

WORD = 8  # bytes taken at once: two words of the sum
LOW = (1 << 32) - 1
# Units of 8 bytes weighted at once. On a CPU, chunk and weights (512 KiB each) fit the cache; GPUs want large launches.
CPU_CHUNK = 1 << 16
DEVICE_CHUNK = 1 << 22


def tensor_checksums(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The checksum of each tensor, as a signed 64-bit integer, in order.

    The tensors are contiguous, of any dtype and shape, and on one device; an empty one sums to 0. A last partial word
    is padded with zero bytes. On a GPU the work is one kernel launch and one copy to the host on the current stream,
    which this waits for; addresses that are no multiple of 8 take a slower way. Raises ValueError naming the index of a
    tensor that is not contiguous or is on another device than the first.
    """
    if not tensors:
        return ()
    device = tensors[0].device
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(
                f"tensor {index} is on {tensor.device}, tensor 0 on {device}: checksum one device at a time"
            )
        if not tensor.is_contiguous():
            shape, stride = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"tensor {index} of shape {shape} and stride {stride} is not contiguous: copy it first")
    kernels = gpu_kernels() if device.type == "cuda" else None
    if kernels is None or not launches(kernels, device):
        return torch_checksums(tensors)
    return kernels.triton_checksums(tensors)


def tensor_checksum(tensor: torch.Tensor) -> int:
    """The checksum of one tensor, which is copied if it is not contiguous; see `tensor_checksums`."""
    return tensor_checksums([tensor.contiguous()])[0]


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


@cache
def gpu_kernels() -> ModuleType | None:
    """`common.weights.checksum_triton`, or None where Triton is not installed."""
    try:
        from common.weights import checksum_triton
    except ImportError:
        return None
    return checksum_triton


@cache
def launches(kernels: ModuleType, device: torch.device) -> bool:
    """Whether the kernel runs here and is right: Triton needs a C compiler and a folder for what it compiles."""
    words = torch.arange(32, dtype=torch.int64, device=device)
    try:
        found = kernels.triton_checksums([words])
    except (RuntimeError, OSError) as error:
        log.warning(
            "Triton does not work here, so checksums of weights take longer (it needs a C compiler, and a writable "
            "TRITON_CACHE_DIR or HOME): %s", str(error).partition("\n")[0],
        )  # fmt: skip
        return False
    if found != torch_checksums([words]):
        log.warning("Triton computes a wrong checksum here, so checksums of weights take longer")
        return False
    return True
