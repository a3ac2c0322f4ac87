"""The first page of the token cache's file: what it is, whose it is, and how large."""

from __future__ import annotations

import os
import struct
from hashlib import blake2b
from pathlib import Path

import msgspec

from common.token_cache.layout import LAYOUT_VERSION, MAGIC, PAGE, CacheError, Geometry, Layout

_HEADER = struct.Struct("<8sQ5Q64s128s3Q")
_DIGEST_BYTES = 16
HEADER_BYTES = _HEADER.size + _DIGEST_BYTES

INDEX_VERSION = PAGE // 2
"""Offset of the prompt index's version, a uint64 that is odd while chains are being changed."""


class Creator(msgspec.Struct, frozen=True):
    """The process that may change prompts, slots and scalars.

    ``start`` is its start in clock ticks since boot, so that a reused pid is not taken for it; ``namespace`` is the
    inode of its pid namespace: from another one (another container) the pid says nothing.
    """

    pid: int
    start: int
    namespace: int

    @classmethod
    def current(cls) -> Creator:
        """This process."""
        return cls(os.getpid(), _start_of(os.getpid()), Path("/proc/self/ns/pid").stat().st_ino)

    def dead(self) -> bool:
        """Whether it is known to be gone; False where that cannot be seen from here."""
        if self.namespace != Path("/proc/self/ns/pid").stat().st_ino:
            return False
        return _start_of(self.pid) != self.start


class Header(msgspec.Struct, frozen=True):
    """Everything that attaching compares."""

    geometry: Geometry
    file_size: int
    run: str
    fingerprint: str
    creator: Creator

    def pack(self, path: Path) -> bytes:
        """The bytes at the start of the file; ``CacheError`` where run or fingerprint are too long."""
        run = _field(path, "run", self.run, 64)
        fingerprint = _field(path, "tokenizer fingerprint", self.fingerprint, 128)
        g, c = self.geometry, self.creator
        numbers = (g.slots, g.max_prompt_tokens, g.max_response_tokens, g.prompts, self.file_size)
        body = _HEADER.pack(MAGIC, LAYOUT_VERSION, *numbers, run, fingerprint, c.pid, c.start, c.namespace)
        return body + _digest(body)


def read_header(path: Path, fd: int) -> Header:
    """Reads and verifies magic, layout version, digest, geometry and file size; ``CacheError`` names what is wrong."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, HEADER_BYTES, 0)
    if data[: len(MAGIC)] != MAGIC:
        raise CacheError(
            f"{path}: not a token cache: magic is {data[: len(MAGIC)]!r}, expected {MAGIC!r}; "
            "remove the file with 'quartet clean' and start the run again"
        )
    if len(data) < HEADER_BYTES:
        raise CacheError(
            f"{path}: the file was truncated to {size} bytes, expected a header of {HEADER_BYTES}; remove it with "
            "'quartet clean' and start the run again"
        )
    version = int.from_bytes(data[8:16], "little")
    if version != LAYOUT_VERSION:
        raise CacheError(
            f"{path}: layout version {version}, expected {LAYOUT_VERSION}; the coordinator runs another version of "
            "quartet: install the same one everywhere and start the run again"
        )
    body, digest = data[: _HEADER.size], data[_HEADER.size :]
    if digest != _digest(body):
        raise CacheError(f"{path}: the header is damaged: digest {digest.hex()}, expected {_digest(body).hex()}")
    _, _, slots, prompt, response, prompts, file_size, run, fingerprint, pid, start, namespace = _HEADER.unpack(body)
    geometry = Geometry(slots, prompt, response, prompts)
    expected = Layout.of(geometry).file_size
    if not file_size == expected == size:
        raise CacheError(
            f"{path}: the file has {size} bytes, expected {expected} for {geometry} (its header says {file_size}); "
            "it was truncated or grown: remove it with 'quartet clean' and start the run again"
        )
    creator = Creator(pid, start, namespace)
    return Header(geometry, file_size, _text(run), _text(fingerprint), creator)


def verify_header(path: Path, header: Header, run: str, fingerprint: str) -> None:
    """Refuses a cache of another run or another tokenizer."""
    if header.run != run:
        raise CacheError(
            f"{path}: belongs to run {header.run!r}, expected {run!r}; give the cache path of your own run"
        )
    if header.fingerprint != fingerprint:
        raise CacheError(
            f"{path}: tokenizer fingerprint {header.fingerprint!r}, expected {fingerprint!r}; this process loaded "
            "another tokenizer than the coordinator: use the same model.path everywhere"
        )


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _field(path: Path, name: str, text: str, size: int) -> bytes:
    data = text.encode()
    if not data or len(data) > size or b"\0" in data:
        raise CacheError(f"{path}: {name} {text!r} has {len(data)} bytes; expected 1 to {size} without a zero byte")
    return data


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode()


def _start_of(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 where there is none or only its zombie is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
