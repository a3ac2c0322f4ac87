"""Prompts by content: lock-free reads from any process, and the one writer's store with its eviction.

Entries hang in hash chains. Two counters make reads safe without a lock, both odd while the writer is at work: the
entry's sequence number (its key, length and ids) and the index version (the chains). A reader that saw the first change
discards what it read; a reader that found nothing while the second changed looks again. The counters are separate
aligned 8 byte stores; x86-64 keeps their order, and elsewhere the interpreter's work between them is far longer than a
store may be delayed past another.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.token_cache.header import INDEX_VERSION
from common.token_cache.layout import CacheError, Layout

Ids = npt.NDArray[np.int32]

_LOOKS = 64
"""Times that a reader looks again while chains change; then it is a miss."""


class PromptIndex:
    """A reader's sight of the prompt table. Every returned array is a read-only view, or a copy where asked for."""

    def __init__(self, mapping: mmap.mmap, layout: Layout, path: Path) -> None:
        self.path = path
        self.layout = layout
        self.mapping = mapping
        n = layout.geometry.prompts
        memory = memoryview(mapping)
        self.version = memory[INDEX_VERSION : INDEX_VERSION + 8].cast("Q")
        self.sequences = memory[layout.sequences : layout.sequences + 8 * n].cast("Q")
        self.lengths = memory[layout.lengths : layout.lengths + 4 * n].cast("i")
        self.nexts = memory[layout.nexts : layout.nexts + 4 * n].cast("i")
        self.heads = memory[layout.heads : layout.heads + 4 * layout.buckets].cast("i")
        shape = (n, layout.geometry.max_prompt_tokens)
        self.ids: Ids = np.ndarray(shape, np.int32, mapping, layout.prompt_ids)
        self.views: Ids = self.ids.view()
        self.views.flags.writeable = False

    def find(self, key: bytes, copy: bool) -> Ids | None:
        """The ids under this key, int32[length], or None. Bounded time, whatever the writer does meanwhile."""
        version = self.version
        for _ in range(_LOOKS):
            seen = version[0]
            ids = self._walk(key, copy)
            if ids is not None:
                return ids
            if not seen & 1 and version[0] == seen:
                return None
        return None

    def _walk(self, key: bytes, copy: bool) -> Ids | None:
        sequences, mapping, base = self.sequences, self.mapping, self.layout.keys
        link = self.heads[self.bucket(key)]
        # A chain that changes underfoot may lead anywhere, even in a circle: no walk is longer than the table.
        for _ in range(len(sequences)):
            if not link:
                return None
            entry = link - 1
            link = self.nexts[entry]
            sequence = sequences[entry]
            at = base + 16 * entry
            if sequence & 1 or mapping[at : at + 16] != key:
                continue
            ids = self.views[entry, : self.lengths[entry]]
            if copy:
                ids = ids.copy()
            return ids if sequences[entry] == sequence else None
        return None

    def view(self, entry: int, length: int) -> Ids:
        """The ids of a pinned entry, int32[length]."""
        return self.views[entry, :length]

    def bucket(self, key: bytes) -> int:
        """The chain that this key hangs in."""
        return int.from_bytes(key[:8], "little") & (self.layout.buckets - 1)

    def close(self) -> None:
        """Lets go of the mapping; views that were handed out keep it alive."""
        for memory in (self.version, self.sequences, self.lengths, self.nexts, self.heads):
            memory.release()
        del self.ids, self.views, self.mapping


class PromptStore(PromptIndex):
    """The creator's side: puts, pins and evicts. Pinned entries are outside the queue from which eviction takes."""

    def __init__(self, mapping: mmap.mmap, layout: Layout, path: Path, fd: int) -> None:
        super().__init__(mapping, layout, path)
        n = layout.geometry.prompts
        memory = memoryview(mapping)
        self._fd = fd
        self._pins = memory[layout.pins : layout.pins + 4 * n].cast("i")
        self._ages = memory[layout.ages : layout.ages + 8 * n].cast("Q")
        self._checksums = memory[layout.checksums : layout.checksums + 4 * n].cast("I")
        self._entries: dict[bytes, int] = {}
        self._idle: OrderedDict[int, bytes] = OrderedDict()
        self._used = 0
        self._clock = 0

    def put(self, key: bytes, given: npt.ArrayLike) -> None:
        """Stores a prompt, or marks it as used where it is there already; ``CacheError`` as ``TokenCache.put_prompt``."""
        ids = self._checked(key, given)
        entry = self._entries.get(key)
        if entry is not None:
            if not np.array_equal(self.ids[entry, : self.lengths[entry]], ids):
                raise CacheError(
                    f"{self.path}: prompt {key.hex()} is stored with other token ids ({self.lengths[entry]} of them) "
                    f"than those given ({len(ids)}); the key must cover text, chat template and tokenizer"
                )
            self.touch(key)
            return
        entry = self._vacant()
        self.sequences[entry] += 1
        self.ids[entry, : len(ids)] = ids
        at = self.layout.keys + 16 * entry
        self.mapping[at : at + 16] = key
        self.lengths[entry] = len(ids)
        self._checksums[entry] = zlib.crc32(self.ids[entry, : len(ids)])
        self._pins[entry] = 0
        self.sequences[entry] += 1
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

    def recover(self, pinned: Iterable[int]) -> None:
        """Rebuilds chains, queue and pins after another creator died, from the entries that it finished."""
        n = self.layout.geometry.prompts
        # An odd sequence number is a put cut short; its entry becomes empty, which is sequence number 0.
        whole = [entry for entry in range(n) if self.sequences[entry] and not self.sequences[entry] & 1]
        self._used = max((entry + 1 for entry in range(n) if self.sequences[entry]), default=0)
        self.version[0] |= 1
        self.heads[:] = memoryview(bytes(4 * self.layout.buckets)).cast("i")
        self.version[0] += 1
        self._pins[:] = memoryview(bytes(4 * n)).cast("i")
        for entry in pinned:
            self._pins[entry] += 1
        unfinished = sorted(set(range(self._used)) - set(whole))
        for entry in unfinished:
            self.lengths[entry] = 0
        self._spare = unfinished
        for entry in sorted(whole, key=self._ages.__getitem__):
            key = self._key(entry)
            self._link(key, entry)
            self._entries[key] = entry
            if not self._pins[entry]:
                self._idle[entry] = key
            self._clock = self._ages[entry]
