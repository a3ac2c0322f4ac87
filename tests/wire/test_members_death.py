"""Who joins, who is refused, who is dead and who is only silent; real processes that die, hang and lie."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import Any

import pytest

from common import bus
from common.messages import (
    Ack,
    Evaluated,
    Heartbeat,
    Ready,
    Refused,
    Rehello,
    Stop,
    Welcome,
)
from common.run_files import SharedDirectory
from services.coordinator.watch import GONE_GRACE_S
from tests.wire.wire_leases import CONFIG, NOTICED_WITHIN_S, ByHand, lost, score, submit
from tests.wire.wire_support import Processes, hello, next_of, play, soon, star, until


def test_death_is_noticed_and_its_work_lost_as_dead(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("critic", 0, "block:EVALUATE")
            await coordinator.ready("critic")
            works = [submit(coordinator) for _ in range(2)]
            await until(lambda: bool(replicas.noted("critic")), "the lease")
            killed = time.monotonic()
            process.kill()
            for work in works:
                error = await lost(work, "dead", NOTICED_WITHIN_S)
                assert "critic 0 died (its process ended) in EVALUATE of step 1" in str(error)
            assert time.monotonic() - killed < 1.0
            assert not coordinator.members.by_peer

    play(scenario())


def test_a_lease_to_one_that_died_in_between_goes_to_another(shared: SharedDirectory, replicas: Processes) -> None:
    """The loop has not been told of the death yet, and sending shows it."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            dies, lives = replicas.start("reward", 0, "raise:SCORE"), replicas.start("reward", 1, "raise:SCORE")
            members = await coordinator.ready("reward", 2)
            dies.kill()
            dies.wait()
            deadline = time.monotonic() + 5.0
            while True:  # without giving the loop a turn
                assert time.monotonic() < deadline
                try:
                    coordinator.router.send(members[0].peer, Ack(epoch=1, work=0))
                except bus.PeerGone:
                    break
            assert coordinator.members.of_role("reward") == members
            error = await lost(score(coordinator), "failed")
            assert "reward 1 failed" in str(error)
            assert lives.poll() is None
            await until(lambda: [name for name, _, _ in coordinator.deaths] == ["reward 0"], "the death")

    play(scenario())


def test_one_that_lost_its_connection_and_lives_on_is_killed_before_its_work_is_lost(
    shared: SharedDirectory, replicas: Processes
) -> None:
    """Else it could still write to slots that are somebody else's by now."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("critic", 0, "drop:EVALUATE")
            await coordinator.ready("critic")
            began = time.monotonic()
            await lost(submit(coordinator), "dead", NOTICED_WITHIN_S)
            assert time.monotonic() - began > GONE_GRACE_S
            assert (await replicas.ended(process))[0] == -9

    play(scenario())


def test_one_on_another_host_is_dead_when_its_connection_is_gone(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replica = ByHand(coordinator, shared, "far-away")
            await replica.join("critic")
            work = submit(coordinator)
            replica.dealer.close()
            error = await lost(work, "dead", NOTICED_WITHIN_S)
            assert "its connection is gone" in str(error)

    play(scenario())


def test_silence_is_not_death(shared: SharedDirectory, replicas: Processes) -> None:
    """A replica that keeps its interpreter lock for many heartbeats stays a member, and its late answer counts."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("critic", 0, "gil:1.6")
            (critic,) = await coordinator.ready("critic")
            work = submit(coordinator)
            await until(lambda: time.monotonic() - critic.heard > 6 * CONFIG.timeouts.heartbeat, "silence")
            assert coordinator.members.of_role("critic") == [critic]
            assert (await soon(work)).result == Evaluated(tokens=1)
            assert not coordinator.deaths

    play(scenario())


