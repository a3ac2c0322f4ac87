"""Prompts by content, the creator's side: puts, pins and least-recently-used eviction."""

from __future__ import annotations

import mmap
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.token_cache.layout import CacheError, Layout
from common.token_cache.prompt_index import Ids, PromptIndex

_LATEST_AGE = 2**62
"""Ages only count up; one beyond this was never reached."""


class PromptStore(PromptIndex):
    """The creator's side: puts, pins and evicts. Pinned entries are outside the queue from which eviction takes."""

    def __init__(self, mapping: mmap.mmap, readable: mmap.mmap, layout: Layout, path: Path, fd: int) -> None:
        super().__init__(mapping, readable, layout, path)
        n = layout.geometry.prompts
        memory = memoryview(mapping)
        self._fd = fd
        shape = (n, layout.geometry.max_prompt_tokens)
        self._ids: Ids = np.ndarray(shape, np.int32, mapping, layout.prompt_ids)
        self._pins = memory[layout.pins : layout.pins + 4 * n].cast("i")
        self._ages = memory[layout.ages : layout.ages + 8 * n].cast("Q")
        self._checksums = memory[layout.checksums : layout.checksums + 4 * n].cast("I")
        self._entries: dict[bytes, int] = {}
        self._idle: OrderedDict[int, bytes] = OrderedDict()
        self._backed = 0
        self._spare: list[int] = []
        self._clock = 0

    def put(self, key: bytes, given: npt.ArrayLike) -> None:
        """Stores a prompt, or marks it as used where it is there; errors as ``TokenCache.put_prompt``."""
        ids = self._checked(key, given)
        entry = self._entries.get(key)
        if entry is not None:
            if not np.array_equal(self._ids[entry, : self.lengths[entry]], ids):
                raise CacheError(
                    f"{self.path}: prompt {key.hex()} is stored with other token ids ({self.lengths[entry]} of them) "
                    f"than those given ({len(ids)}); the key must cover text, chat template and tokenizer"
                )
            self.touch(key)
            return
        entry = self._vacant()
        self.sequences[entry] = _after(self.sequences[entry])
        self._ids[entry, : len(ids)] = ids
        at = self.layout.keys + 16 * entry
        self.mapping[at : at + 16] = key
        self.lengths[entry] = len(ids)
        self._checksums[entry] = zlib.crc32(self._ids[entry, : len(ids)].data)
        self._pins[entry] = 0
        self.sequences[entry] = _after(self.sequences[entry])
        self._link(key, entry)
        self._entries[key] = entry
        self._idle[entry] = key
        self._stamp(entry)

    def touch(self, key: bytes) -> None:
        """Marks a prompt as used just now."""
        entry = self._entries.get(key)
        if entry is not None:
            if entry in self._idle:
                self._idle.move_to_end(entry)
            self._stamp(entry)

    def pin(self, key: bytes) -> tuple[int, int]:
        """Keeps a prompt from eviction until ``unpin`` was called as often; returns its entry and its length."""
        entry = self._entries.get(key)
        if entry is None:
            raise CacheError(f"{self.path}: prompt {key.hex()} is not in the cache; put_prompt() it before allocate()")
        self._pins[entry] += 1
        self._idle.pop(entry, None)
        self._stamp(entry)
        return entry, self.lengths[entry]

    def unpin(self, entry: int) -> None:
        """Takes one pin away; the last one makes the entry the youngest candidate for eviction."""
        self._pins[entry] -= 1
        if self._pins[entry] == 0:
            self._idle[entry] = self._key(entry)
            self._stamp(entry)

    def recover(self, pinned: Iterable[tuple[int, int, int]]) -> None:
        """Rebuilds chains, queue and pins after another creator died, from the entries that it finished.

        ``pinned`` names slots, each with the entry and length of its prompt. ``CacheError`` where an entry is damaged.
        """
        n = self.layout.geometry.prompts
        self._backed = max((entry + 1 for entry in range(n) if self.sequences[entry]), default=0)
        # An odd sequence number is a put cut short: its entry holds nothing, which is length 0.
        for entry in range(self._backed):
            if self.sequences[entry] & 1:
                self.lengths[entry] = 0
                self.sequences[entry] = _after(self.sequences[entry])
        whole = [entry for entry in range(self._backed) if self.lengths[entry]]
        self._require_sound(whole)
        self.version[0] |= 1
        self.heads[:] = memoryview(bytes(4 * self.layout.buckets)).cast("i")
        self.version[0] = _after(self.version[0])
        self._pins[:] = memoryview(bytes(4 * n)).cast("i")
        for slot, entry, length in pinned:
            if self.lengths[entry] != length:
                raise self._damaged(entry, f"it has {self.lengths[entry]} tokens, slot {slot} is of one with {length}")
            self._pins[entry] += 1
        self._spare = [entry for entry in range(self._backed) if not self.lengths[entry]]
        for entry in sorted(whole, key=self._ages.__getitem__):
            key = self._key(entry)
            self._link(key, entry)
            self._entries[key] = entry
            if not self._pins[entry]:
                self._idle[entry] = key
            self._clock = min(self._ages[entry], _LATEST_AGE)

    def _require_sound(self, entries: Iterable[int]) -> None:
        """A prompt that is not what was put would be sampled from, and its response scored, as if it were."""
        keys: set[bytes] = set()
        most = self.layout.geometry.max_prompt_tokens
        for entry in entries:
            length, key = self.lengths[entry], self._key(entry)
            if not 0 < length <= most:
                raise self._damaged(entry, f"it has {length} tokens, expected 1 to {most}")
            if zlib.crc32(self._ids[entry, :length].data) != self._checksums[entry]:
                raise self._damaged(entry, "its token ids do not have its checksum")
            if key in keys:
                raise self._damaged(entry, "another entry has its key")
            keys.add(key)

    def _damaged(self, entry: int, what: str) -> CacheError:
        return CacheError(f"{self.path}: prompt entry {entry} is damaged: {what}; start the run again")

    def _checked(self, key: bytes, given: npt.ArrayLike) -> Ids:
        ids = np.asarray(given)
        most = self.layout.geometry.max_prompt_tokens
        where = f"{self.path}: prompt {key.hex()}"
        if len(key) != 16:
            raise CacheError(f"{where}: the key has {len(key)} bytes, expected 16; make it with prompt_key()")
        if ids.ndim != 1 or not len(ids):
            raise CacheError(f"{where}: token ids have shape {ids.shape}, expected [length] with at least one token")
        if len(ids) > most:
            raise CacheError(f"{where}: has {len(ids)} tokens, expected at most {most}; raise prompts.max_tokens")
        if ids.dtype != np.int32:
            if ids.dtype.kind not in "iu":
                raise CacheError(f"{where}: token ids are {ids.dtype}, expected integers")
            if int(ids.max()) > 2**31 - 1:
                raise CacheError(f"{where}: token id {int(ids.max())}, expected at most {2**31 - 1}")
        if int(ids.min()) < 0:
            raise CacheError(f"{where}: token id {int(ids.min())}, expected at least 0")
        return ids.astype(np.int32, copy=False)

    def _vacant(self) -> int:
        """An entry to write into: unfinished before, never used, or evicted."""
        if self._spare:
            return self._spare.pop()
        prompts = self.layout.geometry.prompts
        if self._backed < prompts:
            row = 4 * self.layout.geometry.max_prompt_tokens
            start = self.layout.prompt_ids + row * self._backed
            try:
                os.posix_fallocate(self._fd, start, row)
            except OSError as error:
                raise CacheError(
                    f"{self.path}: no memory for prompt entry {self._backed} ({row} bytes): {error.strerror}; free "
                    "space in /dev/shm, or lower cache.prompts or cache.slots"
                ) from error
            self._backed += 1
            return self._backed - 1
        if not self._idle:
            raise CacheError(
                f"{self.path}: all {prompts} prompt entries are held by slots; raise cache.prompts above the number of "
                "prompts that are in work at one time"
            )
        entry, key = self._idle.popitem(last=False)
        del self._entries[key]
        self._unlink(key, entry)
        return entry

    def _link(self, key: bytes, entry: int) -> None:
        bucket = self.bucket(key)
        self.version[0] = _after(self.version[0])
        self.nexts[entry] = self.heads[bucket]
        self.heads[bucket] = entry + 1
        self.version[0] = _after(self.version[0])

    def _unlink(self, key: bytes, entry: int) -> None:
        bucket = self.bucket(key)
        self.version[0] = _after(self.version[0])
        link = self.heads[bucket]
        if link == entry + 1:
            self.heads[bucket] = self.nexts[entry]
        else:
            while self.nexts[link - 1] != entry + 1:
                link = self.nexts[link - 1]
            self.nexts[link - 1] = self.nexts[entry]
        self.version[0] = _after(self.version[0])

    def _stamp(self, entry: int) -> None:
        self._clock += 1
        self._ages[entry] = self._clock

    def _key(self, entry: int) -> bytes:
        at = self.layout.keys + 16 * entry
        return self.mapping[at : at + 16]

    def close(self) -> None:
        """As for a reader."""
        for memory in (self._pins, self._ages, self._checksums):
            memory.release()
        del self._ids
        super().close()


def _after(counter: int) -> int:
    """The next value of a counter of 64 bits."""
    return (counter + 1) & 0xFFFF_FFFF_FFFF_FFFF
