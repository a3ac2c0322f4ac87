"""Nothing happens any more: the run ends, names who waits for whom, and the services say where they are."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.messages import FinishedSample, SamplesFinished, SlotRef
from common.run_files import SharedDirectory
from services.coordinator.failures import RunFailed
from services.coordinator.watchdog import Watchdog
from tests.wire.wire_leases import CONFIG, ByHand, generate, score, submit
from tests.wire.wire_support import Processes, Star, play, soon, star, until

LIMIT_S = 0.8


def watch(coordinator: Star) -> asyncio.Task[None]:
    watchdog = Watchdog(LIMIT_S, coordinator.members, coordinator.dispatcher, coordinator.publisher)
    return asyncio.create_task(watchdog.watch())


async def end(watching: asyncio.Task[None]) -> str:
    with pytest.raises(RunFailed) as caught:
        await soon(watching)
    return str(caught.value)


def test_a_standstill_names_who_waits_for_whom_and_asks_for_stacks(
    shared: SharedDirectory, replicas: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            critic = replicas.start("critic", 0, "block:EVALUATE")
            await coordinator.ready("critic")
            submit(coordinator)
            generate(coordinator, 3)
            score(coordinator)
            await until(lambda: bool(replicas.noted("critic")), "the lease")
            began = time.monotonic()
            reason = await end(watch(coordinator))
            assert time.monotonic() - began >= LIMIT_S
            assert "nothing has happened for 1 s (timeouts.progress = 0.8): " in reason
            for line in (
                "work 1 (EVALUATE of step 1) is with critic 0 for 1 s of 20 s",
                "work 2 (GENERATE of step 1) waits for a rollout that is ready and free",
                "work 3 (SCORE of step 1) waits for a reward that is ready and free",
                "members: critic 0 heard 0.",
            ):
                assert line in reason
                assert line in caplog.text
            assert reason.endswith("the services' logs end with their stacks")
            log = replicas.log(critic)
            assert "wait_for_go" in log, "where it computes"
            assert "in listen" in log or "run_until_complete" in log or "in main" in log, "and where it listens"
            assert critic.poll() is None, "it is asked, and not killed"

    play(scenario())


def test_a_publish_that_stands_still_names_receipt_and_proof(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 0, "block:APPLY")
            await coordinator.ready("rollout")
            coordinator.commit(6)
            publishing = asyncio.create_task(coordinator.publisher.publish())
            await until(lambda: bool(replicas.noted("rollout")), "the order")
            reason = await end(watch(coordinator))
            assert "rollout 0 is to apply policy@6; the trainer is to prove version 6" in reason
            publishing.cancel()

    play(scenario())


def test_without_any_work_it_says_so(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            assert "no work is out; members: none" in await end(watch(coordinator))

    play(scenario())


def test_one_that_only_loads_is_not_ready(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 0, "want:")
            await until(lambda: bool(coordinator.members.by_peer), "its Hello")
            reason = await end(watch(coordinator))
            assert "rollout 0 heard 0." in reason
            assert "s ago, not ready" in reason

    play(scenario())


def test_samples_that_end_are_progress(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            rollout = ByHand(coordinator, shared, "by-hand")
            await rollout.join("rollout")
            coordinator.members.of_role("rollout")[0].version = 1
            heard: list[list[FinishedSample]] = []
            generate(coordinator, 1, on_finished=heard.append)
            sample = FinishedSample(ref=SlotRef(0, 1), length=1, finish_reason="stop", version_low=1, version_high=1)
            watching = watch(coordinator)
            began = time.monotonic()
            while time.monotonic() - began < 3 * LIMIT_S:
                rollout.dealer.send(SamplesFinished(epoch=1, work=1, samples=[sample]))
                await asyncio.wait([watching], timeout=LIMIT_S / 4)
                assert not watching.done()
            assert len(heard) > 3
            assert "work 1 (GENERATE of step 1) is with rollout 0" in await end(watching)
            rollout.dealer.close()

    play(scenario())
