"""The holder's part of ``quartet bench weights``: the holder service's own buffers, without a coordinator."""

from __future__ import annotations

import os

import torch
from msgspec import Struct

from common.devices import export_cuda
from common.messages import CudaHandle
from common.weights.reader import used_bytes
from services.holder.buffers import Buffers
from tools.bench.actors import Order, say, serve


class Start(Order, frozen=True):
    """Initialise CUDA on this GPU, as the holder does with its first buffer."""

    gpu: int


class Host(Order, frozen=True):
    name: str
    nbytes: int
    gpu: int


class Used(Struct, frozen=True):
    """Memory of the GPU in use by all processes."""

    nbytes: int
    pid: int


class Export(Struct, frozen=True):
    handle: CudaHandle
    created: bool


buffers = Buffers()


def carry_out(order: Start | Host) -> None:
    device = torch.device("cuda", order.gpu)
    if isinstance(order, Start):
        torch.zeros(1, device=device)
        say(Used(used_bytes(device), os.getpid()))
    else:
        buffer, created = buffers.obtain(order.name, order.nbytes, device)
        say(Export(export_cuda(buffer), created))


if __name__ == "__main__":
    serve(Start | Host, carry_out)
