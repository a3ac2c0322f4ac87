"""Every sample and every lease, written down before anybody is told that it was received.

A coordinator that takes over runs the step again from its beginning, and what the journal knows is not done again:

    samples  open -> generated -> scored      or -> masked; never back. Their slots, responses and scores are recalled
    leases   out -> done | failed | lost      results of work that wrote columns or weights are recalled by what it was;
             out -> late                      nobody waits for it any more, but its holder may still write

So the code of a step is the same whether it runs for the first time or not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import msgspec
from msgspec import Struct

from common.messages import (
    Evaluate,
    FinishedSample,
    Generate,
    Lease,
    Logprobs,
    Result,
    Role,
    Score,
    SlotRef,
    Task,
    UpdateCritic,
    UpdatePolicy,
)
from services.coordinator.ledger import Ledger

RECALLED = (Evaluate, Logprobs, UpdatePolicy, UpdateCritic)
"""Tasks that leave what they did in the token cache or in a learner's weights."""
LeaseState = Literal["out", "done", "failed", "lost", "late"]
_result = msgspec.json.Decoder(Result)
_finished = msgspec.json.Decoder(FinishedSample)
_score = msgspec.json.Decoder(Score)
_slots = msgspec.msgpack.Decoder(list[SlotRef])
Place = tuple[int, int, int]
"""(step, wave, index in the wave) of a sample."""


class SampleEntry(Struct, frozen=True, kw_only=True):
    """What the journal knows of a sample."""

    sample: int
    ref: SlotRef
    finished: FinishedSample | None
    score: Score | None
    masked: str


class LeaseEntry(Struct, frozen=True, kw_only=True):
    """What the journal knows of a lease that an earlier coordinator gave out and that was not answered."""

    work: int
    step: int
    role: Role
    task: str
    digest: bytes
    refs: list[SlotRef]
    """Slots of the samples that it generates."""
    holder: tuple[Role, int, int]
    """Role, number and process that it was given to."""
    late: bool
    """Nobody waits for it: it was handed out again."""


def task_digest(role: Role, step: int, task: Task) -> bytes:
    """Names work by what it is, the same under every coordinator. 16 bytes."""
    return blake2b(f"{role} {step} ".encode() + msgspec.msgpack.encode(task), digest_size=16).digest()


