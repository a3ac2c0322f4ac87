"""Publishing while trainers die: versions that go back, publishes that end with them, and waiting for a new trainer."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.run_files import SharedDirectory
from services.coordinator.failures import PublishError, SteppedBack
from tests.wire.wire_learners import start, steps
from tests.wire.wire_leases import CONFIG
from tests.wire.wire_support import Processes, patient, play, soon, star, until


def test_a_publish_ends_when_its_version_dies_with_its_trainer(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout")
            (rollout,) = await coordinator.ready("rollout")
            coordinator.commit(4)
            publishing = asyncio.create_task(coordinator.publisher.publish())
            await until(lambda: "ended APPLY 4" in replicas.noted("rollout"), "the receipt")
            assert not publishing.done(), "the proof is missing"
            coordinator.publisher.step_back(3)
            with pytest.raises(SteppedBack, match="policy@4 is gone: its trainer died, and another one makes it again"):
                await soon(publishing)
            assert rollout.version == -1, "it gets no leases"
            assert (coordinator.publisher.version, coordinator.publisher.writing) == (-1, 3)
            with pytest.raises(PublishError, match="committed no weights yet"):
                await soon(coordinator.publisher.publish())
            coordinator.commit(3)
            coordinator.prove(3)
            await soon(coordinator.publisher.ensure())
            assert rollout.version == 3

    play(scenario())


def test_a_version_that_is_older_than_one_that_was_proved_is_proved_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout")
            (rollout,) = await coordinator.ready("rollout")
            coordinator.commit(4)
            coordinator.prove(4)
            await soon(coordinator.publisher.publish())
            coordinator.publisher.step_back(2)
            coordinator.commit(2)
            ensuring = asyncio.create_task(coordinator.publisher.ensure())
            await until(lambda: "ended APPLY 2" in replicas.noted("rollout"), "the receipt")
            assert not ensuring.done(), "version 2 is not proved by the proof of version 4"
            coordinator.prove(2)
            await soon(ensuring)
            assert (rollout.version, coordinator.publisher.published) == (2, 2)

    play(scenario())


def test_going_back_to_what_is_committed_keeps_it_and_lets_nobody_apply_before_it_is_there_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    """A trainer that died in the update of version 5 left the memory half written."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            coordinator.commit(4)
            coordinator.prove(4)
            coordinator.talk.everybody_ready.set()
            coordinator.publisher.begun(5)
            coordinator.publisher.step_back(4)
            assert (coordinator.publisher.version, coordinator.publisher.writing) == (4, 4)
            replicas.start("rollout")
            (rollout,) = await coordinator.ready("rollout")
            ensuring = asyncio.create_task(coordinator.publisher.ensure())
            await asyncio.wait([ensuring], timeout=0.3)
            assert replicas.noted("rollout") == []
            coordinator.commit(4)
            await soon(ensuring)
            assert rollout.version == 4

    play(scenario())


def test_ensure_publishes_once(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout")
            await coordinator.ready("rollout")
            coordinator.commit(1)
            coordinator.prove(1)
            for _ in range(3):
                await soon(coordinator.publisher.ensure())
            assert replicas.noted("rollout") == ["began APPLY 1", "ended APPLY 1"]

    play(scenario())


def test_ensure_waits_no_longer_than_an_update_for_a_trainer(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=20.0, update=0.3)) as coordinator:
            began = time.monotonic()
            with pytest.raises(PublishError, match=r"committed no weights within 0 s \(timeouts.update\)"):
                await soon(coordinator.publisher.ensure())
            assert time.monotonic() - began >= 0.3

    play(scenario())


def test_a_second_announcement_of_what_is_written_is_no_new_writing(shared: SharedDirectory) -> None:
    """The step runner announces an update whose outcome an earlier coordinator's trainer has committed."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            coordinator.commit(3)
            coordinator.publisher.begun(3)
            assert coordinator.publisher.writing is None
            coordinator.publisher.begun(4)
            assert coordinator.publisher.writing == 4

    play(scenario())


def test_engines_run_on_the_weights_of_a_trainer_that_was_restored(
    shared: SharedDirectory, replicas: Processes
) -> None:
    """The way of a version back: trainer 0 dies after version 2, trainer 1 becomes what it was after step 1."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            for role in ("trainer", "critic", "rollout"):
                start(replicas, role)
                await coordinator.ready(role)
            (rollout,) = coordinator.members.of_role("rollout")
            await steps(coordinator, 1)
            await steps(coordinator, 2, saved=False)
            await soon(coordinator.publisher.publish())
            assert rollout.version == 2
            replicas.started[0].kill()
            await until(lambda: bool(coordinator.deaths), "the death")
            coordinator.learners.start_from(1)
            assert coordinator.publisher.version == -1
            start(replicas, "trainer", 1)
            await coordinator.ready("trainer")
            await soon(coordinator.learners.bring_all())
            await soon(coordinator.publisher.ensure())
            assert (coordinator.publisher.version, rollout.version) == (1, 1)
            assert [line for line in replicas.noted("rollout") if "ended" in line] == ["ended APPLY 2", "ended APPLY 1"]

    play(scenario())
