"""The journal: a sample's states have no way back, leases end once, and the next coordinator recalls both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Config
from common.config_loading import to_json
from common.messages import (
    Evaluate,
    Evaluated,
    FinishedSample,
    Generate,
    Generated,
    GenerateItem,
    Lease,
    Logprobs,
    LogprobsDone,
    Result,
    Role,
    Sampling,
    Score,
    ScoreBatch,
    Scores,
    SlotRef,
    Task,
    UpdateCritic,
    Updated,
    UpdatePolicy,
)
from services.coordinator.journal import Journal, LeaseState, SampleEntry, task_digest
from services.coordinator.ledger import Ledger, LedgerError

CONFIG = to_json(Config())
REFS = [SlotRef(4, 1), SlotRef(5, 3), SlotRef(6, 1)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    ledger = Ledger(tmp_path / "ledger.sqlite", CONFIG, 1)
    yield Journal(ledger)
    ledger.close()


def successor(journal: Journal) -> Journal:
    """That of the next coordinator; the one before is dead."""
    journal.ledger.close()
    return Journal(Ledger(journal.ledger.path, CONFIG, 2))


def finished(ref: SlotRef, length: int = 3) -> FinishedSample:
    return FinishedSample(ref=ref, length=length, finish_reason="stop", version_low=0, version_high=0)


def score(ref: SlotRef, reward: float = 1.0, error: str = "") -> Score:
    return Score(ref=ref, reward=reward, accuracy=0.5, error=error)


def entry(
    sample: int, ref: SlotRef, done: FinishedSample | None = None, scored: Score | None = None, masked: str = ""
) -> SampleEntry:
    return SampleEntry(sample=sample, ref=ref, finished=done, score=scored, masked=masked)


def lease(work: int, task: Task, step: int = 1) -> Lease:
    return Lease(epoch=1, work=work, step=step, phase="EVALUATE", deadline_s=1.0, task=task)


# ---------------------------------------------------------------- samples


def test_samples_go_from_open_to_generated_to_scored(journal: Journal) -> None:
    journal.opened(1, 0, REFS)
    assert journal.recall(1, 0) == [entry(sample, ref) for sample, ref in enumerate(REFS)]
    journal.finished([finished(REFS[0]), finished(REFS[1])])
    journal.scored([score(REFS[0])])
    journal.masked(1, 0, 2, "not generated")
    expected = [
        entry(0, REFS[0], finished(REFS[0]), score(REFS[0])),
        entry(1, REFS[1], finished(REFS[1])),
        entry(2, REFS[2], masked="not generated"),
    ]
    assert journal.recall(1, 0) == expected
    later = successor(journal)
    assert (later.recall(1, 0), later.recall(1, 1), later.recall(2, 0)) == (expected, [], [])
    later.ledger.close()


def test_what_comes_late_or_again_changes_nothing(journal: Journal) -> None:
    journal.opened(1, 0, REFS)
    journal.scored([score(REFS[0])])
    assert journal.recall(1, 0)[0] == entry(0, REFS[0]), "a score of what is not generated"
    journal.finished([finished(REFS[0])])
    journal.finished([finished(REFS[0], length=7)])
    journal.scored([score(REFS[0])])
    journal.scored([score(REFS[0], reward=9.0)])
    journal.finished([finished(REFS[0], length=8)])
    journal.masked(1, 0, 1, "not generated")
    journal.finished([finished(REFS[1])])
    journal.scored([score(REFS[1])])
    masked = entry(1, REFS[1], masked="not generated")
    assert journal.recall(1, 0)[:2] == [entry(0, REFS[0], finished(REFS[0]), score(REFS[0])), masked]


def test_what_is_scored_is_not_masked_afterwards(journal: Journal) -> None:
    journal.opened(1, 0, REFS)
    journal.finished([finished(REFS[0])])
    journal.scored([score(REFS[0])])
    journal.masked(1, 0, 0, "too late")
    assert journal.recall(1, 0)[0] == entry(0, REFS[0], finished(REFS[0]), score(REFS[0]))


@pytest.mark.parametrize("wrong", [score(REFS[0], error="no such row"), score(REFS[0], math.nan)])
def test_what_could_not_be_scored_stays_generated(journal: Journal, wrong: Score) -> None:
    journal.opened(1, 0, REFS)
    journal.finished([finished(REFS[0])])
    journal.scored([wrong])
    assert journal.recall(1, 0)[0].score is None
    journal.scored([score(REFS[0])])
    assert journal.recall(1, 0)[0].score == score(REFS[0])


def test_a_moved_sample_is_known_by_its_new_slot_alone(journal: Journal) -> None:
    journal.opened(1, 0, REFS)
    journal.finished([finished(REFS[1])])
    fresh, other = SlotRef(9, 1), SlotRef(10, 1)
    journal.moved(1, 0, [(0, fresh), (1, other)])
    journal.finished([finished(REFS[0])])
    assert journal.recall(1, 0)[0] == entry(0, fresh), "what an old holder still says of the old slot"
    assert journal.recall(1, 0)[1].ref == REFS[1], "a response that is there does not move"
    journal.finished([finished(fresh)])
    assert journal.recall(1, 0)[0].finished == finished(fresh)


def test_waves_of_an_evaluation_beside_a_step_of_the_same_number(journal: Journal) -> None:
    journal.opened(2, 0, [SlotRef(1, 1)])
    journal.opened(2, 1, [SlotRef(2, 1)])
    journal.opened(3, 0, [SlotRef(3, 1)])
    assert journal.open_slots(2) == {SlotRef(2, 1), SlotRef(3, 1)}
    assert journal.open_slots(1) == {SlotRef(1, 1), SlotRef(2, 1), SlotRef(3, 1)}
    journal.finished([finished(SlotRef(2, 1))])
    journal.closed(2, 1)
    assert journal.open_slots(2) == {SlotRef(3, 1)}
    assert journal.recall(2, 1)[0].finished == finished(SlotRef(2, 1)), "what is known of it stays"
    journal.ledger.forget_after(2)
    assert [sample.ref for sample in journal.recall(2, 0)] == [SlotRef(1, 1)]
    assert journal.recall(2, 1) == journal.recall(3, 0) == []


def test_samples_are_written_all_or_none(journal: Journal) -> None:
    journal.opened(1, 0, REFS)
    journal.ledger.connection.execute(
        "CREATE TRIGGER broken BEFORE UPDATE ON samples WHEN NEW.slot = 6 BEGIN SELECT RAISE(ABORT, 'no'); END"
    )
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: finished samples cannot be read or written: no"):
        journal.finished([finished(ref) for ref in REFS])
    assert [sample.finished for sample in journal.recall(1, 0)] == [None] * 3


def test_a_damaged_sample_is_named(journal: Journal) -> None:
    journal.opened(1, 0, REFS)
    journal.ledger.connection.execute("UPDATE samples SET finished = 'x'")
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: samples cannot be read or written"):
        journal.recall(1, 0)


# ---------------------------------------------------------------- leases

UPDATED = Updated(metrics={"loss": 0.5}, tokens=3)
RECALLED: list[tuple[Role, Task, Result]] = [
    ("critic", Evaluate(refs=REFS), Evaluated(tokens=3)),
    ("trainer", Logprobs(refs=REFS, reference=True), LogprobsDone(tokens=3)),
    ("trainer", UpdatePolicy(refs=REFS, version=1, kl_coefficient=0.1), UPDATED),
    ("critic", UpdateCritic(refs=REFS), UPDATED),
]


@pytest.mark.parametrize(("role", "task", "result"), RECALLED, ids=[type(task).__name__ for _, task, _ in RECALLED])
def test_what_wrote_columns_or_weights_is_recalled_by_what_it_was(
    journal: Journal, role: Role, task: Task, result: Result
) -> None:
    digest = task_digest(role, 1, task)
    journal.leased(lease(7, task), role, 0, 11)
    assert journal.result(digest) is None
    journal.ended(7, "done", result)
    later = successor(journal)
    assert later.result(digest) == result
    assert later.result(task_digest(role, 2, task)) is None
    later.forget_result(digest)
    assert later.result(digest) is None
    later.leased(lease(8, task), role, 0, 11)
    later.ended(8, "done", result)
    assert later.result(digest) == result, "it was done again"
    later.ledger.close()


def test_digests_tell_role_step_and_task_apart() -> None:
    others: list[tuple[Role, int, Task]] = [
        ("trainer", 1, Evaluate(refs=REFS)),
        ("critic", 2, Evaluate(refs=REFS)),
        ("critic", 1, Evaluate(refs=REFS[:2])),
        ("critic", 1, Evaluate(refs=[REFS[1], REFS[0], REFS[2]])),
        ("critic", 1, Evaluate(refs=[SlotRef(4, 2), *REFS[1:]])),
        ("trainer", 1, Logprobs(refs=REFS, reference=False)),
        ("trainer", 1, UpdatePolicy(refs=REFS, version=1, kl_coefficient=0.2)),
    ]
    digests = [task_digest(role, 1, task) for role, task, _ in RECALLED]
    digests += [task_digest(*other) for other in others]
    assert len(set(digests)) == len(digests)


SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)
OTHERS: list[tuple[Role, Task, Result]] = [
    (
        "rollout",
        Generate(items=[GenerateItem(ref=REFS[0], sample=0)], sampling=SAMPLING, version=0),
        Generated(samples=1, tokens=1),
    ),
    ("reward", ScoreBatch(items=[]), Scores(scores=[])),
]


@pytest.mark.parametrize(("role", "task", "result"), OTHERS)
def test_what_samples_themselves_say_is_not_recalled(journal: Journal, role: Role, task: Task, result: Result) -> None:
    journal.leased(lease(7, task), role, 0, 11)
    journal.ended(7, "done", result)
    assert journal.result(task_digest(role, 1, task)) is None


@pytest.mark.parametrize("state", ["failed", "lost"])
def test_the_first_end_of_work_counts(journal: Journal, state: LeaseState) -> None:
    task = Evaluate(refs=REFS)
    digest = task_digest("critic", 1, task)
    journal.leased(lease(7, task), "critic", 0, 11)
    journal.ended(7, state)
    journal.ended(7, "done", Evaluated(tokens=3))
    assert journal.result(digest) is None
    journal.leased(lease(8, task), "critic", 0, 11)
    journal.ended(8, "done", Evaluated(tokens=3))
    journal.ended(8, "lost")
    assert journal.result(digest) == Evaluated(tokens=3)


def test_only_work_of_an_earlier_coordinator_is_unanswered(journal: Journal) -> None:
    task = Evaluate(refs=REFS)
    for work in (7, 8, 9):
        journal.leased(lease(work, task, step=3), "critic", 0, 11)
    journal.ended(8, "done", Evaluated(tokens=3))
    journal.ended(9, "lost")
    assert journal.unanswered(7) is None, "this coordinator waits for it itself"
    later = successor(journal)
    found = later.unanswered(7)
    assert found is not None
    expected = (7, 3, "critic", "Evaluate", task_digest("critic", 3, task))
    assert (found.work, found.step, found.role, found.task, found.digest) == expected
    assert [later.unanswered(work) for work in (8, 9, 10)] == [None] * 3
    later.ledger.close()


def test_unanswered_work_names_the_samples_that_it_generates(journal: Journal) -> None:
    items = [GenerateItem(ref=ref, sample=sample) for sample, ref in enumerate(REFS[:2])]
    journal.leased(lease(7, Generate(items=items, sampling=SAMPLING, version=0)), "rollout", 0, 11)
    journal.leased(lease(8, ScoreBatch(items=[])), "reward", 0, 12)
    later = successor(journal)
    found = [later.unanswered(work) for work in (7, 8)]
    assert [entry and (entry.task, entry.refs) for entry in found] == [("Generate", REFS[:2]), ("ScoreBatch", [])]
    later.ledger.close()


def test_work_whose_first_taker_was_gone_is_with_the_second(journal: Journal) -> None:
    task = Evaluate(refs=REFS)
    for replica in (0, 1):
        journal.leased(lease(7, task), "critic", replica, 11 + replica)
    row = journal.ledger.connection.execute("SELECT replica, pid, state FROM leases WHERE work = 7").fetchall()
    assert row == [(1, 12, "out")]


def test_samples_of_a_step_that_is_done_are_not_touched_any_more(journal: Journal) -> None:
    journal.opened(1, 0, REFS[:1])
    journal.opened(2, 0, REFS[1:2])
    journal.step_done(1)
    journal.finished([finished(ref) for ref in REFS[:2]])
    assert journal.recall(1, 0)[0].finished is None
    assert journal.recall(2, 0)[0].finished == finished(REFS[1])


def test_the_next_coordinator_knows_the_slots_of_what_is_not_done(journal: Journal) -> None:
    journal.opened(1, 0, REFS[:1])
    journal.opened(2, 0, REFS[1:])
    fresh = SlotRef(9, 1)
    journal.moved(2, 0, [(0, fresh)])
    later = successor(journal)
    later.finished([finished(REFS[1]), finished(fresh)])
    assert (later.recall(2, 0)[0], later.open_slots(1)) == (entry(0, fresh, finished(fresh)), {fresh, REFS[2]})
    later.ledger.close()
