"""A coordinator dies, and the next one goes on with what its replicas hold, have finished, and have been told."""

from __future__ import annotations

import asyncio

from common import bus
from common.messages import Ack, Done, Evaluated, Hello, Ready, Rehello, Role, Welcome
from common.run_files import SharedDirectory
from tests.wire.wire_collect import SAMPLES, SAMPLING
from tests.wire.wire_leases import ByHand, evaluation, submit
from tests.wire.wire_support import Processes, Star, hello, next_of, play, soon, until
from tests.wire.wire_takeover import succession


def began(replicas: Processes, role: Role, number: int = 0) -> list[str]:
    return [line for line in replicas.noted(role, number) if line.startswith("began") and "APPLY" not in line]


def once(scored: list[str]) -> bool:
    return len(scored) == len(set(scored)) == SAMPLES


def scored(replicas: Processes) -> list[str]:
    path = replicas.folder / "scored"
    return path.read_text().split() if path.exists() else []


# ---------------------------------------------------------------- work that wrote columns


def test_work_that_is_held_over_the_change_is_waited_for_and_not_leased_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        task = evaluation()
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                replicas.start("critic", 0, "block:EVALUATE")
                await first.ready("critic")
                first.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0)
                await until(lambda: bool(began(replicas, "critic")), "the lease")
            async with run.reign() as second:
                assert second.members.epoch == 2
                (critic,) = await second.ready("critic")
                assert critic.leases == {1}
                work = second.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0)
                another = submit(second)
                assert not work.done()
                replicas.go()
                done = await soon(work)
                assert (done.work, done.epoch, done.result) == (1, 2, Evaluated(tokens=1))
                await soon(another)
                assert began(replicas, "critic") == ["began EVALUATE 1", "began EVALUATE 1000000001"]
                assert critic.leases == set()
                again = await second.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0)
                assert (again.work, again.result) == (0, Evaluated(tokens=1)), "recalled"

    play(scenario())


def test_an_answer_that_no_coordinator_took_is_taken_by_the_next_once(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        task = evaluation()
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                replicas.start("critic", 0, "block:EVALUATE")
                await first.ready("critic")
                first.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0)
                await until(lambda: bool(began(replicas, "critic")), "the lease")
            replicas.go()
            await until(lambda: "ended EVALUATE 1" in replicas.noted("critic"), "the end of the work")
            async with run.reign() as second:
                (critic,) = await second.ready("critic")
                assert critic.hello.leases_finished == [1]
                await until(lambda: not critic.leases, "its answer")
                counted: list[int] = []
                second.dispatcher.on_done = lambda role, phase, done: counted.append(done.work)
                done = await soon(second.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0))
                assert (done.work, done.result, counted) == (0, Evaluated(tokens=1), [])
            async with run.reign() as third:
                (critic,) = await third.ready("critic")
                assert (critic.hello.leases_held, critic.hello.leases_finished) == ([], []), "it was acknowledged"
                done = await soon(third.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0))
                assert done.work == 0
                assert began(replicas, "critic") == ["began EVALUATE 1"]

    play(scenario())


async def greet(star: Star, dealer: bus.Dealer, epoch: int, finished: list[int]) -> None:
    """A critic of the test's own comes back to a new coordinator."""
    greeting = hello("critic", "by-hand")
    dealer.send(
        Hello(
            epoch=epoch, role="critic", replica=0, identity="by-hand", protocol=greeting.protocol, host="elsewhere",
            pid=1, pid_start=greeting.pid_start, leases_finished=finished,
        )
    )  # fmt: skip
    await next_of(dealer, Welcome)
    dealer.send(Ready(epoch=star.members.epoch))
    await star.ready("critic")


def test_an_answer_that_was_taken_and_not_acknowledged_is_not_taken_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        task = evaluation()
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                critic = ByHand(first, shared, "by-hand")
                await critic.join("critic")
                work = first.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0)
                critic.dealer.send(Done(epoch=1, work=1, result=Evaluated(tokens=5), started=0.0, ended=1.0))
                await soon(work)
            async with run.reign() as second:
                critic.dealer.send(Done(epoch=1, work=1, result=Evaluated(tokens=9), started=0.0, ended=1.0))
                await next_of(critic.dealer, Rehello)
                await greet(second, critic.dealer, 1, [1])
                (member,) = second.members.of_role("critic")
                assert member.leases == set(), "the journal knows its end"
                critic.dealer.send(Done(epoch=2, work=1, result=Evaluated(tokens=9), started=0.0, ended=1.0))
                assert (await next_of(critic.dealer, Ack)).work == 1
                done = await soon(second.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0))
                assert done.result == Evaluated(tokens=5)
            critic.dealer.close()

    play(scenario())


