"""Hostile peers on the real socket of a coordinator's real parts: refused, told once, and nobody else notices."""

from __future__ import annotations

import uuid

import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace

from common import bus
from common.messages import (
    Done,
    Evaluated,
    Failed,
    Heartbeat,
    Ready,
    Refused,
    Rehello,
    Score,
    ScoreBatch,
    ScoreItem,
    Scores,
    SlotRef,
    UpdateCommitted,
    Welcome,
)
from common.run_files import SharedDirectory
from services.coordinator.complaints import ANSWERS_AT_ONCE
from tests.wire.scripted_values import committed
from tests.wire.wire_leases import CONFIG, ByHand, lost, submit
from tests.wire.wire_support import Processes, Star, hello, next_of, play, soon, star, until

FLOOD = 3000
ONCE = "(told once, then counted)"


class Raw:
    """A client that sends whatever frames it likes."""

    def __init__(self, shared: SharedDirectory, name: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(shared.endpoint)

    async def send(self, *frames: bytes) -> None:
        await soon(self.socket.send_multipart(frames))

    async def heard(self) -> int:
        """How many answers came so far."""
        count = 0
        while await self.socket.poll(200):
            await self.socket.recv_multipart()
            count += 1
        return count

    def close(self) -> None:
        self.socket.close()
        self.context.term()


async def still_works(coordinator: Star, replicas: Processes) -> None:
    """A real replica joins and does its work."""
    replicas.start("critic")
    await coordinator.ready("critic")
    await soon(submit(coordinator))


def test_garbage_parts_and_floods_are_told_once(
    shared: SharedDirectory, replicas: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            peer = Raw(shared, "vandal")
            for _ in range(FLOOD):
                await peer.send(b"\xc1 garbage")
            await peer.send(*[b"part"] * 5000)
            await until(lambda: coordinator.talk.complaints.count(b"vandal") == FLOOD + 1, "all of it")
            await still_works(coordinator, replicas)
            peer.close()
        assert caplog.text.count(ONCE) == 1
        assert f"refused {FLOOD + 1} messages of a stranger (vandal…) in all" in caplog.text

    play(scenario())


def test_a_frame_that_is_too_large_is_never_read(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            peer = Raw(shared, "giant")
            await peer.send(bytes(bus.LARGEST_TO_COORDINATOR + 1))
            await still_works(coordinator, replicas)
            assert coordinator.talk.complaints.count(b"giant") == 0
            peer.close()

    play(scenario())


def test_a_stranger_that_floods_is_not_answered_each_time(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            peer = Raw(shared, "flood")
            for _ in range(FLOOD):
                await peer.send(bus.encode(Heartbeat(epoch=1, sent=0.0)))
            await still_works(coordinator, replicas)
            assert ANSWERS_AT_ONCE <= await peer.heard() < FLOOD / 2
            peer.close()

    play(scenario())


def test_hellos_under_changing_names_leave_nothing(
    shared: SharedDirectory, replicas: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            first = ByHand(coordinator, shared, "the-trainer")
            await first.join("trainer")
            for _ in range(30):
                name = str(uuid.uuid4())
                second = bus.Dealer(shared.endpoint, name)
                second.send(hello("trainer", name))  # may be the successor of one that has died, and waits to be
                second.send(hello("reward", "the-trainer"))
                assert "it says that it is 'the-trai" in (await next_of(second, Refused)).reason
                second.send(hello("reward", name, epoch=2))
                assert "it comes from epoch 2" in (await next_of(second, Refused)).reason
                second.close()
                assert name not in caplog.text, "an identity is its owner's alone to know"
            assert [member.name for member in coordinator.members.by_peer.values()] == ["trainer 0"]
            await still_works(coordinator, replicas)
            first.dealer.close()
        assert caplog.text.count(ONCE) == 30

    play(scenario())


def test_a_member_cannot_answer_for_another(
    shared: SharedDirectory, replicas: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("critic", 0, "block:EVALUATE")
            await coordinator.ready("critic")
            work = submit(coordinator)
            await until(lambda: bool(replicas.noted("critic")), "the lease")
            liar = ByHand(coordinator, shared, "liar")
            await liar.join("reward")
            for number in range(1, 6):
                answer = Done(epoch=1, work=number, result=Evaluated(tokens=99), started=0.0, ended=1.0)
                liar.dealer.send(answer)
                liar.dealer.send(Failed(epoch=1, work=number, kind="error", message="forged"))
            liar.dealer.send(UpdateCommitted(epoch=1, work=1, manifest=replace(committed(9), path="/etc/passwd")))
            liar.dealer.send(Ready(epoch=1, manifest=committed(9)))
            await until(lambda: coordinator.talk.complaints.count(b"liar") == 12, "all twelve")
            assert not work.done()
            assert coordinator.publisher.manifest is None
            replicas.go()
            assert (await soon(work)).result != Evaluated(tokens=99)
            liar.dealer.close()
        assert caplog.text.count(ONCE) == 1
        assert "refused what reward 0 (pid 1) sent" in caplog.text

    play(scenario())


def test_words_of_another_epoch_do_nothing_but_ask_for_a_hello(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replica = ByHand(coordinator, shared, "by-hand")
            await replica.join("critic")
            work = submit(coordinator)
            await until(lambda: bool(coordinator.members.by_peer[b"by-hand"].leases), "the lease")
            (number,) = coordinator.members.by_peer[b"by-hand"].leases
            for epoch in (0, 2, 2**40):
                replica.dealer.send(Done(epoch=epoch, work=number, result=Evaluated(tokens=9), started=0.0, ended=1.0))
                await next_of(replica.dealer, Rehello)
            assert not work.done()
            replica.dealer.send(Done(epoch=1, work=number, result=Evaluated(tokens=2), started=0.0, ended=1.0))
            assert (await soon(work)).result == Evaluated(tokens=2)
            replica.dealer.close()

    play(scenario())


def test_a_refused_answer_loses_its_work_at_once(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replica = ByHand(coordinator, shared, "by-hand")
            await replica.join("reward")
            item = ScoreItem(ref=SlotRef(3, 1), prompt="", ground_truth=b"1", metadata=b"null", source="")
            work = coordinator.dispatcher.submit("reward", "SCORE", 1, ScoreBatch(items=[item]), 60.0)
            await until(lambda: bool(coordinator.members.by_peer[b"by-hand"].leases), "the lease")
            (number,) = coordinator.members.by_peer[b"by-hand"].leases
            alien = Scores(scores=[Score(ref=SlotRef(4, 1), reward=1.0, accuracy=1.0)])
            replica.dealer.send(Done(epoch=1, work=number, result=alien, started=0.0, ended=1.0))
            failed = await lost(work, "failed")
            assert "slot 4 (generation 1) is not in its lease" in str(failed)
            assert not coordinator.members.by_peer[b"by-hand"].leases
            replica.dealer.close()

    play(scenario())


def test_a_stranger_takes_nobodys_place(shared: SharedDirectory) -> None:
    """Identities are random and secret; a guess is a connection of its own, that hears nothing of another's."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            secret = str(uuid.uuid4())
            replica = bus.Dealer(shared.endpoint, secret)
            replica.send(hello("critic", secret))
            await next_of(replica, Welcome)
            replica.send(Ready(epoch=1))
            await coordinator.ready("critic")
            guesses = [Raw(shared, str(uuid.uuid4())) for _ in range(5)]
            for guess in guesses:
                await guess.send(bus.encode(hello("reward", secret)))
            work = submit(coordinator)
            lease_of = coordinator.members.by_peer[secret.encode()]
            await until(lambda: bool(lease_of.leases), "the lease")
            for guess in guesses:
                assert await guess.heard() == 1, "its own refusal"
                guess.close()
            (number,) = lease_of.leases
            replica.send(Done(epoch=1, work=number, result=Evaluated(tokens=2), started=0.0, ended=1.0))
            await soon(work)
            replica.close()

    play(scenario())
