"""A real service that is killed where its plan says: ``dying_service.py FOLDER SERVICE ARGUMENT...``; see traps.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from common.service import Assignment, Service
from common.service_main import run_replica
from tests.process.traps import Trapper


def main() -> int:
    folder, service = Path(sys.argv[1]), sys.argv[2]
    sys.argv[1:] = sys.argv[3:]
    replica = int(sys.argv[sys.argv.index("--replica") + 1]) if "--replica" in sys.argv else 0
    trapper = Trapper(folder, service, replica)
    if service == "coordinator":
        from services.coordinator.__main__ import main as coordinate

        trapper.set_up()
        trapper.loading()
        return coordinate()

    def build(assignment: Assignment) -> Service:
        # Only now, in the worker thread, as the service itself does: torch is slow to load.
        trapper.set_up()
        trapper.loading()
        entrance = importlib.import_module(f"services.{service}.__main__")
        built: Service = (entrance.RewardService if service == "reward" else entrance.build)(assignment)
        return built

    return run_replica(service, "A service with traps in it.", build)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    sys.exit(main())
