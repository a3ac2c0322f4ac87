"""The ledger: what it keeps from coordinator to coordinator, what it refuses to open, and what a full disk costs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.config import Config, PPOConfig, RunConfig, TimeoutsConfig
from common.config_loading import to_json
from services.coordinator.ledger import EvaluationRecord, Ledger, LedgerError, RecordSizes, StepRecord

CONFIG = to_json(Config())


def record(step: int, **more: float) -> StepRecord:
    return StepRecord(
        step=step, version=step, samples=4, masked=1, position=(1, 2), kl_coefficient=0.25,
        sizes=RecordSizes(metrics=10 * step, samples=20 * step), reward=None, step_s=1.5, idle_s=0.5, phase_s=more,
    )  # fmt: skip


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step that is not recorded ends the run, a lost note is told and ends nothing."""
    ledger = Ledger(tmp_path / "ledger.sqlite", CONFIG, 1)
    (pages,) = ledger.connection.execute("PRAGMA page_count").fetchone()
    ledger.connection.execute(f"PRAGMA max_page_count={pages}")
    with caplog.at_level(logging.ERROR):
        ledger.event("death", "trainer 0" + "x" * 100_000)
    assert "ledger.sqlite: cannot be written: database or disk is full; what it lacks: ('death', 'trainer 0" in (
        caplog.text
    )
    expected = r"ledger\.sqlite: step 7 cannot be read or written: database or disk is full"
    with pytest.raises(LedgerError, match=expected):
        ledger.step_done(record(7, **{"x" * 100_000: 1.0}))
    assert list(ledger.steps()) == []
    ledger.close()


def test_what_is_done_outlives_its_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    first = Ledger(path, CONFIG, 1)
    assert first.epoch == 1
    evaluation = EvaluationRecord(0, None, RecordSizes(metrics=3))
    for step in (2, 1):
        first.step_done(record(step, GENERATE=0.1 * step))
    first.evaluation_done(evaluation)
    first.close()
    second = Ledger(path, CONFIG, 2)
    assert second.epoch == 2
    assert list(second.steps()) == [record(1, GENERATE=0.1), record(2, GENERATE=0.2)]
    assert list(second.evaluations()) == [evaluation]
    second.close()


def test_the_log_is_moved_into_the_database_beside_the_writing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, CONFIG, 1)
    ledger.step_done(record(1))
    before = path.stat().st_size
    for step in range(2, 200):
        ledger.step_done(record(step))
    assert path.stat().st_size == before, "nobody who writes waits for the disk"
    ledger.move_log()
    assert path.stat().st_size > before
    assert len(list(ledger.steps())) == 199
    ledger.close()


def test_a_config_that_does_not_fit_is_refused_with_every_difference_and_leaves_no_epoch(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path, CONFIG, 1).close()
    other = Config(run=RunConfig(seed=7), ppo=PPOConfig(gamma=0.5), timeouts=TimeoutsConfig(stop=7.0))
    with pytest.raises(LedgerError) as caught:
        Ledger(path, to_json(other), 2)
    assert "ledger.sqlite was written under another config: " in str(caught.value)
    assert all(name in str(caught.value) for name in ("run.seed", "ppo.gamma", "or choose another run.name"))
    assert "timeouts" not in str(caught.value)
    patient = Ledger(path, to_json(Config(timeouts=TimeoutsConfig(stop=7.0))), 3)
    assert patient.epoch == 2
    patient.close()


def test_a_repeated_step_replaces_its_record(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", CONFIG, 1)
    ledger.step_done(record(1, GENERATE=1.0))
    ledger.step_done(record(1, GENERATE=2.0))
    assert list(ledger.steps()) == [record(1, GENERATE=2.0)]
    ledger.close()


def test_going_back_forgets_steps_and_the_evaluation_after_the_one_it_goes_back_to(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", CONFIG, 1)
    for step in range(1, 5):
        ledger.step_done(record(step))
    for step in (0, 2, 4):
        ledger.evaluation_done(EvaluationRecord(step, 0.5, RecordSizes()))
    ledger.forget_after(2)
    assert [done.step for done in list(ledger.steps())] == [1, 2]
    assert [done.step for done in ledger.evaluations()] == [0], "that after step 2 is run again"
    ledger.close()


def test_a_ledger_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, CONFIG, 1)
    ledger.connection.execute("PRAGMA user_version=1")
    ledger.close()
    with pytest.raises(LedgerError, match=r"ledger\.sqlite has layout 1, expected 2: .* another run\.name"):
        Ledger(path, CONFIG, 1)


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_ledger_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=rf"{path}: the start of a coordinator cannot be read or written"):
        Ledger(path, CONFIG, 1)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", CONFIG, 1)
    ledger.step_done(record(1))
    ledger.connection.execute("UPDATE steps SET record = '{\"step\": 1}'")
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: steps cannot be read or written: .*missing required"):
        list(ledger.steps())
    ledger.close()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"nowhere/ledger\.sqlite: cannot be opened"):
        Ledger(tmp_path / "nowhere" / "ledger.sqlite", CONFIG, 1)
