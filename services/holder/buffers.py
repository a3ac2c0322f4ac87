"""Named blocks of memory, each allocated once and kept for the life of the process (torch)."""

from __future__ import annotations

import os

import torch

from common.devices import free_bytes
from common.service import LeaseFailed
from common.weights.header import IDENTITY_BYTES


class Buffers:
    """Never frees one: whoever has mapped it computes on it."""

    def __init__(self) -> None:
        self._by_name: dict[str, torch.Tensor] = {}

    def obtain(self, name: str, nbytes: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        """The buffer, uint8 [nbytes], and whether it is new. Its first bytes are then a random identity.

        Raises LeaseFailed where the name has another size or device, and where memory is short.
        """
        found = self._by_name.get(name)
        if found is None:
            self._by_name[name] = buffer = _allocate(name, nbytes, device)
            return buffer, True
        if (found.numel(), found.device) != (nbytes, device):
            raise LeaseFailed(
                "error",
                f"weight set {name!r} has {found.numel()} bytes on {found.device} here, but {nbytes} bytes on {device} "
                "are asked for: another model or device; start the run again",
            )
        return found, False


def _allocate(name: str, nbytes: int, device: torch.device) -> torch.Tensor:
    if nbytes < IDENTITY_BYTES:
        raise LeaseFailed(
            "error", f"weight set {name!r}: {nbytes} bytes are too few, expected {IDENTITY_BYTES} or more"
        )
    try:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (MemoryError, RuntimeError) as error:  # torch.cuda.OutOfMemoryError is a RuntimeError
        cause = str(error).partition("\n")[0]
        raise LeaseFailed(
            "error",
            f"weight set {name!r}: cannot allocate {nbytes} bytes on {device}, where {free_bytes(device)} bytes are "
            f"free ({cause}): a smaller model, or a GPU that nobody else uses",
        ) from error
    buffer[:IDENTITY_BYTES].copy_(torch.frombuffer(bytearray(os.urandom(IDENTITY_BYTES)), dtype=torch.uint8))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # another process reads it as soon as it has the handle
    return buffer
