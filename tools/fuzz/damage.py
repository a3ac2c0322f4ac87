"""Damage to a file: bytes changed at a place, or the file cut or grown; and undone again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Change = Callable[[bytes], bytes]
CHANGES: dict[str, Change] = {
    "bit 0": lambda old: bytes([old[0] ^ 1]) + old[1:],
    "bit 7": lambda old: bytes([old[0] ^ 0x80]) + old[1:],
    "zeroed": lambda old: bytes(len(old)),
    "ones": lambda old: b"\xff" * len(old),
    "noise": lambda old: bytes((37 * place + byte + 101) % 256 for place, byte in enumerate(old)),
}
"""What becomes of a few bytes."""
WIDTH = 8
"""Bytes that "zeroed", "ones" and "noise" change: a number, or more than one."""


@dataclass(frozen=True)
class Damage:
    """One case. ``region`` names what is hit; ``size`` is set where the file's end is moved."""

    region: str
    offset: int
    change: str
    size: int = -1

    @property
    def name(self) -> str:
        if self.size >= 0:
            return f"{self.region}: the file has {self.size} bytes"
        return f"{self.region}: byte {self.offset}, {self.change}"


def damages(regions: Sequence[tuple[str, range]], sizes: Sequence[int]) -> list[Damage]:
    """Every change at every given place of every region, and every size."""
    changed = [Damage(name, at, change) for name, places in regions for at in places for change in CHANGES]
    return [*changed, *(Damage("end", size, "resized", size) for size in sizes)]


class Damaged:
    """A file that is damaged and made whole again. Its holes stay holes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR)
        self.size = os.fstat(self.fd).st_size
        self.segments = _segments(self.fd, self.size)

    def damage(self, case: Damage) -> bool:
        """Whether this changed anything."""
        if case.size >= 0:
            os.ftruncate(self.fd, case.size)
            return case.size != self.size
        width = 1 if case.change.startswith("bit") else min(WIDTH, self.size - case.offset)
        old = os.pread(self.fd, width, case.offset)
        new = CHANGES[case.change](old)
        os.pwrite(self.fd, new, case.offset)
        return new != old

    def restore(self) -> None:
        os.ftruncate(self.fd, self.size)
        for offset, data in self.segments:
            os.pwrite(self.fd, data, offset)

    def close(self) -> None:
        os.close(self.fd)


def _segments(fd: int, size: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # nothing but holes up to the end
            break
        at = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, os.pread(fd, at - start, start)))
    return found
