"""Frames that are nearly messages: bytes changed, or the tree inside changed and encoded again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

ODD: tuple[Any, ...] = (
    -1, 0, 1, 2, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -1.0, 1e308, float("nan"),
    float("inf"), float("-inf"), "", "x" * 300, "policy", "../../etc/passwd", "/dev/shm/other", "\x00\n", b"",
    b"\xff" * 70, None, True, False, [], {}, [[]], {"type": "Ack"}, "stop", "stale", [1, 1], [2**31 - 1, 2**62],
    [-1, 0],
)  # fmt: skip
NESTING = b"\x91", b"\x81\xa4type", b"\x81\xa6result", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff"
"""Openings of lists and maps, of which a frame may have thousands, or that announce 2**32 entries."""
Mutation = Callable[[bytes], bytes]


class Mutator:
    """Makes frames from frames; the same seed makes the same."""

    def __init__(self, seed: str, frames: Sequence[bytes]) -> None:
        self.random = random.Random(seed)
        self.frames = frames
        self.mutations: tuple[tuple[str, Mutation], ...] = (
            ("flip", self.flip), ("set", self.set), ("cut", self.cut), ("insert", self.insert), ("repeat", self.repeat),
            ("splice", self.splice), ("tree", self.tree), ("tree", self.tree), ("tree", self.tree), ("deep", self.deep),
            ("noise", self.noise),
        )  # fmt: skip

    def frame(self) -> tuple[str, bytes]:
        """The mutation's name and what it made; one frame in four is changed twice."""
        random = self.random
        name, mutate = random.choice(self.mutations)
        made = mutate(random.choice(self.frames))
        if random.random() < 0.25:
            made = random.choice(self.mutations)[1](made)
        return name, made

    def flip(self, frame: bytes) -> bytes:
        changed = bytearray(frame or b"\x00")
        for _ in range(self.random.choice((1, 1, 1, 2, 8))):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def set(self, frame: bytes) -> bytes:
        changed = bytearray(frame or b"\x00")
        changed[self.random.randrange(len(changed))] = self.random.choice((0, 0x7F, 0x80, 0xC0, 0xC1, 0xDD, 0xDF, 0xFF))
        return bytes(changed)

    def cut(self, frame: bytes) -> bytes:
        return frame[: self.random.randrange(len(frame) + 1)]

    def insert(self, frame: bytes) -> bytes:
        place = self.random.randrange(len(frame) + 1)
        return frame[:place] + self.random.randbytes(self.random.choice((1, 2, 5, 40))) + frame[place:]

    def repeat(self, frame: bytes) -> bytes:
        start = self.random.randrange(len(frame) + 1)
        end = start + self.random.randrange(1, 30)
        return frame[:end] + frame[start:end] * self.random.choice((1, 2, 50)) + frame[end:]

    def splice(self, frame: bytes) -> bytes:
        other = self.random.choice(self.frames)
        return frame[: self.random.randrange(len(frame) + 1)] + other[self.random.randrange(len(other)) :]

    def noise(self, frame: bytes) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 2, 16, 200)))

    def deep(self, frame: bytes) -> bytes:
        opening = self.random.choice(NESTING)
        return frame[: self.random.randrange(len(frame) + 1)] + opening * self.random.choice((1, 10, 1000, 5000))

    def tree(self, frame: bytes) -> bytes:
        """Changes a value, a key or a length somewhere inside the message; types and limits are what it meets."""
        try:
            found = msgspec.msgpack.decode(frame)
            return msgspec.msgpack.encode(self._changed(found))
        except (msgspec.DecodeError, OverflowError, TypeError, RecursionError, UnicodeError):
            return self.flip(frame)  # no tree, or one that cannot be written again

    def _changed(self, value: Any) -> Any:
        random = self.random
        if isinstance(value, dict) and value:
            tree: dict[Any, Any] = dict(value)
            key = random.choice(list(tree))
            roll = random.random()
            if roll < 0.06:
                del tree[key]
            elif roll < 0.12:
                tree["surplus"] = 1
            else:
                tree[key] = self._changed(tree[key])
            return tree
        if isinstance(value, list) and value and random.random() < 0.8:
            items: list[Any] = list(value)
            if random.random() < 0.2:
                return items * random.choice((0, 2, 40))
            place = random.randrange(len(items))
            items[place] = self._changed(items[place])
            return items
        if isinstance(value, int) and not isinstance(value, bool) and random.random() < 0.5:
            return value + random.choice((-1, 1, 2, 1000))
        return random.choice(ODD)
