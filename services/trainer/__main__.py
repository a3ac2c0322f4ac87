"""Trainer: learns the policy. ``python -m services.trainer --run NAME``"""

from __future__ import annotations

import sys

from common.service import Assignment, Service
from common.service_main import run_replica


def build(assignment: Assignment) -> Service:
    from services.trainer.service import TrainerService

    return TrainerService(assignment)


if __name__ == "__main__":
    sys.exit(run_replica("trainer", "Updates the policy by PPO and publishes its weights.", build))
