"""Whoever does not get the memory of shared weights is told why, in time."""

from __future__ import annotations

import pytest

from common import bus
from common.messages import Heartbeat, Refused, Role
from common.run_files import SharedDirectory
from tests.wire.wire_asker import GPU, asker, ready_for_engines
from tests.wire.wire_leases import CONFIG
from tests.wire.wire_support import Processes, hello, next_of, patient, play, star


@pytest.mark.parametrize(
    ("role", "asked", "reason"),
    [
        ("rollout", {"name": "polisy"}, "there is no weight set 'polisy', only policy"),
        ("rollout", {"nbytes": 64}, "rollout 0 cannot write weight set 'policy', which belongs to the trainer"),
        ("trainer", {"nbytes": -1}, "it asks for -1 bytes"),
    ],
)
def test_what_can_never_be_granted_is_refused_at_once(
    shared: SharedDirectory, role: Role, asked: dict[str, object], reason: str
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG):
            replica = await asker(shared, role)
            replica.ask(**asked)  # pyright: ignore[reportArgumentType]
            assert reason in await replica.denied()
            replica.dealer.close()

    play(scenario())


@pytest.mark.parametrize(
    ("role", "nbytes", "commits", "reason"),
    [
        ("trainer", 64, False, "no holder is ready"),
        ("rollout", 0, False, "no trainer is ready, which commits weight set 'policy'"),
        ("rollout", 0, True, "no trainer is ready, and engines take the GPU memory that is left"),
    ],
)
def test_who_is_missing_at_the_deadline_is_named(
    shared: SharedDirectory, role: Role, nbytes: int, commits: bool, reason: str
) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=0.5, update=0.5)) as coordinator:
            if commits:
                coordinator.commit(0, GPU)
            replica = await asker(shared, role)
            replica.ask(9, gpu=GPU, nbytes=nbytes)
            limit = "0.9 s (0.9 of timeouts.start + timeouts.update)" if commits else "0.5 s (0.9 of timeouts.start)"
            assert f"after {limit} {reason}" in await replica.denied(9)
            assert coordinator.talk.weights.waiting == 0
            replica.dealer.close()

    play(scenario())


def test_who_waits_for_the_start_of_another_engine_is_told(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=0.5, update=1.5)) as coordinator:
            await ready_for_engines(coordinator, replicas)
            first, second = await asker(shared, name="first"), await asker(shared, name="second")
            first.ask(gpu=GPU)
            await first.granted()
            second.ask(gpu=GPU)
            assert f"rollout 0 still starts on {GPU}, where one at a time takes its share" in await second.denied()
            first.dealer.close()
            second.dealer.close()

    play(scenario())


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise:PUBLISH", "holder 0 failed in PUBLISH of step 0: ValueError: a scripted exception"),
        ("die:PUBLISH", "holder 0 died"),
        ("block:PUBLISH", "the holder has not answered"),
        ("wrong:PUBLISH", "holder 0 answered PUBLISH of step 0 with Evaluated, expected Hosted"),
    ],
)
def test_a_holder_that_cannot_is_told(shared: SharedDirectory, replicas: Processes, word: str, reason: str) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=6.0 if "block" not in word else 1.5)) as coordinator:
            replicas.start("holder", 0, word)
            await coordinator.ready("holder")
            writer = await asker(shared, "trainer")
            writer.ask(gpu=GPU, nbytes=64)
            assert reason in await writer.denied()
            writer.dealer.close()

    play(scenario())


def test_a_failure_of_the_coordinator_itself_is_no_silence(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            engine = await asker(shared)
            coordinator.commit(0)
            del coordinator.publisher.writing
            engine.ask()
            assert "the coordinator failed: AttributeError" in await engine.denied()
            engine.dealer.close()

    play(scenario())


def test_a_second_holder_is_refused(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG):
            first = await asker(shared, "holder", "first")
            second = bus.Dealer(shared.endpoint, "second")
            second.send(hello("holder", "second"))
            await next_of(first.dealer, Heartbeat)
            first.dealer.send(Heartbeat(epoch=1, sent=0.0))  # so it lives, and the second one has come to stay
            await next_of(first.dealer, Heartbeat)
            second.send(hello("holder", "second"))
            assert "there is a holder already" in (await next_of(second, Refused)).reason
            first.dealer.close()
            second.close()

    play(scenario())
