"""The other process of the round trip: maps a buffer by its handle and writes to it."""

from __future__ import annotations

import sys

import msgspec

from common.messages import CudaHandle
from tools.doctor.memory import fill


def main(handle: str, value: str) -> str:
    """What was in the way, or nothing."""
    return fill(msgspec.json.decode(handle, type=CudaHandle), "", int(value))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
