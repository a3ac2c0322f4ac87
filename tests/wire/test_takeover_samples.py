"""A coordinator dies while samples are generated and scored: none is generated or scored twice, none is lost."""

from __future__ import annotations

import asyncio

from common.run_files import SharedDirectory
from tests.wire.wire_collect import SAMPLES, SAMPLING, published
from tests.wire.wire_support import Processes, play, soon, until
from tests.wire.wire_takeover import began, once, scored, succession, until_three_are_scored

# ---------------------------------------------------------------- samples


def test_samples_that_are_told_again_count_once_and_none_is_generated_or_scored_twice(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            setting = run.setting
            async with run.reign() as first:
                await until_three_are_scored(first, replicas, setting)
            async with run.reign() as second:
                (rollout,) = await second.ready("rollout")
                await second.ready("reward")
                assert rollout.leases == {2}
                setting.open()
                assert [sample.ended.is_set() for sample in setting.samples] == [True] * 3 + [False] * 5
                assert [sample.settled for sample in setting.samples] == [True] * 3 + [False] * 5
                collecting = asyncio.create_task(setting.collection().collect(SAMPLING, published))
                await asyncio.sleep(0)
                replicas.go()
                await soon(collecting)
                setting.check_whole(setting.samples)
                assert began(replicas, "rollout") == ["began GENERATE 2"]
                assert once(scored(replicas))
                assert setting.renewed() == []

    play(scenario())


def test_samples_that_end_before_the_new_coordinator_has_published_are_not_generated_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    """A replica proves the weights when it is done with its samples: what it tells meanwhile counts. Here another one
    died with the coordinator, so that one sample waits for the publish."""

    async def scenario() -> None:
        async with succession(shared, replicas, "rollout.replicas=2") as run:
            setting = run.setting
            async with run.reign() as first:
                setting.open()
                for number in (0, 1):
                    replicas.start("rollout", number, "block:GENERATE", "after:3")
                for role in ("reward", "trainer"):
                    replicas.start(role)
                    await first.ready(role)
                await first.ready("rollout", 2)
                await soon(first.publisher.publish())
                collecting = asyncio.create_task(setting.collect())
                await until(lambda: len(scored(replicas)) == 6, "three scored samples of each")
                collecting.cancel()
                await asyncio.wait([collecting])
            replicas.started[1].kill()
            replicas.started[1].wait()
            async with run.reign() as second:
                for role in ("rollout", "reward", "trainer"):
                    await second.ready(role)
                training = run.training()
                setting.open()
                collecting = asyncio.create_task(training.runner.collect(1, setting.samples, SAMPLING))
                await until(lambda: bool(second.publisher.waiting()), "the order to apply")
                assert not collecting.done()
                replicas.go()
                assert await soon(collecting) == 0
                setting.check_whole(setting.samples)
                inherited, again = began(replicas, "rollout")
                assert inherited in ("began GENERATE 3", "began GENERATE 4")
                assert replicas.noted("rollout").index("ended APPLY 0", 2) < replicas.noted("rollout").index(again)
                assert once(scored(replicas))

    play(scenario())


def test_samples_of_a_replica_that_dies_in_the_hands_of_the_new_coordinator_are_handed_out_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            setting = run.setting
            async with run.reign() as first:
                dies = await until_three_are_scored(first, replicas, setting)
            async with run.reign() as second:
                await second.ready("rollout")
                await second.ready("reward")
                setting.open()
                collecting = asyncio.create_task(setting.collection().collect(SAMPLING, published))
                await asyncio.sleep(0)
                dies.kill()
                await until(lambda: bool(second.deaths), "the death")
                replicas.start("rollout", 1)
                await second.ready("rollout")
                await setting.publish()
                second.dispatcher.pump("rollout")
                await soon(collecting)
                setting.check_whole(setting.samples)
                assert began(replicas, "rollout", 1) == ["began GENERATE 1000000001"]
                assert once(scored(replicas))

    play(scenario())


def test_scores_that_are_on_their_way_are_waited_for_and_not_asked_for_twice(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            setting = run.setting
            async with run.reign() as first:
                setting.open()
                replicas.start("rollout")
                replicas.start("reward", 0, "block:SCORE")
                await first.ready("rollout")
                await first.ready("reward")
                await setting.publish()
                collecting = asyncio.create_task(setting.collect())
                await until(lambda: bool(began(replicas, "reward")), "the lease")
                await until(lambda: all(sample.ended.is_set() for sample in setting.samples), "all responses")
                collecting.cancel()
                await asyncio.wait([collecting])
            async with run.reign() as second:
                await second.ready("rollout")
                (reward,) = await second.ready("reward")
                settling = asyncio.create_task(run.training().settle_inheritance())
                await asyncio.wait([settling], timeout=0.3)
                assert not settling.done()
                replicas.go()
                await soon(settling)
                assert reward.leases == set()
                setting.open()
                assert any(sample.settled for sample in setting.samples)
                await soon(setting.collection().collect(SAMPLING, published))
                setting.check_whole(setting.samples)
                assert once(scored(replicas))

    play(scenario())


# ---------------------------------------------------------------- quarantine


def test_quarantined_slots_are_released_when_their_old_holder_has_answered(
    shared: SharedDirectory, replicas: Processes
) -> None:
    """What it was too late with it may still write, whoever is its coordinator."""

    async def scenario() -> None:
        async with succession(shared, replicas, "timeouts.generate=0.4") as run:
            setting = run.setting
            async with run.reign() as first:
                setting.open()
                replicas.start("rollout", 0, "block:GENERATE")
                await first.ready("rollout")
                await setting.publish()
                collecting = asyncio.create_task(setting.collection().generate(SAMPLING, published))
                await until(lambda: setting.cache.quarantined == SAMPLES, "the slots of what is too late")
                collecting.cancel()
                await asyncio.wait([collecting])
            async with run.reign() as second:
                (rollout,) = await second.ready("rollout")
                assert rollout.hello.leases_held == [2]
                assert setting.cache.quarantined == SAMPLES
                await soon(run.training().settle_inheritance())
                assert setting.cache.quarantined == SAMPLES, "its holder has not answered"
                assert rollout.leases == {2}, "it is busy"
                replicas.go()
                await until(lambda: setting.cache.quarantined == 0, "the answer")

    play(scenario())


def test_quarantined_slots_of_the_dead_are_free_at_once(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas, "timeouts.generate=0.4") as run:
            setting = run.setting
            async with run.reign() as first:
                setting.open()
                process = replicas.start("rollout", 0, "block:GENERATE")
                await first.ready("rollout")
                await setting.publish()
                collecting = asyncio.create_task(setting.collection().generate(SAMPLING, published))
                await until(lambda: setting.cache.quarantined == SAMPLES, "the slots of what is too late")
                collecting.cancel()
                await asyncio.wait([collecting])
            process.kill()
            process.wait()
            async with run.reign():
                await soon(run.training().settle_inheritance())
                assert setting.cache.quarantined == 0

    play(scenario())
