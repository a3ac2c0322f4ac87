"""Steps of trainer and critic, as the step runner asks for them, with scripted processes that die in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.messages import Role, SlotRef, Task, UpdateCritic, UpdatePolicy
from services.coordinator.ledger import RecordSizes, StepRecord
from tests.wire.wire_support import Processes, Star, soon, until

REFS = [SlotRef(0, 1), SlotRef(1, 1)]


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, version=step, samples=2, masked=0, position=(0, 2 * step), kl_coefficient=0.0, sizes=RecordSizes(),
        reward=0.0, step_s=1.0, idle_s=0.0, phase_s={},
    )  # fmt: skip


def update_of(role: Role, step: int) -> UpdatePolicy | UpdateCritic:
    if role == "critic":
        return UpdateCritic(refs=REFS)
    return UpdatePolicy(refs=REFS, version=step, kl_coefficient=0.0)


async def update(star: Star, role: Role, step: int) -> None:
    await soon(star.learners.update(role, update_of(role, step)))


def start(replicas: Processes, role: Role, number: int = 0, *words: str) -> None:
    """From the second on a trainer finds the weights of the first."""
    again = ("again",) if role == "trainer" and number else ()
    replicas.start(role, number, *again, *words)


async def both(star: Star, replicas: Processes) -> None:
    """Trainer and critic number 0."""
    for role in ("trainer", "critic"):
        start(replicas, role)
        await star.ready(role)


async def steps(star: Star, last: int, saved: bool = True) -> None:
    """Both learners do steps 1 to ``last``, each of which is written down, and saved."""
    for step in range(star.learners.step + 1, last + 1):
        star.learners.begin(step)
        for role in star.learners.roles:
            await update(star, role, step)
        if saved:
            star.learners.saving.save(step, last=False)
            await soon(star.learners.saving.until_saved(20.0))
        star.learners.end()
        star.states.reached(record(step))


async def dies(star: Star, replicas: Processes, number: int = 0) -> None:
    """The process that was started as the ``number``-th is killed, and the coordinator knows it."""
    deaths = len(star.deaths)
    replicas.started[number].kill()
    await until(lambda: len(star.deaths) > deaths, "the death")


def told(replicas: Processes, role: Role, number: int) -> list[str]:
    """What this replica was given to do, in order: phases, and the steps of the states that it was restored to."""
    lines = replicas.noted(role, number)
    return [line.split()[1] if line.startswith("began") else line for line in lines if not line.startswith("ended")]


def state_file(star: Star, step: int) -> Path:
    return star.states.path(step) / "state.json"


def give(star: Star, role: Role, task: Task) -> asyncio.Task[object]:
    """Work of the step under way, which is repeated where its holder dies."""
    return asyncio.ensure_future(star.learners.work(role, "EVALUATE", task, 20.0))
