"""Rollout: generates responses. ``python -m services.rollout --run NAME``"""

from __future__ import annotations

import sys

from common.service import Assignment, Service
from common.service_main import run_replica


def build(assignment: Assignment) -> Service:
    from services.rollout.service import RolloutService

    return RolloutService(assignment)


if __name__ == "__main__":
    sys.exit(run_replica("rollout", "Generates responses with the policy's current weights.", build))
