"""Trainer and critic die, in every part of a step: what they held is restored, and what they lost is done again."""

from __future__ import annotations

import asyncio

import pytest

from common.messages import Logprobs, Role
from common.run_files import SharedDirectory
from tests.wire.wire_learners import (
    REFS,
    both,
    dies,
    give,
    start,
    steps,
    told,
    update,
)
from tests.wire.wire_leases import CONFIG, evaluation
from tests.wire.wire_support import Processes, play, soon, star, until

ROLES: tuple[Role, ...] = ("trainer", "critic")


# ---------------------------------------------------------------- what is repeated


@pytest.mark.parametrize("role", ROLES)
def test_a_micro_batch_is_repeated_after_its_learner_is_restored(
    shared: SharedDirectory, replicas: Processes, role: Role
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await both(coordinator, replicas)
            await steps(coordinator, 2)
            coordinator.learners.begin(3)
            await dies(coordinator, replicas, ROLES.index(role))
            start(replicas, role, 1, "die:EVALUATE")
            work = give(coordinator, role, Logprobs(refs=REFS, reference=False) if role == "trainer" else evaluation())
            await until(lambda: len(coordinator.deaths) == 2, "the second death")
            assert not work.done()
            start(replicas, role, 2)
            await soon(work)
            assert told(replicas, role, 1) == ["CHECKPOINT", "restored 2", "EVALUATE"]
            assert told(replicas, role, 2) == ["CHECKPOINT", "restored 2", "EVALUATE"]
            (member,) = coordinator.members.of_role(role)
            assert member.state == 2
            assert coordinator.learners.saving.take_timings()["restore_s"] == 0.25

    play(scenario())


def test_a_critic_of_the_runs_beginning_needs_no_restoring(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            start(replicas, "critic", 0, "die:EVALUATE")
            await coordinator.ready("critic")
            coordinator.learners.begin(1)
            work = give(coordinator, "critic", evaluation())
            await until(lambda: bool(coordinator.deaths), "the death")
            start(replicas, "critic", 1)
            await soon(work)
            assert told(replicas, "critic", 1) == ["EVALUATE"]

    play(scenario())


def test_a_trainer_that_finds_weights_is_restored_to_the_runs_beginning(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            start(replicas, "trainer")
            await coordinator.ready("trainer")
            await dies(coordinator, replicas)
            start(replicas, "trainer", 1)
            (member,) = await coordinator.ready("trainer")
            await until(lambda: member.state == 0, "the restored state")
            assert told(replicas, "trainer", 1) == ["CHECKPOINT", "restored 0"]
            assert (coordinator.publisher.version, coordinator.publisher.writing) == (0, None)

    play(scenario())


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("word", ["die:UPDATE", "die-done:UPDATE"])
def test_an_update_is_repeated_from_the_state_before_it(
    shared: SharedDirectory, replicas: Processes, role: Role, word: str
) -> None:
    """Also where it was done, and nobody was told."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await both(coordinator, replicas)
            await steps(coordinator, 1)
            await dies(coordinator, replicas, ROLES.index(role))
            start(replicas, role, 1, word)
            await coordinator.ready(role)
            coordinator.learners.begin(2)
            updating = asyncio.create_task(update(coordinator, role, 2))
            await until(lambda: len(coordinator.deaths) == 2, "the death in the update")
            assert coordinator.learners.wanted[role] == 1
            start(replicas, role, 2)
            await soon(updating)
            assert told(replicas, role, 2) == ["CHECKPOINT", "restored 1", "UPDATE"]
            assert coordinator.learners.wanted[role] == 2
            if role == "trainer":
                assert coordinator.publisher.version == 2

    play(scenario())


@pytest.mark.parametrize("role", ROLES)
def test_an_update_that_dies_with_its_learner_before_the_steps_end_is_made_again(
    shared: SharedDirectory, replicas: Processes, role: Role
) -> None:
    """Its answer is in the journal, and counts no more."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await both(coordinator, replicas)
            await steps(coordinator, 1)
            coordinator.learners.begin(2)
            for each in ROLES:
                await update(coordinator, each, 2)
            assert coordinator.learners.behind() == []
            await dies(coordinator, replicas, ROLES.index(role))
            assert coordinator.learners.behind() == [role]
            start(replicas, role, 1)
            await update(coordinator, role, 2)
            assert told(replicas, role, 1) == ["CHECKPOINT", "restored 1", "UPDATE"]
            assert coordinator.learners.behind() == []
            other: Role = "critic" if role == "trainer" else "trainer"
            assert told(replicas, other, 0).count("UPDATE") == 2

    play(scenario())


def test_after_the_steps_end_a_saved_state_is_restored_and_nothing_repeated(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await both(coordinator, replicas)
            await steps(coordinator, 2)
            await dies(coordinator, replicas, 1)
            start(replicas, "critic", 1)
            (critic,) = await coordinator.ready("critic")
            await until(lambda: critic.state == 2, "the restored state")
            assert coordinator.learners.behind() == []
            assert told(replicas, "critic", 1) == ["CHECKPOINT", "restored 2"]

    play(scenario())
