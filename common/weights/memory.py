"""The memory of a weight set: a file in /dev/shm on CPU, a buffer of the holder on a GPU. Tensors are views of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from common.devices import map_cuda
from common.messages import CudaHandle, Manifest, TensorEntry
from common.weights.header import HEADER_BYTES, IDENTITY_BYTES, WeightsError
from common.weights.layout import dtype_from_name, entry_bytes


class WeightMemory:
    """One block of bytes and what names it: random bytes in it on a GPU, on CPU the file's inode."""

    def __init__(self, buffer: torch.Tensor, identity: str, gpu: str) -> None:
        self.buffer = buffer
        """uint8 [nbytes]."""
        self.identity = identity
        self.gpu = gpu
        """UUID of the GPU; empty on CPU."""

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor of an entry, as a view. Raises WeightsError where it does not fit the memory."""
        return self.span(entry.offset, entry.dtype, entry.shape, entry.name)

    def span(self, offset: int, dtype: str, shape: tuple[int, ...], name: str) -> torch.Tensor:
        """Any run of bytes as a tensor: for an engine, several entries that lie one after the other."""
        nbytes = entry_bytes(TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset))
        end = offset + nbytes
        if offset < HEADER_BYTES or end > self.buffer.numel() or offset % dtype_from_name(dtype).itemsize:
            raise WeightsError(
                f"tensor {name!r} lies at bytes {offset} to {end}, but its weight set has {self.buffer.numel()} bytes, "
                f"the first {HEADER_BYTES} of which are its header"
            )
        return self.buffer[offset:end].view(dtype_from_name(dtype)).view(shape)

    def offset(self, tensor: torch.Tensor) -> int:
        """Where a tensor lies in this memory; -1 where it lies elsewhere."""
        start = tensor.data_ptr() - self.buffer.data_ptr()
        inside = tensor.device == self.device and start >= 0 and start + tensor.nbytes <= self.buffer.numel()
        return start if inside else -1


def create_file(path: Path, nbytes: int) -> WeightMemory:
    """Takes the memory now, so that a full /dev/shm is an error here and not a SIGBUS in mid-update.

    Always a new file: truncating one that a consumer still maps would kill the consumer.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink()
        raise WeightsError(
            f"{path}: no room for {nbytes / 2**20:.0f} MiB of weights ({error.strerror}): "
            "enlarge /dev/shm (docker: shm_size) or stop what fills it"
        ) from error
    finally:
        os.close(descriptor)
    return map_file(path, nbytes)


def open_file(path: Path, nbytes: int) -> tuple[WeightMemory, bool]:
    """The file that an earlier writer of this set left, so that engines keep their mapping; else a new one, and True.

    Raises WeightsError for a file of another size.
    """
    try:
        left = path.stat().st_size
    except FileNotFoundError:
        left = 0
    # A writer that died before its file had any memory has shown it to nobody.
    return (map_file(path, nbytes), False) if left else (create_file(path, nbytes), True)


def map_file(path: Path, nbytes: int) -> WeightMemory:
    """Maps the file of a set on CPU. Raises WeightsError for one of another size."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: there is no such weight set: has its writer started?") from error
    if found.st_size != nbytes:
        raise WeightsError(f"{path}: {found.st_size} bytes, expected {nbytes}: truncated, or another model's weights?")
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=nbytes)
    buffer = torch.tensor([], dtype=torch.uint8).set_(storage)
    return WeightMemory(buffer, f"inode-{found.st_ino}", "")


def map_buffer(handle: CudaHandle, nbytes: int) -> WeightMemory:
    """Maps a buffer of the holder, through CUDA IPC, on whichever GPU of this host it lies."""
    buffer = map_cuda(handle)
    if buffer.numel() < nbytes:
        raise WeightsError(
            f"the holder's buffer has {buffer.numel()} bytes, expected {nbytes}: another model's weights?"
        )
    identity = bytes(buffer[:IDENTITY_BYTES].tolist()).hex()
    return WeightMemory(buffer[:nbytes], identity, handle.gpu)


def map_set(manifest: Manifest, handle: CudaHandle | None) -> WeightMemory:
    """The memory of a committed set, for a consumer. Raises WeightsError where it is not what the manifest names."""
    if manifest.gpu:
        if handle is None:
            raise WeightsError(f"{manifest.name} lies on GPU {manifest.gpu}, but no handle came with it")
        memory = map_buffer(handle, manifest.nbytes)
    else:
        memory = map_file(Path(manifest.path), manifest.nbytes)
    if memory.identity != manifest.identity:
        raise WeightsError(f"{manifest.name}: mapped memory {memory.identity}, expected {manifest.identity}")
    return memory
