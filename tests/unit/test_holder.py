"""The holder's buffers and refusals, as far as a CPU goes; exporting and mapping needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from common.devices import DeviceError, export_cuda, free_bytes, full_uuid, gpu_index, gpu_uuid
from common.service import LeaseFailed, ReplicaError
from common.weights.header import IDENTITY_BYTES
from services.holder.buffers import Buffers
from services.holder.service import require_exportable

CPU = torch.device("cpu")


def identity(buffer: torch.Tensor) -> bytes:
    return bytes(buffer[:IDENTITY_BYTES].tolist())


def test_a_buffer_is_allocated_once_and_named_by_its_first_bytes() -> None:
    buffers = Buffers()
    first, created = buffers.obtain("policy", 4096, CPU)
    assert (created, first.dtype, first.shape) == (True, torch.uint8, (4096,))
    name = identity(first)
    first[IDENTITY_BYTES:] = 7
    again, created = buffers.obtain("policy", 4096, CPU)
    assert (created, again.data_ptr(), identity(again)) == (False, first.data_ptr(), name)
    assert int(again[-1]) == 7
    other, created = buffers.obtain("critic", 4096, CPU)
    assert created
    assert other.data_ptr() != first.data_ptr()
    assert len({name, identity(other), bytes(IDENTITY_BYTES)}) == 3


@pytest.mark.parametrize(("nbytes", "device"), [(8192, CPU), (4096, torch.device("meta"))])
def test_another_size_or_device_under_the_same_name_is_refused(nbytes: int, device: torch.device) -> None:
    buffers = Buffers()
    buffers.obtain("policy", 4096, CPU)
    with pytest.raises(LeaseFailed) as caught:
        buffers.obtain("policy", nbytes, device)
    assert "'policy' has 4096 bytes on cpu here" in str(caught.value)
    assert f"{nbytes} bytes on {device} are asked for" in str(caught.value)
    assert buffers.obtain("policy", 4096, CPU)[1] is False


def test_memory_that_is_not_there_is_told_in_bytes_and_can_be_asked_for_again() -> None:
    buffers = Buffers()
    with pytest.raises(LeaseFailed, match=rf"cannot allocate {2**60} bytes on cpu, where \d+ bytes are free"):
        buffers.obtain("policy", 2**60, CPU)
    assert buffers.obtain("policy", 4096, CPU)[1]


def test_a_buffer_holds_at_least_its_identity() -> None:
    with pytest.raises(LeaseFailed, match=f"15 bytes are too few, expected {IDENTITY_BYTES} or more"):
        Buffers().obtain("policy", IDENTITY_BYTES - 1, CPU)


def test_free_memory_of_this_machine() -> None:
    assert 2**20 < free_bytes(CPU) < 2**50


def test_a_gpu_that_is_not_there_is_named_with_what_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(DeviceError, match=r"GPU 'GPU-none' is not among .*CUDA_VISIBLE_DEVICES is 5"):
        gpu_index("GPU-none")
    with pytest.raises(DeviceError, match=r"there is no GPU 99: this process sees \d+"):
        gpu_uuid(99)


@pytest.mark.parametrize(("found", "full"), [("1f-2a", "GPU-1f-2a"), ("GPU-1f-2a", "GPU-1f-2a"), ("MIG-3b", "MIG-3b")])
def test_a_uuid_is_given_its_prefix_once(found: str, full: str) -> None:
    assert full_uuid(found) == full


def test_memory_on_the_cpu_has_no_cuda_handle() -> None:
    with pytest.raises(DeviceError, match="this tensor is on cpu"):
        export_cuda(torch.empty(16, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
    ],
)
def test_memory_that_could_not_be_exported_is_refused(environment: dict[str, str], refused: bool) -> None:
    if not refused:
        require_exportable(environment)
        return
    with pytest.raises(ReplicaError, match=f"{next(iter(environment))} is .*expandable_segments:False"):
        require_exportable(environment)


PROGRAM = """
import sys
import services.holder.__main__ as entry
import common.service_main, common.replica
assert "torch" not in sys.modules, "torch before the config"
"""


def test_torch_comes_after_the_config() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
