"""Copies of tensors in memory of this process, made while the service waits: of a GPU's, into pinned memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

log = logging.getLogger("checkpoints")

_ALIGNMENT = 64


class Staging:
    """Memory for one copy of a state. On a GPU's host it is pinned, and kept for the next copy."""

    def __init__(self) -> None:
        self._pinned: torch.Tensor | None = None

    def prepare(self, nbytes: int, device: torch.device) -> None:
        """Takes pinned memory for a state of so many bytes on a GPU; that takes seconds, so before the first copy."""
        room = nbytes + nbytes // 64 + 2**20  # for alignment and small tensors
        if self._pinned is None or self._pinned.numel() < nbytes:
            with torch.cuda.device(device):  # a new thread's is the first one, where nothing of this is
                self._release()
                self._pinned = _pinned_bytes(room)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy of each that nothing else writes, on the CPU; returns when all are complete.

        Valid until the next copy. A DTensor's copy is a DTensor of the same placement.
        """
        on_gpu = {key: tensor for key, tensor in tensors.items() if tensor.is_cuda and type(tensor) is not _DTENSOR}
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items() if key not in on_gpu}
        if on_gpu:
            copies |= self._copy_from_gpu(on_gpu)
        return {key: copies[key] for key in tensors}

    def _copy_from_gpu(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for key, tensor in tensors.items():
            places[key] = (end, end + tensor.nbytes)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.prepare(end, next(iter(tensors.values())).device)
        assert self._pinned is not None
        copies: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            start, stop = places[key]
            copies[key] = self._pinned[start:stop].view(tensor.dtype).view(tensor.shape)
            copies[key].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            torch.cuda.synchronize(device)
        return copies

    def _release(self) -> None:
        if self._pinned is not None:
            _runtime().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None


def _pinned_bytes(nbytes: int) -> torch.Tensor:
    """torch's own pinned memory comes in powers of two; a state may be most of the host's memory."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    answer = _runtime().cudaHostRegister(memory.data_ptr(), nbytes, 0)
    if int(answer) != 0:
        log.warning("%.1f GiB cannot be pinned (CUDA error %d): staging is slower", nbytes / 2**30, int(answer))
    return memory


def _runtime() -> Any:
    return torch.cuda.cudart()


def _dtensor() -> type | None:
    if not torch.distributed.is_available():
        return None
    from torch.distributed.tensor import DTensor

    return DTensor


_DTENSOR = _dtensor()
