"""Which trainer or critic is let in and gets work, and how the states that they hold are saved."""

from __future__ import annotations

import asyncio

import pytest

from common import bus
from common.messages import NO_STATE, Heartbeat, Refused, Role, Welcome
from common.run_files import SharedDirectory
from tests.wire.wire_learners import (
    both,
    give,
    record,
    start,
    state_file,
    steps,
    told,
    update,
)
from tests.wire.wire_leases import CONFIG, ByHand, evaluation
from tests.wire.wire_support import Processes, hello, next_of, patient, play, soon, star

ROLES: tuple[Role, ...] = ("trainer", "critic")


# ---------------------------------------------------------------- who is let in


def test_a_trainer_is_refused_while_another_lives_and_welcomed_when_it_is_dead_and_nobody_knows_yet(
    shared: SharedDirectory,
) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=20.0, heartbeat=5.0)) as coordinator:
            first = ByHand(coordinator, shared, "first")
            await first.join("trainer")
            second = bus.Dealer(shared.endpoint, "second")
            second.send(hello("trainer", "second"))
            await next_of(first.dealer, Heartbeat)
            assert list(coordinator.members.by_peer) == [b"first"], "the second waits until it is known"
            first.dealer.send(Heartbeat(epoch=1, sent=0.0))
            await next_of(first.dealer, Heartbeat)
            second.send(hello("trainer", "second"))
            assert "there is a trainer already (pid 1): a run has one" in (await next_of(second, Refused)).reason
            first.dealer.close()
            third = bus.Dealer(shared.endpoint, "third")
            deadline = asyncio.get_running_loop().time() + 10.0
            while b"third" not in coordinator.members.by_peer:
                assert asyncio.get_running_loop().time() < deadline
                third.send(hello("trainer", "third"))
                await asyncio.sleep(0.05)
            await next_of(third, Welcome)
            assert [name for name, _, _ in coordinator.deaths] == ["trainer 0"]
            for dealer in (second, third):
                dealer.close()

    play(scenario())


def test_a_learner_of_another_state_gets_no_work_of_the_step(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            critic = ByHand(coordinator, shared, "critic")
            await critic.join("critic")
            (member,) = coordinator.members.of_role("critic")
            coordinator.learners.begin(1)
            for wrong in (NO_STATE, 1, 2):
                member.state = wrong
                work = give(coordinator, "critic", evaluation())
                await asyncio.sleep(0)
                assert not member.leases
                work.cancel()
                await asyncio.wait([work])
            member.state = 0
            work = give(coordinator, "critic", evaluation())
            await asyncio.sleep(0)
            assert member.leases
            work.cancel()
            critic.dealer.close()

    play(scenario())


# ---------------------------------------------------------------- saving


def test_a_state_is_whole_when_both_parts_and_the_step_are_written(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await both(coordinator, replicas)
            coordinator.learners.begin(1)
            for role in ROLES:
                await update(coordinator, role, 1)
            coordinator.learners.saving.save(1, last=False)
            coordinator.learners.saving.save(1, last=False)
            await soon(coordinator.learners.saving.until_saved(20.0))
            assert not state_file(coordinator, 1).exists(), "the step is not written down yet"
            coordinator.states.reached(record(1))
            assert state_file(coordinator, 1).exists()
            assert [told(replicas, role, 0) for role in ROLES] == [["UPDATE", "CHECKPOINT"]] * 2, "saved once"
            timings = coordinator.learners.saving.take_timings()
            assert timings == {"checkpoint_stall_s": 1.0, "checkpoint_write_s": 0.5, "checkpoint_gib": 2.0}
            assert coordinator.learners.saving.take_timings() == {}

    play(scenario())


@pytest.mark.parametrize("how", ["unsaved", "dies"])
def test_a_state_that_is_not_saved_costs_nothing_but_a_longer_way_back(
    shared: SharedDirectory, replicas: Processes, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            start(replicas, "trainer")
            await coordinator.ready("trainer")
            start(replicas, "critic", 0, *(["unsaved:1"] if how == "unsaved" else ["die:CHECKPOINT"]))
            await coordinator.ready("critic")
            await steps(coordinator, 1)
            assert coordinator.states.whole == {}
            assert "the critic's state after step 1 is not saved: " in caplog.text
            assert ("the disk is full" if how == "unsaved" else "critic 0 died") in caplog.text
            assert coordinator.states.has("trainer", 1)
            assert not coordinator.states.has("critic", 1)

    play(scenario())
