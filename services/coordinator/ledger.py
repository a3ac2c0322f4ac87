"""The run's ledger: which coordinators it had, which steps are done, what happened. SQLite in WAL mode, one writer."""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path

import msgspec

log = logging.getLogger("ledger")

SCHEMA = """
CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, started REAL, pid INTEGER, config_digest TEXT);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, epoch INTEGER, version INTEGER, samples INTEGER,
                                  masked INTEGER, prompt_epoch INTEGER, prompt_position INTEGER, kl_coefficient REAL,
                                  facts TEXT);
CREATE TABLE IF NOT EXISTS events (time REAL, epoch INTEGER, kind TEXT, text TEXT);
"""


class LedgerError(Exception):
    """The ledger belongs to another config, or cannot be written."""


class Ledger:
    """Opened by the coordinator alone. ``epoch`` counts the coordinators that this run has had, this one included."""

    def __init__(self, path: Path, config_digest: str, pid: int) -> None:
        self.path = path
        try:
            self.connection = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise LedgerError(f"{path}: cannot be opened: {error}") from error
        try:
            self.epoch = self._next_epoch(config_digest)
            epoch = (self.epoch, time.time(), pid, config_digest)
            self.connection.execute("INSERT INTO epochs VALUES (?, ?, ?, ?)", epoch)
        except BaseException as error:
            self.connection.close()
            if isinstance(error, sqlite3.Error):
                raise LedgerError(f"{path}: cannot be read and written: {error}") from error
            raise

    def _next_epoch(self, config_digest: str) -> int:
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=NORMAL")
        self.connection.executescript(SCHEMA)
        last = self.connection.execute("SELECT epoch, config_digest FROM epochs ORDER BY epoch DESC LIMIT 1").fetchone()
        if last is not None and last[1] != config_digest:
            raise LedgerError(
                f"{self.path} was written under another config: start the changed config under another run.name"
            )
        return 1 if last is None else last[0] + 1

    def step_done(
        self, step: int, *, version: int, samples: int, masked: int, position: tuple[int, int], kl_coefficient: float,
        facts: dict[str, float],
    ) -> None:  # fmt: skip
        """Records a step whose weights are published; raises LedgerError where it cannot be written."""
        row = (
            step,
            self.epoch,
            version,
            samples,
            masked,
            *position,
            kl_coefficient,
            msgspec.json.encode(facts).decode(),
        )
        try:
            self.connection.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise LedgerError(f"{self.path}: step {step} cannot be written: {error}") from error

    def event(self, kind: str, text: str) -> None:
        """Notes what happened. Whoever tells it has more to do, so a note that cannot be written is only logged."""
        row = (time.time(), self.epoch, kind, text)
        try:
            self.connection.execute("INSERT INTO events VALUES (?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            log.error("%s: cannot be written: %s; what it lacks: %s, %s", self.path, error, kind, text)

    def close(self) -> None:
        self.connection.close()
