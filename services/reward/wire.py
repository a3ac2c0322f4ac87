"""What the reward service and its child process say to each other: frames of msgpack over a socket pair.

    service -> Setup | Score                    child -> Loaded | NotLoaded, then Began* Scored for each Score

A frame is its length, four bytes big-endian, and that many bytes of one message.
"""

from __future__ import annotations

import socket

import msgspec
from msgspec import Struct

from services.reward.scorers.interface import Batch, SampleScores

LENGTH_BYTES = 4
CHUNK_BYTES = 1 << 16
OptionValue = int | float | str | bool


class Part(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of the messages."""


class FunctionSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A scorer: its config key, a built-in name or ``/path/to/file.py:function``, and its keyword arguments."""

    key: str
    name: str
    options: dict[str, OptionValue]


class Setup(Part, frozen=True):
    functions: list[FunctionSpec]


class Score(Part, frozen=True):
    batch: Batch
    limit_s: float
    """Seconds after which the service kills the child."""


class Loaded(Part, frozen=True):
    pass


class NotLoaded(Part, frozen=True):
    reason: str


class Began(Part, frozen=True):
    """The child now calls this function: names the culprit if nothing more is heard of it."""

    function: str


class Scored(Part, frozen=True):
    samples: list[SampleScores]


ToChild = Setup | Score
FromChild = Loaded | NotLoaded | Began | Scored

_encoder = msgspec.msgpack.Encoder()
to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


def frame(message: ToChild | FromChild) -> bytes:
    """The message as it goes over the socket."""
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class FrameReader:
    """Cuts what arrives at a socket into frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def fill(self) -> bool:
        """Reads what is there, at least a byte; False at the end of the stream."""
        try:
            data = self._sock.recv(CHUNK_BYTES)
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)

    def take(self) -> bytes | None:
        """The next whole frame, if it has arrived."""
        end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if len(self._buffer) < max(end, LENGTH_BYTES):
            return None
        data = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return data
