"""The ledger on a full disk: a step that is not recorded ends the run, a lost note is told and ends nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from services.coordinator.ledger import Ledger, LedgerError


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", "digest", 1)
    (pages,) = ledger.connection.execute("PRAGMA page_count").fetchone()
    ledger.connection.execute(f"PRAGMA max_page_count={pages}")
    with caplog.at_level(logging.ERROR):
        ledger.event("death", "trainer 0" + "x" * 100_000)
    assert "ledger.sqlite: cannot be written: database or disk is full; what it lacks: death, trainer 0" in caplog.text
    position, facts = (0, 0), {"x" * 100_000: 1.0}
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: step 7 cannot be written: database or disk is full"):
        ledger.step_done(7, version=7, samples=1, masked=0, position=position, kl_coefficient=0.0, facts=facts)
    ledger.close()
