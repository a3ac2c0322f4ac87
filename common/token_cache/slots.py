"""The slot table: references, scalars, columns; and the creator's allocation of slot bodies."""

from __future__ import annotations

import heapq
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import msgspec
import numpy as np
import numpy.typing as npt

from common.messages import FinishReason, SlotRef
from common.token_cache.layout import FINISH_REASONS, SLOT_RECORD, CacheError, Layout


class SampleScalars(msgspec.Struct, frozen=True):
    """What a slot says about its sample. All zero or empty after ``allocate`` but for ``prompt_length``."""

    prompt_length: int
    """Tokens of the prompt."""
    response_length: int
    """Tokens of the response that are written."""
    finish_reason: Literal["", "stop", "length"]
    """Empty until the sample is finished."""
    version_low: int
    """Lowest policy version that produced a token."""
    version_high: int
    """Highest policy version that produced a token."""
    state: int
    """The coordinator's own code for how far the sample is; 0 after ``allocate``."""
    sample: int
    """Index within the step."""
    step: int
    reward: float
    """The scorers' weighted sum."""


class ScalarFields(TypedDict, total=False):
    """Fields that ``set_scalars`` takes."""

    response_length: int
    finish_reason: FinishReason | Literal[""]
    version_low: int
    version_high: int
    state: int
    sample: int
    step: int
    reward: float


class SlotTable:
    """Slots as any process sees them; every access checks the reference's generation."""

    def __init__(self, mapping: mmap.mmap, layout: Layout, path: Path) -> None:
        self.path = path
        self.layout = layout
        self.count = layout.geometry.slots
        self.table: npt.NDArray[Any] = np.ndarray((self.count,), SLOT_RECORD, mapping, layout.slot_table)
        self.generations: npt.NDArray[np.int64] = self.table["generation"]
        self.lengths: npt.NDArray[np.int32] = self.table["response_length"]

    def index(self, ref: SlotRef) -> int:
        """The slot of a valid reference; ``CacheError`` for a stale one or one outside the table."""
        slot = ref.slot
        if not 0 <= slot < self.count:
            raise CacheError(f"{self.path}: slot {slot} does not exist; expected 0 to {self.count - 1}")
        found = self.generations[slot]
        if found != ref.generation or found % 2 == 0:
            raise self._stale(slot, ref.generation)
        return slot

    def indices(self, refs: Sequence[SlotRef]) -> npt.NDArray[np.intp]:
        """The slots of valid references, intp[len(refs)]; ``CacheError`` names the first stale one."""
        slots = np.array([ref.slot for ref in refs], np.intp)
        generations = np.array([ref.generation for ref in refs], np.int64)
        if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= self.count):
            for ref in refs:
                self.index(ref)
        found = self.generations[slots]
        wrong = np.flatnonzero((found != generations) | (found % 2 == 0))
        if len(wrong):
            raise self._stale(int(slots[wrong[0]]), int(generations[wrong[0]]))
        return slots

    def scalars(self, ref: SlotRef) -> SampleScalars:
        """The sample's scalars."""
        record = self.table[self.index(ref)]
        return SampleScalars(
            prompt_length=int(record["prompt_length"]),
            response_length=int(record["response_length"]),
            finish_reason=self._reason(ref.slot, int(record["finish_reason"])),
            version_low=int(record["version_low"]),
            version_high=int(record["version_high"]),
            state=int(record["state"]),
            sample=int(record["sample"]),
            step=int(record["step"]),
            reward=float(record["reward"]),
        )

    def prompt(self, ref: SlotRef) -> tuple[int, int]:
        """Entry and length of the slot's prompt; ``CacheError`` where they cannot be."""
        slot = self.index(ref)
        record, geometry = self.table[slot], self.layout.geometry
        entry, length = int(record["prompt"]), int(record["prompt_length"])
        if not (0 <= entry < geometry.prompts and 1 <= length <= geometry.max_prompt_tokens):
            raise self.damaged(slot, f"its prompt is entry {entry} with {length} tokens")
        return entry, length

    def responses(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """Tokens of the slots' responses, int32[len(slots)]; ``CacheError`` where one cannot be."""
        lengths, most = self.lengths[slots], self.layout.geometry.max_response_tokens
        if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > most):
            wrong = int(np.flatnonzero((lengths < 0) | (lengths > most))[0])
            raise self.damaged(int(slots[wrong]), f"its response has {lengths[wrong]} tokens, expected 0 to {most}")
        return lengths

    def damaged(self, slot: int, what: str) -> CacheError:
        """The error for a slot whose record says what no coordinator has written."""
        return CacheError(f"{self.path}: slot {slot} is damaged: {what}; start the run again")

    def _reason(self, slot: int, code: int) -> Literal["", "stop", "length"]:
        if code >= len(FINISH_REASONS):
            raise self.damaged(slot, f"its finish_reason has code {code}, expected 0 to {len(FINISH_REASONS) - 1}")
        return FINISH_REASONS[code]

    def _stale(self, slot: int, expected: int) -> CacheError:
        found = int(self.generations[slot])
        what = "leased again" if found % 2 else "free"
        return CacheError(
            f"{self.path}: slot {slot}: the reference has generation {expected}, the slot has {found} and is {what}; "
            "drop work that refers to it"
        )

    def close(self) -> None:
        """Lets go of the mapping."""
        del self.table, self.generations, self.lengths


