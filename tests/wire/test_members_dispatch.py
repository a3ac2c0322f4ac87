"""Who gets work, and what comes back, over a real bus with real processes."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from common import bus
from common.messages import (
    Ack,
    Done,
    Evaluated,
    FinishedSample,
    Heartbeat,
    Lease,
    SamplesFinished,
    Scores,
    SlotRef,
    UpdateCritic,
    Updated,
    Welcome,
)
from common.run_files import SharedDirectory
from services.coordinator.dispatch import Dispatcher
from tests.wire.wire_leases import CONFIG, ByHand, generate, lost, score, submit
from tests.wire.wire_support import Processes, hello, next_of, patient, play, soon, star, until


def test_work_goes_to_whoever_is_free(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            for number in range(2):
                replicas.start("reward", number, "block:SCORE")
            await coordinator.ready("reward", 2)
            works = [score(coordinator) for _ in range(5)]
            await until(lambda: bool(replicas.noted("reward", 0) and replicas.noted("reward", 1)), "both at work")
            assert replicas.noted("reward", 0) == ["began SCORE 1"]
            assert replicas.noted("reward", 1) == ["began SCORE 2"]
            free = asyncio.create_task(coordinator.dispatcher.queues.until_free("reward"))
            assert not any(work.done() for work in works)
            replicas.go()
            done = await soon(asyncio.gather(*works))
            await soon(free)
            assert [answer.result for answer in done] == [Scores(scores=[])] * 5
            began = [line for number in range(2) for line in replicas.noted("reward", number) if "began" in line]
            assert sorted(began) == [f"began SCORE {work}" for work in range(1, 6)]

    play(scenario())


def test_a_critic_holds_four_leases_and_answers_in_order(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("critic", 0, "block:EVALUATE")
            (critic,) = await coordinator.ready("critic")
            seen: list[int] = []
            coordinator.dispatcher.on_done = lambda role, phase, done: seen.append(done.work)
            works = [submit(coordinator) for _ in range(6)]
            await until(lambda: len(critic.leases) == 4, "four leases")
            assert coordinator.members.status()[0].state == "working"
            replicas.go()
            done = await soon(asyncio.gather(*works))
            assert [answer.work for answer in done] == [1, 2, 3, 4, 5, 6] == seen
            assert not critic.leases

    play(scenario())


def test_work_waits_for_a_replica_and_ends_when_none_comes(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=0.2)) as coordinator:
            error = await lost(submit(coordinator, 0.2), "nobody", 3.0)
            assert "no critic replica took EVALUATE of step 1" in str(error)
            work = submit(coordinator, 20.0)
            replicas.start("critic")
            assert (await soon(work)).result == Evaluated(tokens=1)

    play(scenario())


def test_no_generation_without_the_receipt_for_its_version(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 0, "raise:GENERATE")
            (rollout,) = await coordinator.ready("rollout")
            work = generate(coordinator, 3)
            coordinator.commit(2)
            coordinator.prove(2)
            await soon(coordinator.publisher.publish())
            assert rollout.version == 2
            assert not rollout.leases
            assert replicas.noted("rollout") == ["began APPLY 2", "ended APPLY 2"]
            coordinator.commit(3)
            coordinator.prove(3)
            await soon(coordinator.publisher.publish())
            coordinator.dispatcher.pump("rollout")
            await lost(work, "failed")
            assert replicas.noted("rollout")[-1] == "began GENERATE 1"

    play(scenario())


def test_the_log_has_the_libraries_of_who_joins_in_one_line(
    shared: SharedDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG):
            dealer = bus.Dealer(shared.endpoint, "by-hand")
            versions = {"torch": "2.13.0", "numpy": "2\nERROR"}
            dealer.send(msgspec.structs.replace(hello("critic", "by-hand"), versions=versions))
            await next_of(dealer, Welcome)
            dealer.close()

    caplog.set_level(logging.INFO, "members")
    play(scenario())
    assert "on elsewhere, torch 2.13.0, numpy 2\N{REPLACEMENT CHARACTER}ERROR)" in caplog.text


def test_cancelled_work_is_never_handed_out(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            first, second = submit(coordinator), submit(coordinator)
            first.cancel()
            replicas.start("critic")
            assert (await soon(second)).work == 2
            assert [line for line in replicas.noted("critic") if "began" in line] == ["began EVALUATE 2"]

    play(scenario())


def test_work_is_numbered_on_from_epoch_to_epoch(shared: SharedDirectory) -> None:
    """Else a late answer to a dead coordinator would be taken for the answer to other work."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            first = coordinator.dispatcher.next_work()
            coordinator.members.welcome = msgspec.structs.replace(coordinator.members.welcome, epoch=2)
            assert Dispatcher(coordinator.members, 1.0).next_work() >= first + 1_000_000_000

    play(scenario())