def test_work_whose_holder_died_with_the_coordinator_is_done_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        task = evaluation()
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                process = replicas.start("critic", 0, "block:EVALUATE")
                await first.ready("critic")
                first.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0)
                await until(lambda: bool(began(replicas, "critic")), "the lease")
            process.kill()
            process.wait()
            replicas.go()
            async with run.reign() as second:
                replicas.start("critic", 1)
                await second.ready("critic")
                done = await soon(second.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0))
                assert done.work == 1000000001
                assert began(replicas, "critic", 1) == ["began EVALUATE 1000000001"]

    play(scenario())


# ---------------------------------------------------------------- samples


def test_samples_that_are_told_again_count_once_and_none_is_generated_or_scored_twice(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            setting = run.setting
            async with run.reign() as first:
                setting.open()
                replicas.start("rollout", 0, "block:GENERATE", "after:3")
                replicas.start("reward")
                await first.ready("rollout")
                await first.ready("reward")
                await setting.publish()
                collecting = asyncio.create_task(setting.collect())
                await until(lambda: len(scored(replicas)) == 3, "three scored samples")
                collecting.cancel()
                await asyncio.wait([collecting])
            async with run.reign() as second:
                (rollout,) = await second.ready("rollout")
                await second.ready("reward")
                assert rollout.leases == {2}
                setting.open()
                assert [sample.generated.is_set() for sample in setting.samples] == [True] * 3 + [False] * 5
                assert [sample.settled for sample in setting.samples] == [True] * 3 + [False] * 5
                collecting = asyncio.create_task(setting.collection().collect(SAMPLING, 0))
                await asyncio.sleep(0)
                replicas.go()
                await soon(collecting)
                setting.check_whole(setting.samples)
                assert began(replicas, "rollout") == ["began GENERATE 2"]
                assert once(scored(replicas))
                assert setting.renewed() == []

    play(scenario())


def test_samples_that_end_while_the_new_coordinator_publishes_are_not_generated_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    """Its replica proves the weights when it is done with them: what it tells meanwhile counts."""

    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            setting = run.setting
            async with run.reign() as first:
                setting.open()
                replicas.start("rollout", 0, "block:GENERATE", "after:3")
                replicas.start("reward")
                replicas.start("trainer")
                for role in ("rollout", "reward", "trainer"):
                    await first.ready(role)
                await soon(first.publisher.publish())
                collecting = asyncio.create_task(setting.collect())
                await until(lambda: len(scored(replicas)) == 3, "three scored samples")
                collecting.cancel()
                await asyncio.wait([collecting])
            async with run.reign() as second:
                for role in ("rollout", "reward", "trainer"):
                    await second.ready(role)
                training = run.training()
                setting.open()
                collecting = asyncio.create_task(training.runner.collect(1, setting.samples, SAMPLING))
                await asyncio.sleep(0.3)
                replicas.go()
                assert await soon(collecting) == 0
                setting.check_whole(setting.samples)
                assert began(replicas, "rollout") == ["began GENERATE 2"]
                assert once(scored(replicas))

    play(scenario())


def test_samples_of_a_replica_that_dies_in_the_hands_of_the_new_coordinator_are_handed_out_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            setting = run.setting
            async with run.reign() as first:
                setting.open()
                dies = replicas.start("rollout", 0, "block:GENERATE", "after:3")
                replicas.start("reward")
                await first.ready("rollout")
                await first.ready("reward")
                await setting.publish()
                collecting = asyncio.create_task(setting.collect())
                await until(lambda: len(scored(replicas)) == 3, "three scored samples")
                collecting.cancel()
                await asyncio.wait([collecting])
            async with run.reign() as second:
                await second.ready("rollout")
                await second.ready("reward")
                setting.open()
                collecting = asyncio.create_task(setting.collection().collect(SAMPLING, 0))
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
                await until(lambda: all(sample.generated.is_set() for sample in setting.samples), "all responses")
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
                await soon(setting.collection().collect(SAMPLING, 0))
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
                collecting = asyncio.create_task(setting.collection().generate(SAMPLING, 0))
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
                collecting = asyncio.create_task(setting.collection().generate(SAMPLING, 0))
                await until(lambda: setting.cache.quarantined == SAMPLES, "the slots of what is too late")
                collecting.cancel()
                await asyncio.wait([collecting])
            process.kill()
            process.wait()
            async with run.reign():
                await soon(run.training().settle_inheritance())
                assert setting.cache.quarantined == 0

    play(scenario())
