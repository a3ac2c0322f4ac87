"""Critic: values of states. ``python -m services.critic --run NAME``"""

from __future__ import annotations

import sys

from common.service import Assignment, Service
from common.service_main import run_replica


def build(assignment: Assignment) -> Service:
    from services.critic.service import CriticService

    return CriticService(assignment)


if __name__ == "__main__":
    sys.exit(run_replica("critic", "Estimates values for GAE and learns from the returns.", build))
