"""Memory that one process lends to another, and how it is written there."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from common.messages import CudaHandle
from common.run_files import naming
from common.service import ReplicaError

NBYTES = 1 << 20


class Offer(Struct, frozen=True):
    """``value`` is to be written into every byte of the memory: of a GPU by a handle, else of a file known by name."""

    value: int
    cuda: CudaHandle | None = None


class Buffer(Protocol):
    """``NBYTES`` bytes, 0 at first, that one other process is to fill with ``value``."""

    kind: str
    value: int
    handle: CudaHandle | None

    def arrived(self) -> bool: ...


class FileBuffer:
    """A mapped file in /dev/shm, new. Raises OSError, naming it, where it is there already or memory is full."""

    kind = f"{NBYTES >> 20} MiB in /dev/shm, written by the other"

    def __init__(self, path: Path, value: int) -> None:
        self.value = value
        self.handle: CudaHandle | None = None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "r+b") as file:
                file.write(bytes(NBYTES))
                file.flush()
                self.map = mmap.mmap(file.fileno(), NBYTES)
        except OSError as error:
            raise naming(path, error) from error

    def arrived(self) -> bool:
        return self.map[:] == bytes([self.value]) * NBYTES


class GpuBuffer:
    """Memory of one of this process's GPUs. Raises DeviceError where there is none, or it cannot be exported."""

    kind = f"{NBYTES >> 20} MiB of a GPU by CUDA IPC, written by the other"

    def __init__(self, value: int, index: int = 0) -> None:
        import torch

        from common.devices import DeviceError, export_cuda, gpu_uuid

        self.value = value
        try:
            self.name = gpu_uuid(index)
            self.tensor = torch.zeros(NBYTES, dtype=torch.uint8, device=torch.device("cuda", index))
            torch.cuda.synchronize(index)
        except RuntimeError as error:  # out of memory is one
            raise DeviceError(f"cannot take {NBYTES} bytes of GPU {index}: {first_line(error)}") from error
        self.handle: CudaHandle | None = export_cuda(self.tensor)

    def arrived(self) -> bool:
        """Raises DeviceError where the GPU does not answer."""
        import torch

        from common.devices import DeviceError

        try:
            torch.cuda.synchronize(self.tensor.device)
            return bool((self.tensor == self.value).all())
        except RuntimeError as error:
            raise DeviceError(f"cannot read {self.name}: {first_line(error)}") from error


def missing(buffer: Buffer) -> str:
    """What is wrong with a buffer that is said to be filled, or nothing."""
    try:
        return "" if buffer.arrived() else "what it wrote did not arrive"
    except ReplicaError as error:
        return str(error)


def fill(offer: Offer, path: Path | None = None) -> str:
    """Writes the value into every byte of the memory that somebody lends; what was in the way, or nothing."""
    try:
        if offer.cuda is not None:
            import torch

            from common.devices import map_cuda

            mapped = map_cuda(offer.cuda)
            mapped.fill_(offer.value)
            torch.cuda.synchronize(mapped.device)
        elif path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "r+b") as opened, mmap.mmap(opened.fileno(), NBYTES) as memory:
                memory[:] = bytes([offer.value]) * NBYTES
        else:
            return "neither a handle nor a file was given"
    except (OSError, ValueError, RuntimeError, ReplicaError) as error:  # a driver's refusal is a RuntimeError
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
