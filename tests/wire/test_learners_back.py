"""Trainer and critic lose states that nobody saved, or that cannot be read: the run goes back to older ones."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common.messages import Role
from common.run_files import SharedDirectory
from services.coordinator.failures import RunFailed
from services.coordinator.learners import DEATHS, Rewind
from tests.wire.wire_learners import (
    both,
    dies,
    start,
    steps,
    told,
)
from tests.wire.wire_leases import CONFIG, ByHand
from tests.wire.wire_support import Processes, play, soon, star, until

ROLES: tuple[Role, ...] = ("trainer", "critic")


# ---------------------------------------------------------------- what leads back


async def waits() -> None:
    await asyncio.Event().wait()


def test_an_unsaved_state_that_dies_leads_back(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await both(coordinator, replicas)
            await steps(coordinator, 1)
            await steps(coordinator, 2, saved=False)
            guarded = asyncio.create_task(coordinator.learners.guard(waits()))
            await dies(coordinator, replicas, 1)
            with pytest.raises(Rewind, match="critic 0 died, and its state after step 2 was not saved"):
                await soon(guarded)
            assert coordinator.states.newest(most=2) == 1
            coordinator.learners.start_from(1)
            start(replicas, "critic", 1)
            await coordinator.ready("critic")
            await soon(coordinator.learners.bring_all())
            assert told(replicas, "trainer", 0)[-1] == told(replicas, "critic", 1)[-1] == "restored 1"
            assert {member.state for role in ROLES for member in coordinator.members.of_role(role)} == {1}
            assert coordinator.publisher.version == 1

    play(scenario())


def test_what_is_guarded_ends_as_it_ends_by_itself(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async def fails() -> None:
            raise ValueError("by itself")

        async with star(shared, CONFIG) as coordinator:
            await soon(coordinator.learners.guard(asyncio.sleep(0)))
            with pytest.raises(ValueError, match="by itself"):
                await soon(coordinator.learners.guard(fails()))

    play(scenario())


def test_a_state_that_cannot_be_restored_is_no_state_and_an_older_one_is_taken(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await both(coordinator, replicas)
            await steps(coordinator, 2)
            assert sorted(coordinator.states.whole) == [1, 2]
            guarded = asyncio.create_task(coordinator.learners.guard(waits()))
            await dies(coordinator, replicas, 1)
            start(replicas, "critic", 1, "unrestored:2")
            with pytest.raises(Rewind, match=r"critic 1 cannot be restored to step 2: .*a checksum is wrong"):
                await soon(guarded)
            assert "a checksum is wrong" in coordinator.states.distrusted[2]
            assert coordinator.states.newest(most=2) == 1
            coordinator.learners.start_from(1)
            await soon(coordinator.learners.bring_all())
            assert [line for line in told(replicas, "critic", 1) if "restored" in line] == ["restored 2", "restored 1"]
            assert told(replicas, "trainer", 0)[-1] == "restored 1"

    play(scenario())


def test_a_state_that_is_restored_too_slowly_is_still_one(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        config = msgspec.structs.replace(CONFIG, timeouts=msgspec.structs.replace(CONFIG.timeouts, checkpoint=1.0))
        async with star(shared, config) as coordinator:
            await both(coordinator, replicas)
            await steps(coordinator, 2)
            guarded = asyncio.create_task(coordinator.learners.guard(waits()))
            await dies(coordinator, replicas, 1)
            start(replicas, "critic", 1, "block:CHECKPOINT")
            with pytest.raises(
                Rewind, match=r"critic 1 was not restored to step 2 within timeouts\.checkpoint \(1 s\)"
            ):
                await soon(guarded)
            assert (coordinator.states.distrusted, coordinator.states.newest(most=2)) == ({}, 2)
            assert coordinator.states.late[2] == 1
            replicas.go()
            assert await coordinator.dispatcher.until_idle(20.0) == []
            coordinator.learners.start_from(2)
            await soon(coordinator.learners.bring_all())
            (critic,) = coordinator.members.of_role("critic")
            assert critic.state == 2
            assert told(replicas, "critic", 1) == ["CHECKPOINT", "restored 2"] * 2

    play(scenario())


def test_too_many_deaths_in_a_step_are_no_accident(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            coordinator.learners.begin(1)
            guarded = asyncio.create_task(coordinator.learners.guard(waits()))
            for count in range(DEATHS + 1):
                assert not guarded.done()
                critic = ByHand(coordinator, shared, f"critic-{count}")
                await critic.join("critic")
                critic.dealer.close()
                await until(lambda count=count: len(coordinator.deaths) == count + 1, "the death")
            with pytest.raises(RunFailed, match=f"trainer and critic died {DEATHS + 1} times in step 1"):
                await soon(guarded)

    play(scenario())