# ---------------------------------------------------------------- what comes back


def test_a_failure_names_replica_phase_step_and_reason(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("critic", 0, "raise:EVALUATE")
            await coordinator.ready("critic")
            error = await lost(submit(coordinator), "failed")
            assert str(error) == "critic 0 failed in EVALUATE of step 1: ValueError: a scripted exception"
            await lost(submit(coordinator), "failed")

    play(scenario())


def test_an_answer_of_another_kind_is_a_failure(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("critic", 0, "wrong:UPDATE")
            await coordinator.ready("critic")
            work = coordinator.dispatcher.submit("critic", "UPDATE", 1, UpdateCritic(refs=[]), 20.0)
            error = await lost(work, "failed")
            assert "critic 0 answered UPDATE of step 1 with Evaluated, expected Updated" in str(error)

    play(scenario())


def test_a_repeated_answer_is_acknowledged_and_counts_once(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replica = ByHand(coordinator, shared, "by-hand")
            await replica.join("critic")
            counted: list[int] = []
            coordinator.dispatcher.on_done = lambda role, phase, done: counted.append(done.work)
            work = submit(coordinator)
            done = Done(epoch=1, work=1, result=Evaluated(tokens=5), started=0.0, ended=1.0)
            for _ in range(3):
                replica.dealer.send(done)
                assert (await next_of(replica.dealer, Ack)).work == 1
            assert (await soon(work)) == done
            assert counted == [1]
            replica.dealer.close()

    play(scenario())


def test_a_learner_holds_what_it_updated_also_where_nobody_waits(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replica = ByHand(coordinator, shared, "by-hand")
            await replica.join("critic")
            (critic,) = coordinator.members.of_role("critic")
            work = coordinator.dispatcher.submit("critic", "UPDATE", 1, UpdateCritic(refs=[]), 20.0)
            await next_of(replica.dealer, Lease)
            work.cancel()
            result = Updated(metrics={}, tokens=1)
            replica.dealer.send(Done(epoch=1, work=1, result=result, started=0.0, ended=1.0))
            await next_of(replica.dealer, Ack)
            assert critic.state == 1
            replica.dealer.close()

    play(scenario())


def test_samples_of_expired_work_are_dropped(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replica = ByHand(coordinator, shared, "by-hand")
            await replica.join("rollout")
            coordinator.members.of_role("rollout")[0].version = 1
            heard: list[list[FinishedSample]] = []
            work = generate(coordinator, 1, on_finished=heard.append)
            ref = SlotRef(0, 1)
            sample = FinishedSample(ref=ref, length=1, finish_reason="stop", version_low=1, version_high=1)
            replica.dealer.send(SamplesFinished(epoch=1, work=1, samples=[sample]))
            await until(lambda: heard == [[sample]], "the sample")
            work.cancel()
            replica.dealer.send(SamplesFinished(epoch=1, work=1, samples=[sample]))
            replica.dealer.send(Heartbeat(epoch=1, sent=0.0))
            await next_of(replica.dealer, Heartbeat)
            assert heard == [[sample]]
            replica.dealer.close()

    play(scenario())
