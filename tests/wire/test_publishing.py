"""Receipts for published weights, and what ends a run at once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common import bus
from common.config import RolloutConfig, VLLMConfig
from common.messages import (
    FinishedSample,
    Heartbeat,
    Rehello,
    SamplesFinished,
)
from common.run_files import SharedDirectory
from services.coordinator.failures import PublishError, RunFailed
from tests.wire.wire_leases import CONFIG, NOTICED_WITHIN_S, ByHand, generate, lost
from tests.wire.wire_support import Processes, Star, next_of, patient, play, soon, star, until

WRONG = [
    ("receipt:identity", "it maps other memory (identity 'inode-18', expected 'inode-17')"),
    ("receipt:offsets", "its tensor head lies at offset 4160 (transport alias), expected offset 4112"),
    ("receipt:checksums", "its tensor head has checksum 99, expected -5"),
    ("receipt:canary_logprobs", "it differs from the writer's by 0.5 nats"),
    ("receipt:stale_tokens", "its prefix cache still answers from before version 5"),
    ("raise:APPLY", "rollout 1 cannot apply policy@5: ValueError: a scripted exception"),
    ("stale:APPLY", "rollout 1 cannot apply policy@5: scripted to be stale"),
]


@pytest.mark.parametrize(("word", "reason"), WRONG)
def test_a_wrong_receipt_of_the_only_replica_fails_the_publish(
    shared: SharedDirectory, replicas: Processes, word: str, reason: str
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 1, word)
            (wrong,) = await coordinator.ready("rollout")
            coordinator.commit(5)
            coordinator.prove(5)
            with pytest.raises(PublishError) as caught:
                await soon(coordinator.publisher.publish())
            assert "rollout 1" in str(caught.value)
            assert reason in str(caught.value)
            assert wrong.version == -1

    play(scenario())


@pytest.mark.parametrize(("word", "reason"), WRONG)
def test_beside_others_a_replica_with_a_wrong_receipt_is_named_and_gets_no_work(
    shared: SharedDirectory, replicas: Processes, word: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 0, word)
            replicas.start("rollout", 1)
            wrong, right = await coordinator.ready("rollout", 2)
            wrong.version = 4
            coordinator.commit(5)
            coordinator.prove(5)
            await soon(coordinator.publisher.publish())
            assert (wrong.version, right.version) == (-1, 5)
            assert reason.replace("rollout 1", "rollout 0") in caplog.text
            assert "it gets no leases before it has proved a version" in caplog.text
            facts = coordinator.publisher.last
            assert facts is not None
            assert facts.aliased == 1
            works = [generate(coordinator, 5), generate(coordinator, 5)]
            assert (len(wrong.leases), len(right.leases)) == (0, 1)
            coordinator.commit(6)
            coordinator.prove(6)
            await soon(coordinator.publisher.publish())
            assert "began APPLY 6" in replicas.noted("rollout", 0), "it is told to apply again"
            for work in works:
                work.cancel()

    play(scenario())


def test_who_has_not_answered_in_time_is_not_waited_for_again(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=20.0, update=1.0)) as coordinator:
            replicas.start("rollout", 0)
            replicas.start("rollout", 1, "block:APPLY")
            right, slow = await coordinator.ready("rollout", 2)
            for version, limit in ((1, 20.0), (2, 0.9)):
                coordinator.commit(version)
                coordinator.prove(version)
                await soon(coordinator.publisher.publish(), limit)
                assert (right.version, slow.version) == (version, -1)
            assert replicas.noted("rollout", 1) == ["began APPLY 1"]
            replicas.go()
            await until(lambda: not coordinator.publisher.applications.owed, "its late answer")
            coordinator.commit(3)
            coordinator.prove(3)
            await soon(coordinator.publisher.publish())
            assert (right.version, slow.version) == (3, 3)

    play(scenario())


def test_a_replica_that_turns_out_to_have_other_weights_applies_them_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 0, "stale:GENERATE")
            (rollout,) = await coordinator.ready("rollout")
            coordinator.commit(5)
            coordinator.prove(5)
            await soon(coordinator.publisher.publish())
            await lost(generate(coordinator, 5), "failed")
            assert rollout.version == -1
            await until(lambda: rollout.version == 5, "its second proof")
            assert [line for line in replicas.noted("rollout") if "APPLY" in line] == [
                "began APPLY 5", "ended APPLY 5", "began APPLY 5", "ended APPLY 5"
            ]  # fmt: skip

    play(scenario())


def test_publishing_does_not_wait_for_the_dead_but_for_the_slow(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=20.0, update=0.5)) as coordinator:
            replicas.start("rollout", 0, "die:APPLY")
            await coordinator.ready("rollout")
            coordinator.commit(1)
            coordinator.prove(1)
            await soon(coordinator.publisher.publish(), 0.4)
            replicas.start("rollout", 1, "block:APPLY")
            await coordinator.ready("rollout")
            with pytest.raises(PublishError, match=r"rollout 1 has not applied policy@1 within 0 s|within 1 s"):
                await soon(coordinator.publisher.publish())

    play(scenario())


def test_a_rollout_replica_that_joins_late_proves_the_weights_first(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            coordinator.commit(6)
            coordinator.prove(6)
            coordinator.talk.everybody_ready.set()
            work = generate(coordinator, 6)
            replicas.start("rollout", 0, "raise:GENERATE")
            await lost(work, "failed")
            assert replicas.noted("rollout")[:3] == ["began APPLY 6", "ended APPLY 6", "began GENERATE 1"]

    play(scenario())


# ---------------------------------------------------------------- what ends the run


def test_a_run_without_its_holder_ends_at_once(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("holder")
            broken = asyncio.create_task(coordinator.talk.until_broken())
            await coordinator.ready("holder")
            process.kill()
            with pytest.raises(RunFailed) as caught:
                await soon(broken, NOTICED_WITHIN_S)
            lost = "the GPU memory of the shared weights is lost: its process ended"
            assert str(caught.value) == f"holder 0 (pid {process.pid}) is gone, {lost}"

    play(scenario())


def test_a_run_on_a_gpu_needs_its_holder(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, patient("cuda:0", start=0.1)) as coordinator:
            with pytest.raises(RunFailed, match=r"timeouts.start.*0 of 1 holder"):
                await soon(coordinator.talk.until_everybody_ready())

    play(scenario())


def test_a_trainer_that_cannot_load_ends_the_run_at_once(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("trainer", 0, "fail-load")
            broken = asyncio.create_task(coordinator.talk.until_broken())
            with pytest.raises(RunFailed) as caught:
                await soon(broken, NOTICED_WITHIN_S)
            reason = "it did not get ready: its process ended: RuntimeError: there is no such model"
            assert str(caught.value) == f"trainer 0 (pid {process.pid}) is gone, {reason}"

    play(scenario())


def test_a_run_without_everybody_names_who_is_missing(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=1.0)) as coordinator:
            replicas.start("critic")
            await coordinator.ready("critic")
            with pytest.raises(RunFailed, match=r"timeouts.start.*0 of 1 rollout, 0 of 1 reward, 0 of 1 trainer"):
                await soon(coordinator.talk.until_everybody_ready())

    play(scenario())


def test_with_engine_vllm_both_parts_of_the_limit_are_named(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        rollout = RolloutConfig(engine="vllm", vllm=VLLMConfig(start_timeout=0.1))
        async with star(shared, msgspec.structs.replace(patient(start=0.1), rollout=rollout)) as coordinator:
            with pytest.raises(RunFailed, match=r"after 0 s \(timeouts.start \+ rollout.vllm.start_timeout\): 0 of 1"):
                await soon(coordinator.talk.until_everybody_ready())

    play(scenario())


def test_what_the_coordinator_cannot_deal_with_ends_the_run(shared: SharedDirectory) -> None:
    """An exception inside the conversation is the run's, with the sender's name, and not a silent hang."""

    async def scenario() -> None:
        coordinator = Star(shared, CONFIG)
        listening = asyncio.create_task(coordinator.talk.listen())
        replica = ByHand(coordinator, shared, "by-hand")
        await replica.join("rollout")
        coordinator.members.of_role("rollout")[0].version = 1

        def explode(samples: list[FinishedSample]) -> None:
            raise ZeroDivisionError("no such slot")

        generate(coordinator, 1, on_finished=explode)
        replica.dealer.send(SamplesFinished(epoch=1, work=1, samples=[]))
        with pytest.raises(RunFailed, match="cannot deal with SamplesFinished of rollout 0: ZeroDivisionError"):
            await soon(listening)
        replica.dealer.close()
        coordinator.dispatcher.close()
        coordinator.members.close()
        coordinator.router.close()
        coordinator.ledger.close()

    play(scenario())


def test_garbage_is_told_and_does_no_harm(shared: SharedDirectory, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG):
            dealer = bus.Dealer(shared.endpoint, "vandal")
            for frame in (b"", b"\xc1", b"\x81\xa4type\xa5Alien"):
                dealer._socket.send(frame)  # pyright: ignore[reportPrivateUsage]
            dealer.send(Heartbeat(epoch=1, sent=0.0))
            await next_of(dealer, Rehello)
            dealer.close()
        assert caplog.text.count("refused what a stranger (vandal…) sent") == 1
        assert "refused 3 messages of a stranger (vandal…) in all" in caplog.text

    play(scenario())
