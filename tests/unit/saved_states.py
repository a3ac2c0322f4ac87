"""The coordinator's end of saved states, whose parts are empty directories here."""

from __future__ import annotations

from pathlib import Path

from common.config import CheckpointConfig
from common.messages import Role
from services.coordinator.ledger import RecordSizes, StepRecord
from services.coordinator.states import SavedStates

ROLES: tuple[Role, ...] = ("trainer", "critic")
LIMIT_S = 20.0


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, version=step, samples=2, masked=0, position=(0, 2 * step), kl_coefficient=0.5,
        sizes=RecordSizes(metrics=step, samples=2 * step), reward=None, step_s=1.0, idle_s=0.0, phase_s={},
    )  # fmt: skip


def states(folder: Path, run: str = "demo", roles: tuple[Role, ...] = ROLES, **config: int | bool) -> SavedStates:
    found = SavedStates(folder, run, 1, roles, CheckpointConfig(**config))  # type: ignore[arg-type]
    found.scan()
    return found


def part(states: SavedStates, role: Role, step: int, digest: str = "") -> None:
    (states.path(step) / role).mkdir(parents=True)
    states.part_saved(role, step, digest or f"{role} {step}")


def save(states: SavedStates, *steps: int) -> None:
    for step in steps:
        for role in states.roles:
            part(states, role, step)
        states.reached(record(step))


def on_disk(states: SavedStates) -> list[int]:
    """Steps of which anything is left."""
    return sorted(int(path.name.removeprefix("step-")) for path in states.directory.glob("step-*"))
