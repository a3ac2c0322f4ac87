"""A coordinator dies, and the next one goes on with what its replicas hold, have finished, and have been told."""

from __future__ import annotations

from common import bus
from common.messages import Ack, Done, Evaluated, Hello, Ready, Rehello, Welcome
from common.run_files import SharedDirectory
from tests.wire.wire_leases import ByHand, evaluation, submit
from tests.wire.wire_support import Processes, Star, hello, next_of, play, soon, until
from tests.wire.wire_takeover import began, succession, until_evaluating

# ---------------------------------------------------------------- work that wrote columns


def test_work_that_is_held_over_the_change_is_waited_for_and_not_leased_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        task = evaluation()
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                await until_evaluating(first, replicas, task)
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
                await until_evaluating(first, replicas, task)
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
            pid_space="elsewhere", pid=1, pid_start=greeting.pid_start, leases_finished=finished,
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
