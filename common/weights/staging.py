"""Copies out of another GPU's memory, through a buffer of this one's.

A copy between GPUs is carried out by the one that it comes from, and that one may not write everywhere: the pool from
which vLLM's sleep takes memory lets in its own GPU alone ("invalid argument"). A plain buffer is open to both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from common.messages import TensorEntry
from common.weights.memory import WeightMemory


@dataclass(frozen=True)
class Piece:
    """A tensor, or a part of one, as uint8 [n], and the byte of the set's memory where its value begins."""

    target: torch.Tensor
    start: int


def pieces(pairs: Sequence[tuple[TensorEntry, torch.Tensor]], limit: int) -> Iterator[list[Piece]]:
    """Tensors in their order, in runs of at most ``limit`` bytes together; what does not fit goes into the next run.

    Tensors must be contiguous. Yields nothing empty.
    """
    run: list[Piece] = []
    room = limit
    for entry, tensor in pairs:
        target = tensor.data.view(-1).view(torch.uint8)
        done = 0
        while done < target.numel():
            length = min(target.numel() - done, room)
            run.append(Piece(target[done : done + length], entry.offset + done))
            done, room = done + length, room - length
            if room == 0:
                yield run
                run, room = [], limit
    if run:
        yield run


def copy_staged(run: Sequence[Piece], memory: WeightMemory, staging: torch.Tensor) -> int:
    """Fills the pieces from the set's memory; ``staging`` is uint8, on their device, and as long as they are together.

    Returns the bytes copied. On a GPU it returns before they are: synchronize.
    """
    filled = 0
    for piece in run:
        length = piece.target.numel()
        part = staging[filled : filled + length]
        part.copy_(memory.buffer[piece.start : piece.start + length])
        piece.target.copy_(part)
        filled += length
    return filled