class Journal:
    """Tables ``samples`` and ``leases`` of the ledger. Raises LedgerError where they cannot be written."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._places: dict[SlotRef, Place] = {}
        query = (
            "SELECT step, wave, sample, slot, generation FROM samples "
            "WHERE slot >= 0 AND step >= (SELECT coalesce(max(step), 0) FROM steps)"
        )
        with ledger.naming("samples"):
            for step, wave, sample, slot, generation in ledger.connection.execute(query):
                self._places[SlotRef(slot, generation)] = (step, wave, sample)

    # ------------------------------------------------------------ samples

    def opened(self, step: int, wave: int, refs: Sequence[SlotRef]) -> None:
        """``wave`` 0 are a step's own samples; the evaluation after the step has waves from 1."""
        rows = [(step, wave, sample, ref.slot, ref.generation) for sample, ref in enumerate(refs)]
        statement = "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, 'open', NULL, NULL, '')"
        self.ledger.write(f"samples of step {step}", statement, rows)
        self._places.update({ref: (step, wave, sample) for sample, ref in enumerate(refs)})

    def closed(self, step: int, wave: int) -> None:
        """The slots of an evaluation's wave are about to be freed; what is known of its samples stays."""
        statement = "UPDATE samples SET slot = -1 WHERE step = ? AND wave = ?"
        self.ledger.write(f"samples of step {step}", statement, [(step, wave)])
        self._places = {ref: place for ref, place in self._places.items() if place[:2] != (step, wave)}

    def step_done(self, step: int) -> None:
        """Nothing more is heard of the samples of this step and those before."""
        self._places = {ref: place for ref, place in self._places.items() if place[0] > step}

    def open_slots(self, step: int) -> set[SlotRef]:
        """Slots of all samples after ``step``, and of those of the evaluation after it."""
        return {ref for ref, (at, wave, _) in self._places.items() if at > step or (at == step and wave > 0)}

    def moved(self, step: int, wave: int, moves: Sequence[tuple[int, SlotRef]]) -> None:
        """Unfinished samples that are handed out again in fresh slots: (index in the wave, its new slot)."""
        rows = [(ref.slot, ref.generation, step, wave, sample) for sample, ref in moves]
        statement = (
            "UPDATE samples SET slot = ?, generation = ? WHERE step = ? AND wave = ? AND sample = ? AND state = 'open'"
        )
        self.ledger.write(f"new slots of step {step}", statement, rows)
        now = {(step, wave, sample): ref for sample, ref in moves}
        self._places = {ref: place for ref, place in self._places.items() if place not in now}
        self._places.update({ref: place for place, ref in now.items()})

    def finished(self, samples: Sequence[FinishedSample]) -> None:
        """Those that are open become generated; what comes late or again changes nothing."""
        found = [(sample, self._places[sample.ref]) for sample in samples if sample.ref in self._places]
        rows = [(msgspec.json.encode(sample), *place) for sample, place in found]
        statement = (
            "UPDATE samples SET state = 'generated', finished = ? "
            "WHERE step = ? AND wave = ? AND sample = ? AND state = 'open'"
        )
        self.ledger.write("finished samples", statement, rows)

    def scored(self, scores: Sequence[Score]) -> None:
        """Those that are generated become scored; a sample that could not be scored stays what it is."""
        right = [score for score in scores if not score.error and math.isfinite(score.reward)]
        found = [(score, self._places[score.ref]) for score in right if score.ref in self._places]
        rows = [(msgspec.json.encode(score), *place) for score, place in found]
        statement = (
            "UPDATE samples SET state = 'scored', score = ? "
            "WHERE step = ? AND wave = ? AND sample = ? AND state = 'generated'"
        )
        self.ledger.write("scores", statement, rows)

    def masked(self, step: int, wave: int, sample: int, reason: str) -> None:
        statement = (
            "UPDATE samples SET state = 'masked', masked = ? "
            "WHERE step = ? AND wave = ? AND sample = ? AND state IN ('open', 'generated')"
        )
        self.ledger.write("a masked sample", statement, [(reason, step, wave, sample)])

    def recall(self, step: int, wave: int) -> list[SampleEntry]:
        """A wave's samples in order; empty where an earlier coordinator did not get so far."""
        query = (
            "SELECT sample, slot, generation, finished, score, masked FROM samples "
            "WHERE step = ? AND wave = ? ORDER BY sample"
        )
        with self.ledger.naming("samples"):
            rows = self.ledger.connection.execute(query, (step, wave)).fetchall()
            return [
                SampleEntry(
                    sample=sample, ref=SlotRef(slot, generation),
                    finished=None if finished is None else _finished.decode(finished),
                    score=None if score is None else _score.decode(score), masked=masked,
                )
                for sample, slot, generation, finished, score, masked in rows
            ]  # fmt: skip

    # ------------------------------------------------------------ leases

    def leased(self, lease: Lease, role: Role, replica: int, pid: int) -> None:
        """Work that is about to be handed out; again, where its first taker was gone."""
        task = lease.task
        digest = task_digest(role, lease.step, task) if isinstance(task, RECALLED) else None
        slots = msgspec.msgpack.encode([item.ref for item in task.items]) if isinstance(task, Generate) else None
        row = (
            lease.work, self.ledger.epoch, lease.step, lease.phase, role, replica, pid, type(task).__name__, digest,
            slots, time.time(),
        )  # fmt: skip
        statement = "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'out', NULL, NULL)"
        self.ledger.write(f"work {lease.work}", statement, [row])

    def ended(self, work: int, state: LeaseState, result: Result | None = None) -> None:
        """Work that was answered or lost; its first end counts."""
        row = (state, time.time(), None if result is None else msgspec.json.encode(result), work)
        statement = "UPDATE leases SET state = ?, ended = ?, result = ? WHERE work = ? AND state = 'out'"
        self.ledger.write(f"the end of work {work}", statement, [row])

    def result(self, digest: bytes) -> Result | None:
        """What work of this digest resulted in, under whichever coordinator."""
        query = "SELECT result FROM leases WHERE digest = ? AND state = 'done' ORDER BY work DESC LIMIT 1"
        with self.ledger.naming("leases"):
            row = self.ledger.connection.execute(query, (digest,)).fetchone()
            return None if row is None else _result.decode(row[0])

    def knows_update(self, role: Role, step: int) -> bool:
        """Whether this role was given its update of this step, and that has not been lost or forgotten."""
        query = (
            "SELECT count(*) FROM leases WHERE step = ? AND role = ? AND task IN ('UpdatePolicy', 'UpdateCritic') "
            "AND state IN ('out', 'done')"
        )
        with self.ledger.naming("leases"):
            (known,) = self.ledger.connection.execute(query, (step, role)).fetchone()
        return bool(known)

    def forget_result(self, digest: bytes) -> None:
        """What it left is lost: it must be done again."""
        self.ledger.write(
            "lost work", "UPDATE leases SET state = 'lost' WHERE digest = ? AND state = 'done'", [(digest,)]
        )

    def unanswered(self, work: int) -> LeaseEntry | None:
        """A lease of an earlier coordinator that somebody may still hold or have finished."""
        query = (
            "SELECT step, role, task, digest, slots, replica, pid, state FROM leases "
            "WHERE work = ? AND epoch < ? AND state IN ('out', 'late')"
        )
        with self.ledger.naming("leases"):
            row = self.ledger.connection.execute(query, (work, self.ledger.epoch)).fetchone()
            if row is None:
                return None
            step, role, task, digest, slots, replica, pid, state = row
            refs = [] if slots is None else _slots.decode(slots)
        return LeaseEntry(
            work=work, step=step, role=role, task=task, digest=digest or b"", refs=refs, holder=(role, replica, pid),
            late=state == "late",
        )  # fmt: skip
