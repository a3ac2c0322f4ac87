"""The checksum of `common.weights.checksum` for a GPU: one kernel over all tensors, at the speed of its memory.

A table on the GPU lists blocks of words with their absolute addresses, so that hundreds of tensors take one launch.
Each program sums one block and adds it atomically to its tensor's sum. The table depends on addresses and sizes alone
and is kept for the next call, since training asks for the same tensors at every step.
"""

# Triton has no stubs and is absent where torch is built for CPUs alone.
# pyright: reportMissingImports=none, reportUntypedFunctionDecorator=none, reportUnknownParameterType=none
# pyright: reportIndexIssue=none
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from common.weights.checksum_torch import DEVICE_CHUNK, WORD, weighted_sum

LANES = 2048  # words that one program loads at once
BLOCK = 16 * LANES  # words of one program: 256 KiB, so 60,000 programs for 15 GB
VECTOR = 16  # bytes of the widest load of one thread
COLUMNS = tl.constexpr(5)  # of the table: address, words, position of the first word, bytes after the last word, tensor


@dataclass(frozen=True)
class BlockTable:
    """Blocks of words to be summed: int64 [blocks, 5] on the device, and the alignment of all their addresses."""

    rows: torch.Tensor
    alignment: int


@triton.jit
def _weighted(pair: tl.tensor, position: tl.tensor) -> tl.tensor:
    # Two words of 4 bytes: low × (2 position + 1) + high × (2 position + 2).
    high = (pair >> 32) & 0xFFFFFFFF
    return ((pair & 0xFFFFFFFF) + high) * (2 * position + 1) + high


@triton.jit
def _sum_blocks(table: tl.tensor, sums: tl.tensor, lanes: tl.constexpr, alignment: tl.constexpr) -> None:
    row = table + tl.program_id(0) * COLUMNS
    # The hint lets a thread load 16 bytes at a time: an address read from memory carries no alignment.
    words = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), alignment)
    count = tl.load(row + 1)
    first = tl.load(row + 2)
    tail = tl.load(row + 3)
    lane = tl.arange(0, lanes)
    position = lane.to(tl.int64) + first
    whole = count // lanes * lanes
    total = tl.zeros([lanes], dtype=tl.int64)
    for start in range(0, whole, lanes):
        total += _weighted(tl.load(words + start + lane), position + start)
    # A mask would narrow the loads, so only the last round has one.
    here = lane < count - whole
    total += _weighted(tl.load(words + whole + lane, mask=here, other=0), position + whole)
    byte = tl.arange(0, 8)
    after = tl.load((words + count).to(tl.pointer_type(tl.uint8)) + byte, mask=byte < tail, other=0)
    partial = tl.sum(after.to(tl.int64) << (byte * 8).to(tl.int64), axis=0)
    value = tl.sum(total, axis=0) + _weighted(partial, first + count)  # pyright: ignore[reportArgumentType]
    tl.atomic_add(sums + tl.load(row + 4), value, sem="relaxed")


@lru_cache(maxsize=8)
def block_table(device: torch.device, spans: tuple[tuple[int, int], ...]) -> BlockTable:
    """The blocks of `spans`, (address, bytes) of each tensor, without those at an address that is no multiple of 8."""
    address, nbytes = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).unbind(1)
    words = nbytes // WORD
    blocks = torch.where(address % WORD == 0, (nbytes + WORD * BLOCK - 1) // (WORD * BLOCK), 0)
    tensor = torch.repeat_interleave(torch.arange(len(spans)), blocks)
    block = torch.arange(tensor.numel()) - (blocks.cumsum(0) - blocks)[tensor]
    first = block * BLOCK
    count = (words[tensor] - first).clamp(max=BLOCK)
    tail = torch.where(block + 1 == blocks[tensor], nbytes[tensor] % WORD, 0)
    rows = torch.stack([address[tensor] + first * WORD, count, first, tail, tensor], dim=1)
    vectors = bool((rows[:, 0] % VECTOR == 0).all())
    table = BlockTable(rows.to(device), VECTOR if vectors else WORD)
    if device.type == "cuda":  # another stream may use it next
        torch.cuda.current_stream(device).synchronize()
    return table


def triton_checksums(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """`tensor_checksums` by one kernel launch; the tensors are contiguous and on one GPU, or on the CPU in Triton's
    interpreter. Tensors at addresses that are no multiple of 8 are summed by torch."""
    device = tensors[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        table = block_table(device, tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors))
        sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        if blocks := table.rows.shape[0]:
            launch = _sum_blocks[(blocks,)]
            launch(table.rows, sums, LANES, table.alignment, num_warps=4, num_stages=1)  # pyright: ignore[reportCallIssue]
        odd = [index for index, tensor in enumerate(tensors) if tensor.data_ptr() % WORD]
        if odd:
            longest = max(tensors[index].nbytes for index in odd) // WORD
            weights = torch.arange(1, 2 * min(DEVICE_CHUNK, max(longest, 1)), 2, dtype=torch.int64, device=device)
            for index in odd:
                sums[index] = weighted_sum(tensors[index], weights)
        return tuple(sums.tolist())
