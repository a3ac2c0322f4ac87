"""The other process of the round trip: maps a buffer by its handle and writes to it."""

from __future__ import annotations

import sys

import msgspec
import torch

from common.devices import map_cuda
from common.messages import CudaHandle


def main(handle: str) -> None:
    map_cuda(msgspec.json.decode(handle, type=CudaHandle)).fill_(7)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
