"""The holder service: allocates GPU buffers by name and exports them, afresh for whoever asks. It computes nothing.

What trainer, critic and engines share is mapped from here, so that each of them may die and map it again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from common.devices import DeviceError, export_cuda, gpu_index
from common.messages import HostBuffer, Hosted, Lease, Manifest, Receipt
from common.service import Assignment, LeaseFailed, Outbox, ReplicaError
from services.holder.buffers import Buffers

log = logging.getLogger("holder")

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch looks for the settings of its allocator."""


def require_exportable(environment: Mapping[str, str]) -> None:
    """Raises ReplicaError where torch would allocate memory that CUDA IPC cannot export."""
    for variable in ALLOCATOR_VARIABLES:
        value = environment.get(variable, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            raise ReplicaError(
                f"{variable} is {value!r}: memory of expandable segments cannot be shared with other processes; start "
                "the holder with expandable_segments:False"
            )


class HolderService:
    """Implements ``common.service.Service``."""

    def __init__(self, assignment: Assignment) -> None:
        require_exportable(os.environ)
        self.buffers = Buffers()

    def ready(self) -> None:
        """There is nothing to load; the first buffer initialises CUDA on its GPU."""

    def state(self) -> int:
        return 0

    def handle(self, lease: Lease, outbox: Outbox) -> Hosted:
        if not isinstance(lease.task, HostBuffer):
            raise LeaseFailed("error", f"holder cannot carry out {type(lease.task).__name__}; it takes HostBuffer")
        return self.host(lease.task)

    def host(self, task: HostBuffer) -> Hosted:
        """Raises LeaseFailed where there is no such GPU, no memory, or a buffer of this name that is another one."""
        try:
            device = torch.device("cuda", gpu_index(task.gpu))
            buffer, created = self.buffers.obtain(task.name, task.nbytes, device)
            if created:
                log.info("%s: %.1f MiB on %s (%s)", task.name, task.nbytes / 2**20, device, task.gpu)
            return Hosted(handle=export_cuda(buffer), created=created)
        except DeviceError as error:
            raise LeaseFailed("error", str(error)) from error

    def apply_weights(self, manifest: Manifest) -> Receipt:
        raise LeaseFailed("error", "the holder hosts weights; it does not apply them")

    def cache_counts(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        """The buffers go with the process: others may still compute on them."""
