"""The token cache: one file in shared memory that holds every prompt's and every response's tokens and numbers.

The coordinator creates it and is the only one that puts prompts, leases slots and sets scalars. Every other process
attaches, reads all, and writes those columns that it is the sole writer of. Nothing here waits, and nothing is copied
unless it says so.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import numpy as np
import numpy.typing as npt

from common.messages import SlotRef
from common.token_cache.check import problems
from common.token_cache.columns import Column, Columns, require_known
from common.token_cache.files import create_file, open_file, take_over
from common.token_cache.header import Creator
from common.token_cache.layout import COORDINATOR_WRITES, CacheError, Geometry, Layout
from common.token_cache.prompt_index import Ids, PromptIndex
from common.token_cache.prompt_store import PromptStore
from common.token_cache.slots import SampleScalars, ScalarFields, SlotStore, SlotTable


class TokenCache:
    """One process' mapping of the cache. Make it with ``create``, ``attach`` or ``adopt``; close it when done.

    ``hits`` and ``misses`` count this process' own prompt reads. Methods marked *creator only* raise ``CacheError`` in
    every other process, a forked child included.
    """

    def __init__(self, path: Path, fd: int, geometry: Geometry, writes: frozenset[str], creator: bool) -> None:
        self.path = path
        self.geometry = geometry
        self.hits = 0
        self.misses = 0
        self._fd = fd
        self._writes = writes
        self._layout = layout = Layout.of(geometry)
        # Views come from a mapping without write permission unless this process may write them: no flag undoes that.
        readable = mmap.mmap(fd, layout.file_size, mmap.MAP_SHARED, mmap.PROT_READ)
        writable = mmap.mmap(fd, layout.file_size) if writes or creator else readable
        self._creator_pid = os.getpid() if creator else 0
        self._prompts = PromptIndex(readable, readable, layout, path)
        self._slots = SlotTable(readable, layout, path)
        if creator:
            self._prompts = PromptStore(writable, readable, layout, path, fd)
            self._slots = SlotStore(writable, layout, path, fd)
        self._columns = Columns(readable, writable, layout, path, writes)

    # ---------------------------------------------------------------- opening and closing

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        run: str,
        fingerprint: str,
        geometry: Geometry,
        writes: frozenset[str] = COORDINATOR_WRITES,
    ) -> TokenCache:
        """Creates the file, complete or not at all, and becomes its creator.

        ``CacheError`` where the file exists or the geometry would not fit into the file system's free space.
        """
        require_known(path, writes)
        fd = create_file(path, run, fingerprint, geometry)
        return cls(path, fd, geometry, writes, True)

    @classmethod
    def attach(cls, path: Path, *, run: str, fingerprint: str, writes: frozenset[str] = frozenset()) -> TokenCache:
        """Maps an existing cache; columns outside ``writes`` are read-only.

        ``CacheError`` where magic, layout version, size, geometry, run or tokenizer fingerprint are not those expected,
        or the creator is known to be dead.
        """
        require_known(path, writes)
        fd, header = open_file(path, run, fingerprint, write=bool(writes))
        if header.creator.dead():
            os.close(fd)
            raise CacheError(
                f"{path}: its coordinator, process {header.creator.pid}, is dead; start the run again, or remove what "
                "it left with 'quartet clean'"
            )
        return cls(path, fd, header.geometry, writes, False)

    @classmethod
    def adopt(
        cls, path: Path, *, run: str, fingerprint: str, writes: frozenset[str] = COORDINATOR_WRITES
    ) -> TokenCache:
        """Becomes the creator in place of one that is dead: a coordinator that starts again.

        Leased slots stay leased (``leased``, ``in_quarantine``) with their prompts pinned; whatever was being put or
        freed at the death is completed or undone. ``CacheError`` as for ``attach``, where the creator lives, and for
        damage.
        """
        require_known(path, writes)
        fd, header = open_file(path, run, fingerprint, write=True)
        if not header.creator.dead() and header.creator != Creator.current():
            os.close(fd)
            raise CacheError(
                f"{path}: its coordinator, process {header.creator.pid}, is alive; a run has one coordinator: stop "
                "that one first"
            )
        take_over(path, fd, header)
        cache = cls(path, fd, header.geometry, writes, True)
        try:
            cache._prompt_store("adopt").recover(cache._slot_store("adopt").recover())
        except BaseException:
            cache.close()
            raise
        return cache

    def close(self) -> None:
        """Lets go of the file, which stays where it is. Views handed out stay valid. Closing twice does no harm."""
        if self._fd < 0:
            return
        self._prompts.close()
        self._slots.close()
        self._columns.close()
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- prompts

    def put_prompt(self, key: bytes, ids: npt.ArrayLike) -> None:
        """Creator only. Stores a prompt's token ids, int[length], evicting the least recently used unpinned one.

        A key that is there already only counts as used. ``CacheError`` where it has other ids than before, no or too
        many tokens, a negative id, or where every entry is pinned.
        """
        self._prompt_store("put a prompt").put(key, ids)

    def get_prompt(self, key: bytes, *, copy: bool = False) -> Ids | None:
        """A prompt's token ids, int32[length], or None; counts a hit or a miss. Without a lock, from any process.

        The view is whole and right when it is returned. It stays so while the prompt is pinned by a slot; an unpinned
        prompt may be evicted later and its memory get another prompt's ids, so whoever keeps one asks for a ``copy``.
        """
        ids = self._index().find(key, copy)
        if ids is None:
            self.misses += 1
            return None
        self.hits += 1
        if isinstance(self._prompts, PromptStore):
            self._prompts.touch(key)
        return ids

    def prompt_ids(self, ref: SlotRef) -> Ids:
        """Read-only view of a slot's prompt, int32[prompt_length]; counts a hit. Valid while the slot is leased."""
        entry, length = self._table().prompt(ref)
        self.hits += 1
        return self._index().view(entry, length)

    # ---------------------------------------------------------------- slots

    def allocate(self, key: bytes) -> SlotRef:
        """Creator only. Leases a slot for a sample of this prompt, backs it with zeroed memory and pins the prompt.

        ``CacheError`` where no slot is free, the prompt is not stored, or /dev/shm is full; nothing is changed then.
        """
        slots, prompts = self._slot_store("allocate a slot"), self._prompt_store("allocate a slot")
        entry, length = prompts.pin(key)
        try:
            return slots.take(entry, length)
        except CacheError:
            prompts.unpin(entry)
            raise

    def free(self, ref: SlotRef) -> None:
        """Creator only. Ends a lease, gives the slot's pages back, unpins its prompt; ``ref`` is stale from now on."""
        slots = self._slot_store("free a slot")
        slot = slots.index(ref)
        if slot in slots.quarantined:
            raise CacheError(f"{self.path}: slot {slot} is in quarantine; release() it once its writer is known dead")
        self._prompt_store("free a slot").unpin(slots.give(slot))

    def quarantine(self, ref: SlotRef) -> None:
        """Creator only. Keeps a leased slot, which its old holder may still write to, from being handed out."""
        slots = self._slot_store("quarantine a slot")
        slots.set_quarantined(slots.index(ref))

    def release(self, ref: SlotRef) -> None:
        """Creator only. Frees a slot that is in quarantine; only once its old holder cannot write any more."""
        slots = self._slot_store("release a slot")
        slot = slots.index(ref)
        if slot not in slots.quarantined:
            raise CacheError(f"{self.path}: slot {slot} is not in quarantine; free() it instead")
        self._prompt_store("release a slot").unpin(slots.give(slot))

    @property
    def free_slots(self) -> int:
        """Creator only. Slots that ``allocate`` can hand out."""
        return len(self._slot_store("count free slots").free_slots)

    @property
    def quarantined(self) -> int:
        """Creator only. Slots in quarantine."""
        return len(self._slot_store("count slots in quarantine").quarantined)

    def leased(self) -> list[SlotRef]:
        """Creator only. All leased slots that are not in quarantine, in slot order."""
        return self._slot_store("list slots").refs(quarantined=False)

    def in_quarantine(self) -> list[SlotRef]:
        """Creator only. All slots in quarantine, in slot order."""
        return self._slot_store("list slots").refs(quarantined=True)

    def scalars(self, ref: SlotRef) -> SampleScalars:
        """The sample's scalars as they are now."""
        return self._table().scalars(ref)

    def set_scalars(self, ref: SlotRef, **fields: Unpack[ScalarFields]) -> None:
        """Creator only. Sets the given scalars and leaves the others."""
        self._slot_store("set scalars").set_scalars(ref, **fields)

    # ---------------------------------------------------------------- columns

    def column(self, name: str, ref: SlotRef) -> Column:
        """View of a whole column, [max_response_tokens] (``bootstrap_value``: [1]); read-only unless in ``writes``."""
        return self._columns.row(name, self._table().index(ref))

    def response(self, name: str, ref: SlotRef) -> Column:
        """View of a column's first ``response_length`` entries; read-only unless in ``writes``."""
        table = self._table()
        slot = table.index(ref)
        (length,) = table.responses(np.array([slot]))
        return self._columns.row(name, slot)[:length]

    def views(self, name: str, refs: Sequence[SlotRef]) -> list[Column]:
        """``response`` of many slots."""
        table = self._table()
        slots = table.indices(refs)
        return self._columns.views(name, slots, table.responses(slots))

    def rows(self, name: str, refs: Sequence[SlotRef], length: int) -> Column:
        """The first ``length`` entries of many slots, [len(refs), length], read-only.

        A view where the slots follow each other, else a copy. Entries after a slot's response are zero unless someone
        wrote them. To write, use ``write_rows`` or ``column``.
        """
        return self._columns.rows(name, self._table().indices(refs), length)

    def write_rows(self, name: str, refs: Sequence[SlotRef], values: npt.ArrayLike) -> None:
        """Writes ``values``, [len(refs), length], to the first ``length`` entries of a column in ``writes``."""
        self._columns.write_rows(name, self._table().indices(refs), values)

    def check(self) -> list[str]:
        """Every problem found in header, tables, prompts and slots, one sentence each; empty if there is none.

        Reads with ``pread`` and ``SEEK_DATA``, so that it backs no page with memory. The coordinator must not change
        prompts or slots meanwhile; it calls this between two steps.
        """
        self._table()
        return problems(self.path, self._fd)

    # ---------------------------------------------------------------- access

    def _table(self) -> SlotTable:
        if self._fd < 0:
            raise CacheError(f"{self.path}: this token cache is closed; attach it again")
        return self._slots

    def _index(self) -> PromptIndex:
        if self._fd < 0:
            raise CacheError(f"{self.path}: this token cache is closed; attach it again")
        return self._prompts

    def _slot_store(self, action: str) -> SlotStore:
        table = self._table()
        if not isinstance(table, SlotStore) or os.getpid() != self._creator_pid:
            raise self._not_creator(action)
        return table

    def _prompt_store(self, action: str) -> PromptStore:
        index = self._index()
        if not isinstance(index, PromptStore) or os.getpid() != self._creator_pid:
            raise self._not_creator(action)
        return index

    def _not_creator(self, action: str) -> CacheError:
        return CacheError(
            f"{self.path}: process {os.getpid()} may not {action}; only the coordinator, its creator, may do that"
        )
