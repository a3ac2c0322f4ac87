"""Where everything lies in the token cache's file.

::

    page 0            header: magic, layout version, geometry, run, tokenizer fingerprint, creator, digest
                      the prompt index's version, in the middle of the page
    slot table        one record a slot: generation, scalars; survives the give-back of the slot's pages
    prompt table      sequence numbers, keys, lengths, chains, pins, ages, checksums; one element a prompt entry
    prompt ids        int32[prompts, max_prompt_tokens]; pages are backed when an entry is first used
    slot bodies       one page-aligned range a slot with all its columns; pages are backed while the slot is leased
"""

from __future__ import annotations

import mmap
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np

PAGE = mmap.PAGESIZE
ALIGN = 64
"""Columns and tables start on cache lines."""

MAGIC = b"QTOKENS\x00"
LAYOUT_VERSION = 1

COLUMNS: dict[str, np.dtype[np.generic]] = {
    "response_ids": np.dtype(np.int32),
    "response_mask": np.dtype(np.uint8),
    "behaviour_logprobs": np.dtype(np.float32),
    "logprobs": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
    "values": np.dtype(np.float32),
    "rewards": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "returns": np.dtype(np.float32),
    "bootstrap_value": np.dtype(np.float32),
}
"""Columns of a slot, each with ``max_response_tokens`` entries; ``bootstrap_value`` has one."""

COORDINATOR_WRITES = frozenset({"rewards", "advantages", "returns"})
"""Columns that the coordinator writes."""

SLOT_RECORD = np.dtype(
    [
        ("generation", np.int64),
        ("sample", np.int64),
        ("step", np.int64),
        ("version_low", np.int64),
        ("version_high", np.int64),
        ("reward", np.float64),
        ("prompt", np.int32),
        ("prompt_length", np.int32),
        ("response_length", np.int32),
        ("state", np.int32),
        ("finish_reason", np.uint8),
        ("quarantined", np.uint8),
    ],
    align=True,
)
"""One slot. An odd generation means leased, an even one free, so a reference to a freed slot is stale at once."""

FINISH_REASONS: Final = ("", "stop", "length")
"""``finish_reason`` is stored as the index into this tuple; empty: not finished."""


class CacheError(Exception):
    """The token cache was refused, is full, or was used wrongly. Names path, slot or field, and what to do."""


class Geometry(msgspec.Struct, frozen=True):
    """Size of a token cache. All numbers are at least 1.

    ``slots``: samples at one time. ``max_prompt_tokens``: tokens of the longest prompt. ``max_response_tokens``: tokens
    of the longest response. ``prompts``: entries of the prompt table.
    """

    slots: int
    max_prompt_tokens: int
    max_response_tokens: int
    prompts: int


class Layout(msgspec.Struct, frozen=True):
    """Byte offsets of every region, all derived from the geometry."""

    geometry: Geometry
    buckets: int
    """Hash chains of the prompt index, a power of two."""
    slot_table: int
    sequences: int
    keys: int
    lengths: int
    nexts: int
    heads: int
    pins: int
    ages: int
    checksums: int
    fixed_end: int
    """End of what is backed by memory from the start."""
    prompt_ids: int
    bodies: int
    stride: int
    """Bytes of one slot's body, a whole number of pages."""
    columns: dict[str, int]
    """Offset of each column within a slot's body."""
    file_size: int

    @classmethod
    def of(cls, geometry: Geometry) -> Layout:
        """Lays out a cache of this geometry; ``CacheError`` where a number is below 1."""
        for name in Geometry.__struct_fields__:
            if getattr(geometry, name) < 1:
                raise CacheError(f"token cache geometry: {name} is {getattr(geometry, name)}; expected at least 1")
        n = geometry.prompts
        buckets = 1 << (2 * n - 1).bit_length()
        sizes = {
            "slot_table": geometry.slots * SLOT_RECORD.itemsize,
            "sequences": n * 8,
            "keys": n * 16,
            "lengths": n * 4,
            "nexts": n * 4,
            "heads": buckets * 4,
            "pins": n * 4,
            "ages": n * 8,
            "checksums": n * 4,
        }
        offsets: dict[str, int] = {}
        end = PAGE
        for name, size in sizes.items():
            offsets[name] = end
            end = _up(end + size, ALIGN)
        fixed_end = _up(end, PAGE)
        bodies = _up(fixed_end + n * geometry.max_prompt_tokens * 4, PAGE)
        columns: dict[str, int] = {}
        body = 0
        for name, dtype in COLUMNS.items():
            columns[name] = body
            body = _up(body + width(name, geometry) * dtype.itemsize, ALIGN)
        stride = _up(body, PAGE)
        return cls(
            geometry=geometry,
            buckets=buckets,
            **offsets,
            fixed_end=fixed_end,
            prompt_ids=fixed_end,
            bodies=bodies,
            stride=stride,
            columns=columns,
            file_size=bodies + geometry.slots * stride,
        )


def width(column: str, geometry: Geometry) -> int:
    """Entries of a column in one slot."""
    return 1 if column == "bootstrap_value" else geometry.max_response_tokens


def prompt_key(text: str, template: str, fingerprint: str) -> bytes:
    """16 byte digest of a prompt: its text, the chat template it goes through and the tokenizer's fingerprint.

    Each part is hashed with its length, so that moving a character from one part to the next gives another key.
    """
    digest = blake2b(digest_size=16)
    for part in (text, template, fingerprint):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