class SlotStore(SlotTable):
    """The creator's side: which slots are free, and the memory behind those that are not."""

    def __init__(self, mapping: mmap.mmap, layout: Layout, path: Path, fd: int) -> None:
        super().__init__(mapping, layout, path)
        self._mapping = mapping
        self._fd = fd
        self._fields = {name: self.table[name] for name in ScalarFields.__annotations__}
        # The lowest free slot goes out first: a step's samples lie side by side and are read without a copy.
        self.free_slots = list(range(self.count))
        self.quarantined: set[int] = set()

    def take(self, prompt: int, prompt_length: int) -> SlotRef:
        """Leases the lowest free slot and backs its body with zeroed memory."""
        if not self.free_slots:
            raise CacheError(
                f"{self.path}: no free slot: {self.count - len(self.quarantined)} leased, {len(self.quarantined)} in "
                f"quarantine, of {self.count}; raise cache.slots"
            )
        slot = self.free_slots[0]
        stride = self.layout.stride
        try:
            os.posix_fallocate(self._fd, self.layout.bodies + slot * stride, stride)
        except OSError as error:
            raise CacheError(
                f"{self.path}: slot {slot}: no memory for its {stride} bytes: {error.strerror}; free space in /dev/shm "
                "or lower cache.slots or rollout.max_new_tokens"
            ) from error
        heapq.heappop(self.free_slots)
        generation = int(self.generations[slot])
        row = np.zeros((), SLOT_RECORD)
        row["generation"], row["prompt"], row["prompt_length"] = generation, prompt, prompt_length
        self.table[slot] = row
        self.generations[slot] = generation + 1
        return SlotRef(slot, generation + 1)

    def give(self, slot: int) -> int:
        """Ends a lease and gives the pages back; returns the prompt entry to unpin."""
        self.generations[slot] += 1
        self.table["quarantined"][slot] = 0
        self.quarantined.discard(slot)
        self._give_pages(slot)
        heapq.heappush(self.free_slots, slot)
        return int(self.table["prompt"][slot])

    def set_quarantined(self, slot: int) -> None:
        """Keeps a leased slot from being handed out until it is released."""
        self.table["quarantined"][slot] = 1
        self.quarantined.add(slot)

    def set_scalars(self, ref: SlotRef, **fields: Unpack[ScalarFields]) -> None:
        """Sets some of the scalars; ``CacheError`` for an unknown field or one out of range."""
        slot = self.index(ref)
        stored: dict[str, float] = {}
        for name, value in fields.items():
            try:
                stored[name] = self._stored(name, value)
            except (TypeError, ValueError) as error:
                raise CacheError(f"{self.path}: slot {slot}: {name} {value!r} cannot be set: {error}") from error
        for name, number in stored.items():
            self._fields[name][slot] = number

    def _stored(self, name: str, value: Any) -> float:
        """The number that is stored for a scalar; ``ValueError`` says what was expected."""
        if name not in self._fields:
            raise ValueError(f"expected one of the fields {', '.join(ScalarFields.__annotations__)}")
        if name == "finish_reason":
            if value not in FINISH_REASONS:
                raise ValueError(f"expected one of {FINISH_REASONS}")
            return FINISH_REASONS.index(value)
        most = self.layout.geometry.max_response_tokens
        if name == "response_length" and not 0 <= value <= most:
            raise ValueError(f"expected 0 to {most}")
        if name == "reward":
            return float(value)
        if type(value) is not int or not -(2**31) <= value < 2**31:
            raise TypeError("expected an integer of 32 bits")
        return value

    def recover(self) -> list[tuple[int, int, int]]:
        """Takes over after another creator died; returns every leased slot with the entry and length of its prompt."""
        leased = self.generations % 2 == 1
        self.quarantined = set(np.flatnonzero(leased & (self.table["quarantined"] != 0)).tolist())
        self.free_slots = np.flatnonzero(~leased).tolist()
        for slot in self.free_slots:
            self.table["quarantined"][slot] = 0
            self._give_pages(slot)
        taken = np.flatnonzero(leased).tolist()
        return [(slot, *self.prompt(SlotRef(slot, int(self.generations[slot])))) for slot in taken]

    def refs(self, quarantined: bool) -> list[SlotRef]:
        """All leased slots, either those in quarantine or the others."""
        chosen = (self.generations % 2 == 1) & ((self.table["quarantined"] != 0) == quarantined)
        return [SlotRef(slot, int(self.generations[slot])) for slot in np.flatnonzero(chosen).tolist()]

    def _give_pages(self, slot: int) -> None:
        start = self.layout.bodies + slot * self.layout.stride
        self._mapping.madvise(mmap.MADV_REMOVE, start, self.layout.stride)

    def close(self) -> None:
        """As for a reader."""
        del self._mapping
        self._fields.clear()
        super().close()
