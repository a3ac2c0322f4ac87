"""No lease before the trainer's proof and the engine's receipt are both there and fit, whichever comes first."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.messages import UpdatePolicy
from common.run_files import SharedDirectory
from services.coordinator.failures import PublishError
from tests.wire.scripted_values import committed, proved
from tests.wire.wire_leases import CONFIG, generate
from tests.wire.wire_support import Processes, patient, play, soon, star, until

STILL_WAITING_S = 0.4


async def waits(task: asyncio.Task[None]) -> None:
    done, _ = await asyncio.wait([task], timeout=STILL_WAITING_S)
    assert not done


def test_a_trainer_that_gets_ready_proves_its_first_version(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("trainer")
            await coordinator.ready("trainer")
            assert (coordinator.publisher.manifest, coordinator.publisher.proof) == (committed(0), proved(0))
            replicas.start("rollout")
            (rollout,) = await coordinator.ready("rollout")
            await soon(coordinator.publisher.publish())
            assert rollout.version == 0

    play(scenario())


def test_a_receipt_without_the_proof_gives_no_lease(shared: SharedDirectory, replicas: Processes) -> None:
    """The trainer's own messages, through an update that commits first and proves later."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("trainer", 0, "proof:late")
            replicas.start("rollout")
            (rollout,) = await coordinator.ready("rollout")
            await coordinator.ready("trainer")
            task = UpdatePolicy(refs=[], version=1, kl_coefficient=0.0)
            update = coordinator.dispatcher.submit("trainer", "UPDATE", 1, task, 20.0)
            await until(lambda: coordinator.publisher.version == 1, "the commit")
            publishing = asyncio.create_task(coordinator.publisher.publish())
            await until(lambda: "ended APPLY 1" in replicas.noted("rollout"), "the receipt")
            work = generate(coordinator, 1)
            await waits(publishing)
            assert rollout.version == -1
            assert not rollout.leases
            replicas.go()
            await soon(publishing)
            await soon(update)
            assert rollout.version == 1
            work.cancel()

    play(scenario())


def test_a_proof_waits_for_the_receipt(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 0, "block:APPLY")
            (rollout,) = await coordinator.ready("rollout")
            coordinator.commit(1)
            coordinator.prove(1)
            publishing = asyncio.create_task(coordinator.publisher.publish())
            await waits(publishing)
            assert rollout.version == -1
            replicas.go()
            await soon(publishing)
            assert rollout.version == 1

    play(scenario())


@pytest.mark.parametrize("with_engine", [True, False])
def test_a_proof_that_does_not_come_fails_the_publish(
    shared: SharedDirectory, replicas: Processes, with_engine: bool
) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=20.0, update=1.0)) as coordinator:
            if with_engine:
                replicas.start("rollout")
                await coordinator.ready("rollout")
            coordinator.commit(1)
            coordinator.prove(0)
            with pytest.raises(PublishError, match=r"the trainer has not proved policy@1 within 1 s \(timeouts.update"):
                await soon(coordinator.publisher.publish())

    play(scenario())


def test_a_proof_of_a_later_version_is_none_of_this_one(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout")
            (rollout,) = await coordinator.ready("rollout")
            coordinator.commit(1)
            coordinator.prove(2)
            coordinator.prove(1)  # repeated, and older than what is known
            with pytest.raises(PublishError, match="policy@1 is no longer the trainer's version: it has proved 2"):
                await soon(coordinator.publisher.publish())
            assert rollout.version == -1

    play(scenario())


def test_a_late_engine_with_a_wrong_receipt_gets_no_work(
    shared: SharedDirectory, replicas: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            coordinator.commit(6)
            coordinator.prove(6)
            coordinator.talk.everybody_ready.set()
            work = generate(coordinator, 6)
            replicas.start("rollout", 0, "receipt:checksums")
            (rollout,) = await coordinator.ready("rollout")
            await until(lambda: "gets no work before the next publish" in caplog.text, "the refusal")
            assert "rollout 0, policy@6: its tensor head has checksum 99, expected -6" in caplog.text
            assert (rollout.version, rollout.leases) == (-1, set())
            work.cancel()

    play(scenario())


def test_what_a_publish_took_is_kept(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 0)
            replicas.start("rollout", 1)
            await coordinator.ready("rollout", 2)
            started = time.monotonic()
            coordinator.commit(1)
            assert coordinator.publisher.last is None
            publishing = asyncio.create_task(coordinator.publisher.publish())
            await waits(publishing)
            coordinator.prove(1)
            await soon(publishing)
            facts = coordinator.publisher.last
            assert facts is not None
            assert (facts.aliased, facts.copied, facts.copied_bytes) == (2, 0, 0)
            # The engines held it long before the proof came; both are counted from the commit.
            assert 0.0 < facts.held_s < 0.9 * STILL_WAITING_S < facts.proved_s < time.monotonic() - started

    play(scenario())
