"""The star of ZeroMQ sockets: one ROUTER at the coordinator, one DEALER at each replica, msgspec messages on both.

Nothing is pickled. A message that cannot be decoded is a ``BadMessage``, never an exception in a loop.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from common.messages import Message, ToCoordinator, ToReplica

LINGER_MS = 1000
_encoder = msgspec.msgpack.Encoder()
_to_coordinator: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
_to_replica: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)


class PeerGone(Exception):
    """The addressed replica is not connected (EHOSTUNREACH)."""


@dataclass(frozen=True)
class BadMessage:
    """What arrived was not a message of this protocol; ``reason`` names the field."""

    reason: str
    size: int


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_coordinator(frame: bytes) -> ToCoordinator | BadMessage:
    try:
        return _to_coordinator.decode(frame)
    except msgspec.DecodeError as error:  # ValidationError is one of them
        return BadMessage(str(error), len(frame))


def decode_to_replica(frame: bytes) -> ToReplica | BadMessage:
    try:
        return _to_replica.decode(frame)
    except msgspec.DecodeError as error:
        return BadMessage(str(error), len(frame))


def _send(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Hands frames to ZeroMQ, which queues without limit (no high-water mark); errors are raised here."""
    sent = cast("asyncio.Future[Any]", socket.send_multipart(frames, copy=True))
    error = sent.exception() if sent.done() else None
    if error is not None:
        raise error


class Router:
    """The coordinator's end. Peers are named by the identity that their DEALER chose."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint)

    async def receive(self) -> tuple[bytes, ToCoordinator | BadMessage]:
        frames: list[bytes] = await self._socket.recv_multipart()
        if len(frames) != 2:
            return frames[0], BadMessage(f"expected 1 frame, found {len(frames) - 1}", sum(map(len, frames[1:])))
        return frames[0], decode_to_coordinator(frames[1])

    def send(self, peer: bytes, message: Message) -> None:
        """Raises PeerGone where the peer is not connected."""
        try:
            _send(self._socket, [peer, encode(message)])
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, zmq.EHOSTUNREACH):
                raise PeerGone(peer.decode(errors="replace")) from error
            raise

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Dealer:
    """A replica's end. Reconnects by itself when the coordinator comes back."""

    def __init__(self, endpoint: str, identity: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint)

    async def receive(self) -> ToReplica | BadMessage:
        frames: list[bytes] = await self._socket.recv_multipart()
        if len(frames) != 1:
            return BadMessage(f"expected 1 frame, found {len(frames)}", sum(map(len, frames)))
        return decode_to_replica(frames[0])

    def send(self, message: Message) -> None:
        _send(self._socket, [encode(message)])

    def close(self, unsent_ms: int = LINGER_MS) -> None:
        """Closes the connection; what is not sent by now has so many milliseconds to be."""
        self._socket.close(linger=unsent_ms)
        self._context.term()
