"""Trainer and critic die, in every part of a step: what they held is restored, and what they lost is done again."""

from __future__ import annotations

import asyncio

import pytest

from common import bus
from common.messages import NO_STATE, Evaluated, Heartbeat, Logprobs, Refused, Role, Welcome
from common.run_files import SharedDirectory
from services.coordinator.failures import RunFailed
from services.coordinator.learners import DEATHS, Rewind
from tests.wire.wire_learners import (
    REFS,
    both,
    dies,
    give,
    record,
    start,
    state_file,
    steps,
    told,
    update,
    update_of,
)
from tests.wire.wire_leases import CONFIG, ByHand, evaluation
from tests.wire.wire_support import Processes, hello, next_of, patient, play, soon, star, until
from tests.wire.wire_takeover import succession

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
            assert coordinator.learners.take_timings()["restore_s"] == 0.25

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
            assert coordinator.learners.held[role] == 1
            start(replicas, role, 2)
            await soon(updating)
            assert told(replicas, role, 2) == ["CHECKPOINT", "restored 1", "UPDATE"]
            assert coordinator.learners.held[role] == 2
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
            assert {told(replicas, role, number)[-1] for role, number in (("trainer", 0), ("critic", 1))} == {
                "restored 1"
            }
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
            with pytest.raises(Rewind, match="critic 1 cannot be restored to step 2: .*a checksum is wrong"):
                await soon(guarded)
            assert "a checksum is wrong" in coordinator.states.distrusted[2]
            assert coordinator.states.newest(most=2) == 1
            coordinator.learners.start_from(1)
            await soon(coordinator.learners.bring_all())
            assert [line for line in told(replicas, "critic", 1) if "restored" in line] == ["restored 2", "restored 1"]
            assert told(replicas, "trainer", 0)[-1] == "restored 1"

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
            coordinator.learners.save(1, last=False)
            coordinator.learners.save(1, last=False)
            await soon(coordinator.learners.until_saved(20.0))
            assert not state_file(coordinator, 1).exists(), "the step is not written down yet"
            coordinator.states.reached(record(1))
            assert state_file(coordinator, 1).exists()
            assert [told(replicas, role, 0) for role in ROLES] == [["UPDATE", "CHECKPOINT"]] * 2, "saved once"
            timings = coordinator.learners.take_timings()
            assert timings == {"checkpoint_stall_s": 1.0, "checkpoint_write_s": 0.5, "checkpoint_gib": 2.0}
            assert coordinator.learners.take_timings() == {}

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


# ---------------------------------------------------------------- a coordinator that takes over


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("when", ["before the greeting", "before anybody asks", "after"])
def test_an_update_that_ends_over_the_change_of_coordinators_is_made_once(
    shared: SharedDirectory, replicas: Processes, role: Role, when: str
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                start(replicas, role, 0, "block:UPDATE")
                await first.ready(role)
                first.learners.begin(1)
                updating = asyncio.create_task(update(first, role, 1))
                await until(lambda: "UPDATE" in told(replicas, role, 0), "the update")
                updating.cancel()
                await asyncio.wait([updating])
            if when == "before the greeting":
                replicas.go()
                await until(lambda: "ended UPDATE 1" in replicas.noted(role), "its end")
            async with run.reign() as second:
                second.learners.start_from(0, takeover=True)
                (member,) = await second.ready(role)
                if when == "before anybody asks":
                    replicas.go()
                await until(lambda: when == "after" or not member.leases, "its answer")
                second.learners.begin(1)
                updating = asyncio.create_task(update(second, role, 1))
                await asyncio.sleep(0)
                replicas.go()
                await soon(updating)
                assert told(replicas, role, 0) == ["UPDATE"]
                assert (second.learners.held[role], member.state) == (1, 1)

    play(scenario())


def test_a_learner_that_has_made_another_update_is_restored_first(
    shared: SharedDirectory, replicas: Processes
) -> None:
    """It learnt from a batch that is not the one of the new coordinator: from more samples that could be scored."""

    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                start(replicas, "critic")
                await first.ready("critic")
                first.learners.begin(1)
                await update(first, "critic", 1)
            async with run.reign() as second:
                second.learners.start_from(0, takeover=True)
                await second.ready("critic")
                second.learners.begin(1)
                other = type(update_of("critic", 1))(refs=REFS[:1])
                done = await soon(second.learners.update("critic", other))
                assert done.result != Evaluated(tokens=0)
                assert told(replicas, "critic", 0) == ["UPDATE", "CHECKPOINT", "restored 0", "UPDATE"]

    play(scenario())


def test_an_update_whose_learner_died_with_the_coordinator_is_made_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                start(replicas, "critic")
                await first.ready("critic")
                first.learners.begin(1)
                await update(first, "critic", 1)
            replicas.started[0].kill()
            replicas.started[0].wait()
            async with run.reign() as second:
                second.learners.start_from(0, takeover=True)
                start(replicas, "critic", 1)
                await second.ready("critic")
                second.learners.begin(1)
                await update(second, "critic", 1)
                assert told(replicas, "critic", 1) == ["UPDATE"]

    play(scenario())
