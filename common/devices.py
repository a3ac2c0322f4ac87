"""GPUs by UUID, and GPU memory that crosses processes through CUDA IPC (torch).

Every process numbers the GPUs that it sees in its own way; a UUID means the same one everywhere on the host.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from common.messages import CudaHandle
from common.service import ReplicaError

UUID_PREFIXES = ("GPU-", "MIG-")
"""Of whole GPUs and of their MIG instances."""


class DeviceError(ReplicaError):
    """A GPU is not there, or memory on it cannot be exported or mapped; the message names the GPU."""


def gpu_uuid(index: int) -> str:
    """The UUID of this process's GPU ``index``, as ``GPU-xxxxxxxx-…`` or ``MIG-…``. Raises DeviceError without one."""
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise DeviceError(f"there is no GPU {index}: this process sees {count} ({_visible()})")
    return full_uuid(str(torch.cuda.get_device_properties(index).uuid))


def full_uuid(uuid: str) -> str:
    """A UUID with its prefix; torch leaves that of whole GPUs out."""
    return uuid if uuid.startswith(UUID_PREFIXES) else UUID_PREFIXES[0] + uuid


def gpu_index(uuid: str) -> int:
    """This process's number of a GPU. Raises DeviceError where it does not see that one."""
    found = [gpu_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid not in found:
        raise DeviceError(f"GPU {uuid!r} is not among those that this process sees: {found or 'none'} ({_visible()})")
    return found.index(uuid)


def _visible() -> str:
    return f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody uses now, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def export_cuda(tensor: torch.Tensor) -> CudaHandle:
    """A handle of the memory of a tensor, for one consumer; export again for the next one.

    The tensor must be a contiguous uint8 tensor over its whole storage, which this process has allocated itself, and
    must live as long as anybody maps it. Raises DeviceError.
    """
    if tensor.device.type != "cuda":
        raise DeviceError(f"only memory on a GPU can be exported as a CUDA handle, this tensor is on {tensor.device}")
    storage: Any = tensor.untyped_storage()
    try:
        # torch.multiprocessing.reductions.reduce_tensor names the eight values; all are plain.
        device, handle, nbytes, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise DeviceError(f"cannot export {tensor.nbytes} bytes of {tensor.device} by CUDA IPC: {first}") from error
    return CudaHandle(
        gpu=gpu_uuid(int(device)), handle=bytes(handle), nbytes=int(nbytes), offset=int(offset),
        counter=bytes(counter), counter_offset=int(counter_offset), event=bytes(event), event_sync=bool(event_sync),
    )  # fmt: skip


def map_cuda(handle: CudaHandle) -> torch.Tensor:
    """The memory of a handle as a uint8 tensor [nbytes] on the GPU that it lies on, by this process's number of it.

    A handle serves one mapping; the process that exported it cannot map it. Raises DeviceError.
    """
    if wrong := handle.wrong_length():
        raise DeviceError(f"memory of GPU {handle.gpu!r} came with {wrong}")
    index = gpu_index(handle.gpu)
    torch.cuda.init()
    storages: Any = torch.UntypedStorage
    try:
        storage = storages._new_shared_cuda(
            index, handle.handle, handle.nbytes, handle.offset, handle.counter, handle.counter_offset, handle.event,
            handle.event_sync,
        )  # fmt: skip
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise DeviceError(
            f"cannot map {handle.nbytes} bytes of GPU {handle.gpu}, has their holder died? {first}"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
