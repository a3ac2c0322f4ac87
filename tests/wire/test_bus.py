"""The sockets themselves: who is gone, who comes back, and in what order things arrive."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from common import bus
from common.messages import Ack, Failed, Heartbeat, Refused, Rehello, UpdateBegun
from common.run_files import SharedDirectory
from tests.wire.wire_support import next_from, next_of, play, soon, until

MESSAGES = 5000


def endpoint_in(folder: Path) -> str:
    return f"ipc://{folder}/bus.sock"


def gone(router: bus.Router, peer: bytes) -> bool:
    try:
        router.send(peer, Rehello(epoch=1))
    except bus.PeerGone as error:
        return peer.decode() in str(error)
    return False


def test_a_peer_that_never_came_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        router = bus.Router(endpoint_in(tmp_path))
        with pytest.raises(bus.PeerGone, match="nobody"):
            router.send(b"nobody", Rehello(epoch=1))
        router.close()

    play(scenario())


def test_a_peer_that_left_is_gone_within_a_second(tmp_path: Path) -> None:
    async def scenario() -> float:
        router, dealer = bus.Router(endpoint_in(tmp_path)), bus.Dealer(endpoint_in(tmp_path), "leaver")
        dealer.send(Heartbeat(epoch=1, sent=0.0))
        peer, _ = await soon(router.receive())
        assert not gone(router, peer)
        dealer.close()
        left = time.monotonic()
        await until(lambda: gone(router, peer), "PeerGone")
        router.close()
        return time.monotonic() - left

    assert play(scenario()) < 1.0


def test_a_dealer_reconnects_when_the_router_restarts_and_loses_nothing_it_sends_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        endpoint = endpoint_in(tmp_path)
        first, dealer = bus.Router(endpoint), bus.Dealer(endpoint, "stays")
        dealer.send(UpdateBegun(epoch=1, version=1))
        await next_from(first, UpdateBegun)
        first.close()
        for work in range(2, 6):
            dealer.send(UpdateBegun(epoch=1, version=work))
        second = bus.Router(endpoint)
        found = [(await next_from(second, UpdateBegun))[1].version for _ in range(4)]
        assert found == [2, 3, 4, 5]
        second.send(b"stays", Rehello(epoch=2))
        assert (await next_of(dealer, Rehello)).epoch == 2
        dealer.close()
        second.close()

    play(scenario())


def test_a_dealer_may_come_before_the_router(tmp_path: Path) -> None:
    async def scenario() -> None:
        dealer = bus.Dealer(endpoint_in(tmp_path), "early")
        dealer.send(UpdateBegun(epoch=1, version=9))
        router = bus.Router(endpoint_in(tmp_path))
        peer, message = await next_from(router, UpdateBegun)
        assert (peer, message.version) == (b"early", 9)
        dealer.close()
        router.close()

    play(scenario())


def test_order_is_kept_both_ways_and_nothing_is_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        router, dealer = bus.Router(endpoint_in(tmp_path)), bus.Dealer(endpoint_in(tmp_path), "peer")
        for work in range(MESSAGES):
            dealer.send(UpdateBegun(epoch=1, version=work))
        there = [(await next_from(router, UpdateBegun))[1].version for _ in range(MESSAGES)]
        assert there == list(range(MESSAGES))
        for work in range(MESSAGES):
            router.send(b"peer", Ack(epoch=1, work=work))
        assert [(await next_of(dealer, Ack)).work for _ in range(MESSAGES)] == list(range(MESSAGES))
        dealer.close()
        router.close()

    play(scenario())


def test_frames_that_are_no_message_are_told_apart_by_sender(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        router = bus.Router(shared.endpoint)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"odd")
        socket.connect(shared.endpoint)
        for frames in ([b"one", b"two"], [b""], [b"\x00", b"", b""]):
            await socket.send_multipart(frames)
        expected = ["expected 1 frame, found 2", "truncated", "expected 1 frame, found 3"]
        for reason in expected:
            peer, message = await soon(router.receive())
            assert peer == b"odd"
            assert isinstance(message, bus.BadMessage)
            assert reason in message.reason
        socket.close()
        context.term()
        router.close()

    play(scenario())


def test_too_many_frames_are_refused_by_the_dealer(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(shared.endpoint)
        dealer = bus.Dealer(shared.endpoint, "peer")
        dealer.send(UpdateBegun(epoch=1, version=1))
        await soon(asyncio.ensure_future(socket.recv_multipart()))
        await socket.send_multipart([b"peer", bus.encode(Rehello(epoch=1)), b"more"])
        message = await soon(dealer.receive())
        assert message == bus.BadMessage("expected 1 frame, found 2", len(bus.encode(Rehello(epoch=1))) + 4)
        dealer.close()
        socket.close()
        context.term()

    play(scenario())


def test_what_the_other_side_would_not_take_is_refused_by_the_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame beyond the limit costs its sender the connection, and would again after each reconnection."""

    async def scenario() -> None:
        router, dealer = bus.Router(endpoint_in(tmp_path)), bus.Dealer(endpoint_in(tmp_path), "peer")
        dealer.send(UpdateBegun(epoch=1, version=1))
        await next_from(router, UpdateBegun)
        monkeypatch.setattr(bus, "LARGEST_TO_COORDINATOR", 100)
        monkeypatch.setattr(bus, "LARGEST_TO_REPLICA", 100)
        long = "x" * 200
        with pytest.raises(bus.MessageTooLarge, match=r"a Failed of 2.. bytes, expected at most 100"):
            dealer.send(Failed(epoch=1, work=1, kind="error", message=long))
        with pytest.raises(bus.MessageTooLarge, match=r"a Refused of 2.. bytes, expected at most 100"):
            router.send(b"peer", Refused(epoch=1, reason=long))
        dealer.send(UpdateBegun(epoch=1, version=2))
        assert (await next_from(router, UpdateBegun))[1].version == 2
        dealer.close()
        router.close()

    play(scenario())


def test_a_frame_beyond_the_limit_costs_the_connection_and_is_not_received(tmp_path: Path) -> None:
    async def scenario() -> None:
        router = bus.Router(endpoint_in(tmp_path))
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"giant")
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint_in(tmp_path))
        await socket.send(bus.encode(UpdateBegun(epoch=1, version=1)))
        await next_from(router, UpdateBegun)
        await socket.send(bytes(bus.LARGEST_TO_COORDINATOR + 1))
        await until(lambda: gone(router, b"giant"), "the end of the connection")
        other = bus.Dealer(endpoint_in(tmp_path), "other")
        other.send(UpdateBegun(epoch=1, version=3))
        peer, message = await soon(router.receive())
        assert (peer, message) == (b"other", UpdateBegun(epoch=1, version=3))
        other.close()
        socket.close()
        context.term()
        router.close()

    play(scenario())
