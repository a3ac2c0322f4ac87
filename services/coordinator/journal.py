"""Every sample and every lease, written down before anybody is told that it was received.

A coordinator that takes over runs the step again from its beginning, and what the journal knows is not done again:

    samples  open -> generated -> scored      or -> masked; never back. Their slots, responses and scores are recalled
    leases   out -> done | failed | lost      results of work that wrote columns or weights are recalled by what it was

So the code of a step is the same whether it runs for the first time or not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
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
SampleState = Literal["open", "generated", "scored", "masked"]
LeaseState = Literal["out", "done", "failed", "lost"]
_result = msgspec.json.Decoder(Result)
_finished = msgspec.json.Decoder(FinishedSample)
_score = msgspec.json.Decoder(Score)


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


def task_digest(role: Role, step: int, task: Task) -> bytes:
    """Names work by what it is, the same under every coordinator. 16 bytes."""
    return blake2b(f"{role} {step} ".encode() + msgspec.msgpack.encode(task), digest_size=16).digest()


class Journal:
    """Tables ``samples`` and ``leases`` of the ledger. Raises LedgerError where they cannot be written."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    # ------------------------------------------------------------ samples

    def opened(self, step: int, wave: int, refs: Sequence[SlotRef]) -> None:
        """``wave`` 0 are a step's own samples; the evaluation after the step has waves from 1."""
        rows = [(step, wave, sample, ref.slot, ref.generation) for sample, ref in enumerate(refs)]
        statement = "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, 'open', 0, NULL, NULL, '')"
        self.ledger.write(f"samples of step {step}", statement, rows)

    def closed(self, step: int, wave: int) -> None:
        """The slots of an evaluation's wave are about to be freed; what is known of its samples stays."""
        statement = "UPDATE samples SET slot = -1 WHERE step = ? AND wave = ?"
        self.ledger.write(f"samples of step {step}", statement, [(step, wave)])

    def open_slots(self, step: int) -> set[SlotRef]:
        """Slots of all samples after ``step``, and of those of the evaluation after it."""
        query = "SELECT slot, generation FROM samples WHERE slot >= 0 AND (step > ? OR (step = ? AND wave > 0))"
        with self.ledger.naming("samples"):
            return {SlotRef(*row) for row in self.ledger.connection.execute(query, (step, step))}

    def moved(self, step: int, wave: int, moves: Iterable[tuple[int, SlotRef]]) -> None:
        """Unfinished samples that are handed out again in fresh slots: (index in the wave, its new slot)."""
        rows = [(ref.slot, ref.generation, step, wave, sample) for sample, ref in moves]
        statement = (
            "UPDATE samples SET slot = ?, generation = ?, work = 0 "
            "WHERE step = ? AND wave = ? AND sample = ? AND state = 'open'"
        )
        self.ledger.write(f"new slots of step {step}", statement, rows)

    def finished(self, samples: Sequence[FinishedSample]) -> None:
        """Those that are open become generated; what comes late or again changes nothing."""
        rows = [(msgspec.json.encode(sample), sample.ref.slot, sample.ref.generation) for sample in samples]
        statement = (
            "UPDATE samples SET state = 'generated', finished = ? WHERE slot = ? AND generation = ? AND state = 'open'"
        )
        self.ledger.write("finished samples", statement, rows)

    def scored(self, scores: Sequence[Score]) -> None:
        """Those that are generated become scored; a sample that could not be scored stays what it is."""
        right = [score for score in scores if not score.error and math.isfinite(score.reward)]
        rows = [(msgspec.json.encode(score), score.ref.slot, score.ref.generation) for score in right]
        statement = (
            "UPDATE samples SET state = 'scored', score = ? WHERE slot = ? AND generation = ? AND state = 'generated'"
        )
        self.ledger.write("scores", statement, rows)

    def masked(self, step: int, wave: int, sample: int, reason: str) -> None:
        statement = "UPDATE samples SET state = 'masked', masked = ? WHERE step = ? AND wave = ? AND sample = ?"
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
        task = lease.task
        digest = task_digest(role, lease.step, task) if isinstance(task, RECALLED) else None
        row = (
            lease.work, self.ledger.epoch, lease.step, lease.phase, role, replica, pid, type(task).__name__, digest,
            time.time(),
        )  # fmt: skip
        statement = "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'out', NULL, NULL)"
        self.ledger.write(f"work {lease.work}", statement, [row])
        if isinstance(task, Generate):
            rows = [(lease.work, item.ref.slot, item.ref.generation) for item in task.items]
            self.ledger.write(
                f"work {lease.work}", "UPDATE samples SET work = ? WHERE slot = ? AND generation = ?", rows
            )

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

    def forget_result(self, digest: bytes) -> None:
        """What it left is lost: it must be done again."""
        self.ledger.write(
            "lost work", "UPDATE leases SET state = 'lost' WHERE digest = ? AND state = 'done'", [(digest,)]
        )

    def unanswered(self, work: int) -> LeaseEntry | None:
        """A lease of an earlier coordinator that somebody may still hold or have finished."""
        query = "SELECT step, role, task, digest FROM leases WHERE work = ? AND epoch < ? AND state = 'out'"
        with self.ledger.naming("leases"):
            row = self.ledger.connection.execute(query, (work, self.ledger.epoch)).fetchone()
        if row is None:
            return None
        return LeaseEntry(work=work, step=row[0], role=row[1], task=row[2], digest=row[3] or b"")

    def samples_of(self, work: int) -> list[SlotRef]:
        """Slots of the samples that this work was to generate."""
        with self.ledger.naming("samples"):
            query = "SELECT slot, generation FROM samples WHERE work = ? ORDER BY step, wave, sample"
            return [SlotRef(*row) for row in self.ledger.connection.execute(query, (work,))]