@pytest.mark.parametrize("end", ["answer", "death"])
def test_expired_work_is_over_when_its_holder_answers_or_dies(
    shared: SharedDirectory, replicas: Processes, end: str
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("reward", 0, "block:SCORE")
            (reward,) = await coordinator.ready("reward")
            error = await lost(score(coordinator, 0.3), "timeout", 3.0)
            assert "reward 0 holds work 1 (SCORE of step 1) longer than 0.3 s" in str(error)
            over: list[str] = []
            coordinator.dispatcher.when_over(error.work, lambda: over.append("over"))
            # Busy with what it has not answered: nothing new is given to it.
            waiting = score(coordinator)
            assert reward.leases == {1}
            assert not over
            replicas.go()
            if end == "death":
                process.kill()
            await until(lambda: over == ["over"], "the end of the expired work", NOTICED_WITHIN_S)
            if end == "answer":
                assert (await soon(waiting)).work == 2
                assert "began SCORE 2" in replicas.noted("reward")
            coordinator.dispatcher.when_over(error.work, lambda: over.append("at once"))
            assert over == ["over", "at once"]

    play(scenario())


def test_nobody_needs_to_read_the_exception_of_lost_work(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("critic", 0, "block:EVALUATE")
            await coordinator.ready("critic")
            submit(coordinator)
            waits = asyncio.create_task(soon(submit(coordinator)))
            await until(lambda: bool(replicas.noted("critic")), "the lease")
            waits.cancel()
            await asyncio.wait([waits], timeout=NOTICED_WITHIN_S)
            assert waits.cancelled()
            process.kill()
            await until(lambda: bool(coordinator.deaths), "the death")
            del waits
            await asyncio.sleep(0)
            gc.collect()
            await asyncio.sleep(0)
        assert not complaints

    play(scenario())


# ---------------------------------------------------------------- Hello


def test_who_must_not_join_is_refused(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("trainer")
            (trainer,) = await coordinator.ready("trainer")
            second = replicas.start("trainer", 1)
            code, log = await replicas.ended(second)
            assert code == 2
            assert f"there is a trainer already (pid {trainer.hello.pid}): a run has one" in log
            for greeting, reason in (
                (hello("critic", "odd", protocol=999), "it speaks protocol 999"),
                (hello("critic", "somebody-else"), "'somebody'…, but its connection has another identity"),
            ):
                dealer = bus.Dealer(shared.endpoint, "odd")
                dealer.send(greeting)
                assert reason in (await next_of(dealer, Refused)).reason
                dealer.close()
                await until(lambda: len(coordinator.members.by_peer) == 1, "only the trainer")

    play(scenario())


def test_strangers_and_other_epochs_are_told_to_say_hello(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            dealer = bus.Dealer(shared.endpoint, "stranger")
            dealer.send(Heartbeat(epoch=1, sent=0.0))
            assert (await next_of(dealer, Rehello)).epoch == 1
            dealer.send(hello("critic", "stranger"))
            await next_of(dealer, Welcome)
            dealer.send(Ready(epoch=7))
            await next_of(dealer, Rehello)
            assert not coordinator.members.of_role("critic")
            dealer.send(Ready(epoch=1))
            await coordinator.ready("critic")
            coordinator.members.stopping = "enough"
            late = bus.Dealer(shared.endpoint, "late")
            late.send(hello("reward", "late"))
            assert "ending" in (await next_of(late, Stop)).reason
            late.close()
            dealer.close()

    play(scenario())


def test_everybody_stops_when_told(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            processes = [replicas.start("reward", 0), replicas.start("critic", 0, "block:EVALUATE")]
            await coordinator.ready("reward")
            await coordinator.ready("critic")
            submit(coordinator)
            coordinator.members.stop_all("enough")
            assert await coordinator.members.until_all_gone(5.0) == []
            assert [(await replicas.ended(process))[0] for process in processes] == [0, 0]
            assert sorted(name for name, _, _ in coordinator.deaths) == ["critic 0", "reward 0"]

    play(scenario())


def test_the_holder_is_told_to_stop_when_the_others_are_gone(shared: SharedDirectory, replicas: Processes) -> None:
    """They compute on its memory until their end."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            holder = replicas.start("holder")
            (member,) = await coordinator.ready("holder")
            trainer = ByHand(coordinator, shared, "slow to stop")
            await trainer.join("trainer")
            coordinator.members.stop_all("enough")
            assert (await next_of(trainer.dealer, Stop)).reason == "enough"
            left = await coordinator.members.until_all_gone(0.5)
            assert [found.name for found in left] == ["holder 0", "trainer 0"]
            assert member in left
            assert holder.poll() is None
            trainer.dealer.close()
            assert await coordinator.members.until_all_gone(5.0) == []
            assert (await replicas.ended(holder))[0] == 0
            assert [name for name, _, _ in coordinator.deaths] == ["trainer 0", "holder 0"]

    play(scenario())


def test_who_cannot_be_killed_from_here_is_given_up(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            elsewhere = ByHand(coordinator, shared, "on another host")
            await elsewhere.join("critic")
            coordinator.members.watch.kill(coordinator.members.of_role("critic")[0])
            assert [(name, reason) for name, reason, _ in coordinator.deaths] == [
                ("critic 0", "it cannot be killed from here and is given up")
            ]
            elsewhere.dealer.close()

    play(scenario())


def test_open_files_of_the_dead_are_closed(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                process = replicas.start("reward")
                await coordinator.ready("reward")
                process.kill()
                await until(lambda: not coordinator.members.by_peer, "the death")
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "no descriptor left")

    play(scenario())
