"""Memory that one process lends to another, and how it is written there."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol

from common.messages import CudaHandle
from common.service import ReplicaError

NBYTES = 1 << 20


class Buffer(Protocol):
    """``NBYTES`` bytes, 0 at first, that one other process is to fill with ``value``."""

    kind: str
    value: int
    path: Path | None

    def handle(self) -> CudaHandle | None: ...

    def arrived(self) -> bool: ...


class FileBuffer:
    """A mapped file in /dev/shm."""

    kind = f"{NBYTES >> 20} MiB in /dev/shm, written by the other"

    def __init__(self, path: Path, value: int) -> None:
        self.path: Path | None = path
        self.value = value
        path.write_bytes(bytes(NBYTES))
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), NBYTES)

    def handle(self) -> CudaHandle | None:
        return None

    def arrived(self) -> bool:
        return self.map[:] == bytes([self.value]) * NBYTES


class GpuBuffer:
    """Memory of this process's first GPU. Raises DeviceError where it cannot be exported."""

    kind = f"{NBYTES >> 20} MiB of a GPU by CUDA IPC, written by the other"

    def __init__(self, value: int) -> None:
        import torch

        self.path: Path | None = None
        self.value = value
        self.tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()

    def handle(self) -> CudaHandle | None:
        from common.devices import export_cuda

        return export_cuda(self.tensor)

    def arrived(self) -> bool:
        import torch

        torch.cuda.synchronize()
        return bool((self.tensor == self.value).all())


def fill(cuda: CudaHandle | None, file: str, value: int) -> str:
    """Writes ``value`` into every byte of the memory that somebody lends; what was in the way, or nothing."""
    try:
        if cuda is None:
            with Path(file).open("r+b") as opened, mmap.mmap(opened.fileno(), NBYTES) as mapped:
                mapped[:] = bytes([value]) * NBYTES
            return ""
        import torch

        from common.devices import map_cuda

        map_cuda(cuda).fill_(value)
        torch.cuda.synchronize()
    except (OSError, ValueError, RuntimeError, ReplicaError) as error:  # a driver's refusal is a RuntimeError
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""
