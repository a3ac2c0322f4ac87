"""Copies through a buffer: every byte arrives, in runs of the buffer's size, and nothing beside the tensors changes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages import TensorEntry
from common.weights.header import HEADER_BYTES
from common.weights.memory import WeightMemory
from common.weights.staging import copy_staged, pieces

SHAPES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9)), min_size=1, max_size=6)


def test_every_byte_arrives_in_runs_of_the_size_of_the_buffer() -> None:
    @given(SHAPES, st.integers(1, 130), st.integers(0, 3))
    def checked(shapes: list[tuple[int, int]], limit: int, gap: int) -> None:
        entries: list[TensorEntry] = []
        end = HEADER_BYTES
        for index, shape in enumerate(shapes):
            entries.append(TensorEntry(name=f"t{index}", dtype="bfloat16", shape=shape, offset=end))
            end += 2 * shape[0] * shape[1] + 2 * gap
        memory = WeightMemory(torch.randint(0, 255, (end,), dtype=torch.uint8), "", "")
        fused = torch.full((sum(rows for rows, _ in shapes) + 1, 9), -1, dtype=torch.bfloat16)
        tensors = [torch.full(shape, -1, dtype=torch.bfloat16) for shape in shapes]
        staging = torch.empty(limit, dtype=torch.uint8)
        sizes = [copy_staged(run, memory, staging) for run in pieces(list(zip(entries, tensors, strict=True)), limit)]
        assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)
        assert all(size == limit for size in sizes[:-1])
        assert 0 < sizes[-1] <= limit
        for entry, tensor in zip(entries, tensors, strict=True):
            found, expected = tensor.view(torch.uint8), memory.view(entry).view(torch.uint8)
            assert torch.equal(found, expected), entry.name
        rows = [(entry, fused[index : index + 1].view(-1)[: entry.shape[1]]) for index, entry in enumerate(entries)]
        for run in pieces(rows, limit):
            copy_staged(run, memory, staging)
        assert torch.all(fused[-1] == -1), "a row that is not in the set was written"

    checked()
