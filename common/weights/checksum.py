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

import torch

from common.weights.checksum_torch import torch_checksums

log = logging.getLogger("weights")


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
