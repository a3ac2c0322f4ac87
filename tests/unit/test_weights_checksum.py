"""The position-weighted checksum against a slow one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.weights.checksum import CHUNK, tensor_checksum


def slow_checksum(tensor: torch.Tensor) -> int:
    kinds: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
    words = np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), kinds[tensor.element_size()])
    total = sum(int(word) * (position + 1) for position, word in enumerate(words.tolist())) & (2**64 - 1)
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_checksum_is_position_weighted(dtype: torch.dtype, size: int) -> None:
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
    assert tensor_checksum(tensor) == slow_checksum(tensor)


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_checksum_at_chunk_boundaries(size: int) -> None:
    tensor = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    words = tensor.numpy().astype(np.int64).view(np.uint64)
    expected = int((words * np.arange(1, size + 1, dtype=np.uint64)).sum(dtype=np.uint64).view(np.int64))
    assert tensor_checksum(tensor) == expected
    first, last = tensor[0].clone(), tensor[-1].clone()
    tensor[0], tensor[-1] = last, first
    assert tensor_checksum(tensor) != expected


def test_checksum_of_nothing_is_zero_and_wraps_elsewhere() -> None:
    assert tensor_checksum(torch.zeros(0)) == 0
    assert tensor_checksum(torch.tensor([2**62, 2**62], dtype=torch.int64)) == (2**62 * 3 + 2**63) % 2**64 - 2**63


def test_checksum_reads_in_logical_order() -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert tensor_checksum(tensor.T) == tensor_checksum(tensor.T.contiguous()) != tensor_checksum(tensor)
