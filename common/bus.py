"""The star of ZeroMQ sockets: one ROUTER at the coordinator, one DEALER at each replica, msgspec messages on both.

Nothing is pickled. A message that cannot be decoded is a ``BadMessage``, never an exception in a loop. On one host the
bus is a Unix socket of mode 0600; over tcp it is CURVE with authorised keys, or nothing.

A peer is known by the identity that its DEALER chose, a random UUID 4 that nobody else is ever told: who connects under
it takes its place (ROUTER_HANDOVER), which a replica must be able to after its connection broke, and a stranger is not.
"""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from common import curve
from common.messages import Message, ToCoordinator, ToReplica

LINGER_MS = 1000
LARGEST_TO_COORDINATOR = 64 << 20
"""Bytes of a frame. The largest that replicas send are manifests and receipts, some 200 bytes a tensor; whoever sends a
larger frame loses its connection before it has been read."""
LARGEST_TO_REPLICA = 1 << 30
"""Leases carry prompts and ground truths."""
WAITING_MESSAGES = 10_000
"""Messages of one peer that the coordinator has not looked at, after which no more are read from its connection."""
HANDSHAKE_MS = 5000
_encoder = msgspec.msgpack.Encoder()
_to_coordinator: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
_to_replica: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)


class PeerGone(Exception):
    """The addressed replica is not connected (EHOSTUNREACH)."""


class MessageTooLarge(Exception):
    """A message that the other side would not take; the connection would be lost with it."""


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
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is one of the first
        return BadMessage(str(error), len(frame))


def decode_to_replica(frame: bytes) -> ToReplica | BadMessage:
    try:
        return _to_replica.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        return BadMessage(str(error), len(frame))


def _encoded(message: Message, most: int) -> bytes:
    frame = encode(message)
    if len(frame) > most:
        kind = type(message).__name__
        raise MessageTooLarge(f"a {kind} of {len(frame)} bytes, expected at most {most}: the other side would drop it")
    return frame


def _send(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Hands frames to ZeroMQ, which queues without limit (no high-water mark); errors are raised here."""
    sent = cast("asyncio.Future[Any]", socket.send_multipart(frames, copy=True))
    error = sent.exception() if sent.done() else None
    if error is not None:
        raise error


class Router:
    """The coordinator's end. Peers are named by the identity that their DEALER chose.

    ``listen`` is a tcp address to be reached at too, such as ``tcp://*:5710``; it takes ``keys``, else CurveError.
    """

    def __init__(self, endpoint: str, listen: str = "", keys: curve.ServerKeys | None = None) -> None:
        for address in (endpoint, listen):
            _require_keys(address, keys)
        self._context = zmq.asyncio.Context()
        self._doorkeeper: curve.Doorkeeper | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_TO_COORDINATOR)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        try:
            for address in filter(None, (endpoint, listen)):  # a bind takes the options that are set by then
                self._bind(address, keys)
        except BaseException:
            self.close()
            raise

    def _bind(self, address: str, keys: curve.ServerKeys | None) -> None:
        if keys is not None and _is_tcp(address):
            if self._doorkeeper is None:
                self._doorkeeper = curve.Doorkeeper(self._context, keys.authorised)
            curve.serve(self._socket, keys)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        before = os.umask(0o177)  # the socket's file is its owner's from the moment that it is there
        try:
            self._socket.bind(address)
        finally:
            os.umask(before)

    @property
    def address(self) -> str:
        """The last address that was bound, with the port that ``tcp://…:*`` was given."""
        return cast("bytes", self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    async def receive(self) -> tuple[bytes, ToCoordinator | BadMessage]:
        frames: list[bytes] = await self._socket.recv_multipart()
        if len(frames) != 2:
            return frames[0], BadMessage(f"expected 1 frame, found {len(frames) - 1}", sum(map(len, frames[1:])))
        return frames[0], decode_to_coordinator(frames[1])

    def send(self, peer: bytes, message: Message) -> None:
        """Raises PeerGone where the peer is not connected, MessageTooLarge for what it would not take."""
        try:
            _send(self._socket, [peer, _encoded(message, LARGEST_TO_REPLICA)])
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, zmq.EHOSTUNREACH):
                raise PeerGone(peer.decode(errors="replace")) from error
            raise

    def close(self) -> None:
        self._socket.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()


class Dealer:
    """A replica's end. Reconnects by itself when the coordinator comes back.

    An endpoint over tcp takes ``keys``, else CurveError.
    """

    def __init__(self, endpoint: str, identity: str, keys: curve.ClientKeys | None = None) -> None:
        _require_keys(endpoint, keys)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_TO_REPLICA)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None and _is_tcp(endpoint):
            curve.identify(self._socket, keys)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.connect(endpoint)

    async def receive(self) -> ToReplica | BadMessage:
        frames: list[bytes] = await self._socket.recv_multipart()
        if len(frames) != 1:
            return BadMessage(f"expected 1 frame, found {len(frames)}", sum(map(len, frames)))
        return decode_to_replica(frames[0])

    def send(self, message: Message) -> None:
        """Raises MessageTooLarge for what the coordinator would not take."""
        _send(self._socket, [_encoded(message, LARGEST_TO_COORDINATOR)])

    def close(self, unsent_ms: int = LINGER_MS) -> None:
        """Closes the connection; what is not sent by now has so many milliseconds to be."""
        self._socket.close(linger=unsent_ms)
        self._context.term()


def _is_tcp(address: str) -> bool:
    return address.startswith("tcp:")


def _require_keys(address: str, keys: object | None) -> None:
    """Nothing but a Unix socket is without keys."""
    if address and not address.startswith("ipc:") and not (_is_tcp(address) and keys is not None):
        raise curve.CurveError(
            f"{address}: the bus leaves its host over tcp with CURVE alone: make keys by `quartet keys`, and give them"
        )
