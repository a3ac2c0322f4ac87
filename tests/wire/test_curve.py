"""The bus over tcp: with the right keys it works, and without them nothing is heard."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from common import bus
from common.curve import AUTHORISED, ClientKeys, CurveError, ServerKeys, make_keys
from common.messages import Heartbeat, Rehello, UpdateBegun
from tests.wire.wire_support import heard_for, next_from, next_of, play

ANYWHERE = "tcp://127.0.0.1:*"
SILENT_S = 1.0
"""How long a router is listened to that must hear nothing of a stranger; whoever has keys is heard within it."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Keys of another run."""
    make_keys(tmp_path / "other")
    return tmp_path / "other"


def router(folder: Path, keys: Path) -> bus.Router:
    return bus.Router(f"ipc://{folder}/bus.sock", ANYWHERE, ServerKeys.load(keys))


def test_with_the_right_keys_messages_travel_both_ways_beside_those_of_the_host(tmp_path: Path, keys: Path) -> None:
    async def scenario() -> None:
        server = router(tmp_path, keys)
        far = bus.Dealer(server.address, "far", ClientKeys.load(keys))
        near = bus.Dealer(f"ipc://{tmp_path}/bus.sock", "near")
        for dealer in (far, near):
            dealer.send(UpdateBegun(epoch=1, version=5))
            peer, _ = await next_from(server, UpdateBegun)
            server.send(peer, Rehello(epoch=2))
            assert (await next_of(dealer, Rehello)).epoch == 2
            dealer.close()
        server.close()

    play(scenario())


def unauthorised(keys: Path, other: Path) -> ClientKeys:
    """Knows the server, which does not know it."""
    return replace(ClientKeys.load(other), server=ClientKeys.load(keys).server)


def wrong_server(keys: Path, other: Path) -> ClientKeys:
    """Is known to the server, and takes another one for it."""
    return replace(ClientKeys.load(keys), server=ClientKeys.load(other).server)


def not_its_own(keys: Path, other: Path) -> ClientKeys:
    """Says that it is one whose secret it does not have."""
    return replace(ClientKeys.load(keys), secret=ClientKeys.load(other).secret)


async def only_the_right_one_is_heard(server: bus.Router, keys: Path) -> None:
    """Nothing comes of who was there before it."""
    assert await heard_for(server, SILENT_S) == []
    friend = bus.Dealer(server.address, "friend", ClientKeys.load(keys))
    friend.send(Heartbeat(epoch=1, sent=1.0))
    peer, message = await asyncio.wait_for(server.receive(), 10.0)
    assert (peer, type(message)) == (b"friend", Heartbeat)
    friend.close()


@pytest.mark.parametrize("keys_of", [unauthorised, wrong_server, not_its_own])
def test_wrong_keys_are_not_heard(
    tmp_path: Path, keys: Path, other: Path, keys_of: Callable[[Path, Path], ClientKeys]
) -> None:
    async def scenario() -> None:
        server = router(tmp_path, keys)
        stranger = bus.Dealer(server.address, "stranger", keys_of(keys, other))
        stranger.send(UpdateBegun(epoch=1, version=1))
        await only_the_right_one_is_heard(server, keys)
        stranger.close(0)
        server.close()

    play(scenario())


ZMTP_WITH_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
"""ZeroMQ's own greeting, with the mechanism that asks for no keys."""


@pytest.mark.parametrize("greeting", [b"", ZMTP_WITH_NULL, b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_curve_is_not_heard(tmp_path: Path, keys: Path, greeting: bytes) -> None:
    async def scenario() -> None:
        server = router(tmp_path, keys)
        context = zmq.asyncio.Context()
        plain = context.socket(zmq.DEALER)
        plain.setsockopt(zmq.IDENTITY, b"plain")
        plain.connect(server.address)
        plain.send(bus.encode(UpdateBegun(epoch=1, version=1)))
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        _, raw = await asyncio.open_connection(host, int(port))
        raw.write(greeting)
        await only_the_right_one_is_heard(server, keys)
        raw.close()
        plain.close(linger=0)
        context.term()
        server.close()

    play(scenario())


def test_a_key_that_is_taken_out_of_the_folder_is_shut_out(tmp_path: Path, keys: Path, other: Path) -> None:
    (other / "client.key").rename(keys / AUTHORISED / "other.key")
    (keys / AUTHORISED / "client.key").unlink()

    async def scenario() -> None:
        server = router(tmp_path, keys)
        former = bus.Dealer(server.address, "former", ClientKeys.load(keys))
        former.send(UpdateBegun(epoch=1, version=1))
        assert await heard_for(server, SILENT_S) == []
        present = bus.Dealer(server.address, "present", unauthorised(keys, other))
        present.send(UpdateBegun(epoch=1, version=2))
        peer, message = await next_from(server, UpdateBegun)
        assert (peer, message.version) == (b"present", 2)
        former.close(0)
        present.close()
        server.close()

    play(scenario())


def test_there_is_no_tcp_without_keys(tmp_path: Path, keys: Path) -> None:
    for make in (
        lambda: bus.Router("tcp://127.0.0.1:*"),
        lambda: bus.Router(f"ipc://{tmp_path}/bus.sock", ANYWHERE),
        lambda: bus.Router("inproc://bus", "", ServerKeys.load(keys)),
        lambda: bus.Dealer("tcp://127.0.0.1:5710", "far"),
    ):
        with pytest.raises(CurveError, match=r"CURVE alone.*quartet keys"):
            make()
    assert not (tmp_path / "bus.sock").exists()


def test_an_address_that_is_taken_is_an_error_and_leaves_nothing(tmp_path: Path, keys: Path) -> None:
    async def scenario() -> None:
        first = router(tmp_path, keys)
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            bus.Router(f"ipc://{tmp_path}/second.sock", first.address, ServerKeys.load(keys))
        first.close()

    play(scenario())


def test_the_socket_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        server = bus.Router(f"ipc://{tmp_path}/bus.sock")
        assert os.umask(0) == 0, "the umask is as it was"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "bus.sock").stat().st_mode) == 0o600
    server.close()
