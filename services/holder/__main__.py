"""Holder: hosts shared weights on the GPU. ``python -m services.holder --run NAME``"""

from __future__ import annotations

import sys

from common.service import Assignment, Service
from common.service_main import run_replica


def build(assignment: Assignment) -> Service:
    from services.holder.service import HolderService

    return HolderService(assignment)


if __name__ == "__main__":
    sys.exit(run_replica("holder", "Hosts the GPU memory of shared weights, so that it outlives who writes it.", build))
