"""The position-weighted checksum against plain Python, by torch operations and in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.weights.checksum import gpu_kernels, tensor_checksums
from common.weights.checksum_torch import CPU_CHUNK, torch_checksums, weighted_sum

MODULUS = 1 << 64
WORDS = st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 2**31]), min_size=2, max_size=40)


def signed(value: int) -> int:
    return (value + MODULUS // 2) % MODULUS - MODULUS // 2


def reference(data: bytes, first: int = 0) -> int:
    """The checksum of `data` as if `first` words of zero stood before it."""
    words = [int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4)]
    return signed(sum(word * (first + position + 1) for position, word in enumerate(words)))


def of_bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def of_words(words: list[int]) -> torch.Tensor:
    return of_bytes(b"".join(word.to_bytes(4, "little") for word in words))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def checksum(tensor: torch.Tensor) -> int:
    return tensor_checksums([tensor])[0]


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_checksums_are_those_of_the_reference(datas: list[bytes]) -> None:
    assert tensor_checksums([of_bytes(data) for data in datas]) == tuple(reference(data) for data in datas)


@given(st.binary(max_size=25).map(lambda data: data * 8), st.binary(max_size=50))
def test_checksum_of_a_concatenation(head: bytes, tail: bytes) -> None:
    parts = checksum(of_bytes(head)) + reference(tail, first=len(head) // 4)
    assert checksum(of_bytes(head + tail)) == signed(parts)


@given(WORDS, st.data())
def test_exchanged_words_change_the_checksum(words: list[int], data: st.DataObject) -> None:
    i, j = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    assert (checksum(of_words(words)) == checksum(of_words(swapped))) == (words == swapped)


@given(WORDS, st.data())
def test_a_flipped_bit_changes_the_checksum(words: list[int], data: st.DataObject) -> None:
    position, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 31))
    flipped = list(words)
    flipped[position] ^= 1 << bit
    assert checksum(of_words(words)) != checksum(of_words(flipped))


def test_exchanged_tensors_change_the_checksums() -> None:
    first, second = torch.zeros(3, 5), torch.ones(3, 5)
    assert tensor_checksums([first, second]) == tensor_checksums([second, first])[::-1]
    assert len(set(tensor_checksums([first, second]))) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (1000,)])
def test_checksum_of_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert tensor_checksums([tensor]) == (reference(raw(tensor)),)
    assert checksum(tensor) == reference(raw(tensor))


@pytest.mark.parametrize("size", range(18))
def test_checksum_of_odd_lengths(size: int) -> None:
    assert tensor_checksums([random_bytes(size)]) == (reference(raw(random_bytes(size))),)


@pytest.mark.parametrize("size", [8 * CPU_CHUNK - 1, 8 * CPU_CHUNK, 8 * CPU_CHUNK + 1, 16 * CPU_CHUNK + 11])
def test_checksum_at_chunk_boundaries(size: int) -> None:
    assert tensor_checksums([random_bytes(size)]) == (reference(raw(random_bytes(size))),)


@given(st.integers(1, 50), st.integers(0, 300))
def test_checksum_does_not_depend_on_blocking(chunk: int, size: int) -> None:
    data = random_bytes(size)
    assert int(weighted_sum(data, torch.arange(1, 2 * chunk, 2))) == reference(raw(data))


@pytest.mark.parametrize("offset", range(1, 9))
def test_checksum_at_unaligned_addresses(offset: int) -> None:
    data = random_bytes(8 * CPU_CHUNK + 100)
    assert torch_checksums([data[offset:]]) == (reference(raw(data)[offset:]),)
    foreign = torch.frombuffer(bytearray(raw(data)), dtype=torch.uint8, offset=offset)
    assert torch_checksums([foreign]) == (reference(raw(data)[offset:]),)
    halves = data.view(torch.bfloat16)[offset:]
    assert torch_checksums([halves]) == (reference(raw(data)[2 * offset :]),)


def test_checksum_of_nothing_is_zero_and_wraps_elsewhere() -> None:
    assert tensor_checksums([]) == ()
    assert tensor_checksums([torch.zeros(0), torch.ones(0, 3).bool()]) == (0, 0)
    wrapping = torch.full([2**17], -1, dtype=torch.int64)
    assert checksum(wrapping) == signed((2**32 - 1) * (2**18 * (2**18 + 1) // 2))


def test_what_cannot_be_read_is_named_by_index() -> None:
    good = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"tensor 2 of shape \(6, 4\).*not contiguous"):
        tensor_checksums([good, good, good.T])
    with pytest.raises(ValueError, match="tensor 1 is on meta, tensor 0 on cpu"):
        tensor_checksums([good, torch.zeros(4, device="meta")])


def test_parameters_are_read_as_they_are() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)))
    assert tensor_checksums([parameter]) == (reference(raw(parameter.detach())),)


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "common.weights.checksum_triton", raising=False)
    gpu_kernels.cache_clear()
    try:
        assert gpu_kernels() is None
    finally:
        gpu_kernels.cache_clear()


# The interpreter is chosen by an environment variable that Triton reads when it is imported.
INTERPRETED = """
import json
import torch
from common.weights.checksum_torch import torch_checksums
from common.weights.checksum_triton import BLOCK, LANES, block_table, triton_checksums

data = torch.randint(0, 256, (24 * BLOCK,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
sizes = [*range(18), *(8 * words + extra for words in (LANES, BLOCK, 2 * BLOCK) for extra in (-8, -1, 0, 5, 8))]
groups = {
    "vectors": [data[16 : 16 + size] for size in sizes],
    "words": [data[8 : 8 + size] for size in sizes],
    "unaligned": [data[offset : offset + size] for offset in (2, 7, 8, 12, 16) for size in (0, 3, 8, 1001)],
    "bfloat16": [torch.randn(7, 301).bfloat16(), torch.zeros(0), torch.tensor(3.5), torch.ones(9).bool()],
}
report = {}
for name, tensors in groups.items():
    first, expected = triton_checksums(tensors), torch_checksums(tensors)
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[:1] += 1
    again, changed = triton_checksums(tensors), torch_checksums(tensors)
    spans = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    alignment = block_table(torch.device("cpu"), spans).alignment
    report[name] = {"kernel": [first, again], "torch": [expected, changed], "alignment": alignment}
report["misses"] = block_table.cache_info().misses
print(json.dumps(report))
"""


def test_the_kernel_agrees_with_torch_and_keeps_its_table() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("misses") == len(report) == 4
    for name, group in report.items():
        assert group["kernel"] == group["torch"], name
        assert group["torch"][0] != group["torch"][1], name
    assert (report["vectors"]["alignment"], report["words"]["alignment"]) == (16, 8)
