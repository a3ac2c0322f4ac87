"""Which trainer or critic is let in and gets work, and how the states that they hold are saved."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from msgspec.structs import replace

from common import bus
from common.config import CheckpointConfig
from common.messages import NO_STATE, Heartbeat, Refused, Role, StateSaved, Welcome
from common.run_files import SharedDirectory
from tests.wire.wire_learners import (
    both,
    dies,
    give,
    record,
    start,
    state_file,
    steps,
    told,
    update,
)
from tests.wire.wire_leases import CONFIG, ByHand, evaluation
from tests.wire.wire_support import Processes, Star, hello, next_of, patient, play, soon, star, until

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


async def step_that_is_saved(star: Star, step: int, last: bool = False) -> None:
    """As ``steps``, but nobody waits for what is being saved; the step's publish is repeated."""
    star.learners.begin(step)
    for role in ROLES:
        await update(star, role, step)
    for _ in range(2):
        star.learners.saving.save(step, last)
    star.learners.end()
    star.states.reached(record(step))


@pytest.mark.parametrize(
    ("checkpoint", "last", "saved"),
    [
        (CheckpointConfig(), 0, [1, 4]),
        (CheckpointConfig(), 3, [1, 3, 4]),
        (CheckpointConfig(every=2), 0, [1, 2, 4]),
        (CheckpointConfig(snapshot_every=1), 0, [1, 2, 3, 4]),
        (CheckpointConfig(snapshot_every=2), 0, [2, 4]),
    ],
)
def test_a_step_is_skipped_by_default_while_one_part_of_an_earlier_state_is_still_written(
    shared: SharedDirectory, replicas: Processes, checkpoint: CheckpointConfig, last: int, saved: list[int]
) -> None:
    """By both learners, though one of them has written its part long ago; and never where it was asked for."""

    async def scenario() -> None:
        async with star(shared, replace(CONFIG, checkpoint=checkpoint)) as coordinator:
            start(replicas, "trainer")
            start(replicas, "critic", 0, "save:late")
            for role in ROLES:
                await coordinator.ready(role)
            for step in (1, 2, 3):
                await step_that_is_saved(coordinator, step, last=step == last)
                if step in saved:
                    await until(lambda step=step: coordinator.states.has("trainer", step), "the trainer's part")
                assert not coordinator.states.has("critic", step)
            replicas.go()
            await soon(coordinator.learners.saving.until_saved(20.0))
            await step_that_is_saved(coordinator, 4)
            await soon(coordinator.learners.saving.until_saved(20.0))
            assert sorted(coordinator.states.whole)[-2:] == saved[-2:]
            wanted = [what for step in range(1, 5) for what in ["UPDATE", "CHECKPOINT"][: 1 + (step in saved)]]
            assert [told(replicas, role, 0) for role in ROLES] == [wanted] * 2

    play(scenario())


def test_a_learner_that_dies_while_it_writes_holds_up_no_later_state(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await both(coordinator, replicas)
            await steps(coordinator, 1)
            await dies(coordinator, replicas, 1)
            start(replicas, "critic", 1, "save:late")
            await coordinator.ready("critic")
            await step_that_is_saved(coordinator, 2)
            await until(lambda: coordinator.states.has("trainer", 2), "the trainer's part")
            await dies(coordinator, replicas, 2)
            coordinator.learners.start_from(1)
            start(replicas, "critic", 2)
            await coordinator.ready("critic")
            await soon(coordinator.learners.bring_all())
            coordinator.states.forget_after(1)
            await steps(coordinator, 2)
            assert coordinator.states.newest(most=9) == 2

    play(scenario())


@pytest.mark.parametrize("last", ["part", "step", "part of an earlier coordinator"])
def test_a_state_json_that_cannot_be_written_costs_this_state_alone(
    shared: SharedDirectory, replicas: Processes, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever of the three makes it whole."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            coordinator.states.write_beside(asyncio.get_running_loop())
            await both(coordinator, replicas)
            saving = coordinator.learners.saving
            await steps(coordinator, 1)
            await soon(saving.until_saved(20.0))
            (state_file(coordinator, 2) / "in the way").mkdir(parents=True)
            coordinator.learners.begin(2)
            for role in ROLES:
                await update(coordinator, role, 2)
            with caplog.at_level(logging.WARNING):
                if last != "step":
                    coordinator.states.reached(record(2))
                if last != "part of an earlier coordinator":
                    saving.save(2, last=False)
                    await soon(saving.until_saved(20.0))
                for member in coordinator.members.of_role("trainer") + coordinator.members.of_role("critic"):
                    if last == "part of an earlier coordinator":
                        told_of = StateSaved(epoch=1, step=2, nbytes=1, seconds=0.1, digest=f"{member.role} 2")
                        saving.saved(member, told_of)
                if last == "step":
                    coordinator.states.reached(record(2))
                await soon(saving.until_saved(20.0))
            coordinator.learners.end()
            text = f"the state after step 2 is not saved: .*{state_file(coordinator, 2)}"
            assert len(re.findall(text, caplog.text)) == 1, caplog.text
            assert sorted(coordinator.states.whole) == [1]
            await steps(coordinator, 3)
            await soon(saving.until_saved(20.0))
            assert sorted(coordinator.states.whole) == [1, 3]

    play(scenario())
