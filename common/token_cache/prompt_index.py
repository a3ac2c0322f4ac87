"""Prompts by content, read without a lock from any process while the creator puts and evicts.

Entries hang in hash chains. Two counters make reads safe without a lock, both odd while the writer is at work: the
entry's sequence number (its key, length and ids) and the index version (the chains). A reader that saw the first change
discards what it read; a reader that found nothing while the second changed looks again. The counters are separate
aligned 8 byte stores; x86-64 keeps their order, and elsewhere the interpreter's work between them is far longer than a
store may be delayed past another.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.token_cache.header import INDEX_VERSION
from common.token_cache.layout import Layout

Ids = npt.NDArray[np.int32]

_LOOKS = 64
"""Times that a reader looks again while chains change; then it is a miss."""


class PromptIndex:
    """A reader's sight of the prompt table. Every returned array is a read-only view, or a copy where asked for."""

    def __init__(self, mapping: mmap.mmap, readable: mmap.mmap, layout: Layout, path: Path) -> None:
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
        self.views: Ids = np.ndarray(shape, np.int32, readable, layout.prompt_ids)

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
        link, most = self.heads[self.bucket(key)], self.views.shape[1]
        # A chain that changes underfoot may lead anywhere, even in a circle: no walk is longer than the table.
        for _ in range(len(sequences)):
            if not 0 < link <= len(sequences):
                return None
            entry = link - 1
            link = self.nexts[entry]
            sequence = sequences[entry]
            at = base + 16 * entry
            if sequence & 1 or mapping[at : at + 16] != key:
                continue
            length = self.lengths[entry]
            if not 0 < length <= most:
                return None
            ids = self.views[entry, :length]
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
        del self.views, self.mapping
