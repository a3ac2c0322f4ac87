"""The run's ledger: which coordinators it had, which steps are done, what happened. SQLite in WAL mode, one writer.

``journal.py`` keeps samples and leases in the same database.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from common.config_changes import misfits
from common.config_loading import ConfigError, from_json
from common.run_files import file_identity

log = logging.getLogger("ledger")

LAYOUT = 2
CACHE = "cache"
"""Kind of the event that says which token cache the journal belongs to."""
R = TypeVar("R", bound=Struct)
SCHEMA = """
CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, started REAL, pid INTEGER, config TEXT);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, epoch INTEGER, record TEXT);
CREATE TABLE IF NOT EXISTS evaluations (step INTEGER PRIMARY KEY, epoch INTEGER, record TEXT);
CREATE TABLE IF NOT EXISTS versions (time REAL, epoch INTEGER, version INTEGER, event TEXT);
CREATE TABLE IF NOT EXISTS events (time REAL, epoch INTEGER, kind TEXT, text TEXT);
CREATE TABLE IF NOT EXISTS samples (step INTEGER, wave INTEGER, sample INTEGER, slot INTEGER, generation INTEGER,
                                    state TEXT, finished BLOB, score BLOB, masked TEXT,
                                    PRIMARY KEY (step, wave, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases (work INTEGER PRIMARY KEY, epoch INTEGER, step INTEGER, phase TEXT, role TEXT,
                                   replica INTEGER, pid INTEGER, task TEXT, digest BLOB, slots BLOB, given REAL,
                                   state TEXT, ended REAL, result BLOB);
CREATE INDEX IF NOT EXISTS leases_by_digest ON leases (digest) WHERE digest IS NOT NULL;
"""


class LedgerError(Exception):
    """The ledger belongs to another config, or cannot be read or written."""


class RecordSizes(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of the run's record files that belong to what is done; what follows is cut off when a step is repeated."""

    metrics: int = 0
    samples: int = 0


class StepRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A step whose weights are published: all that is needed to go on from it, and its share of the summary."""

    step: int
    version: int
    samples: int
    masked: int
    position: tuple[int, int]
    """(pass over the rows, rows of it that were looked at) after this step."""
    kl_coefficient: float
    """Of the next step."""
    sizes: RecordSizes
    reward: float | None
    step_s: float
    idle_s: float
    phase_s: dict[str, float]


class EvaluationRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """An evaluation that is written down; ``accuracy`` is None where no sample could be scored."""

    step: int
    accuracy: float | None
    sizes: RecordSizes


class Ledger:
    """Opened by the coordinator alone. ``epoch`` counts the coordinators that this run has had, this one included.

    ``config`` is the resolved config as JSON; it must fit that of the coordinator before (``config_changes``).
    """

    def __init__(self, path: Path, config: bytes, pid: int) -> None:
        self.path = path
        try:
            self.connection = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise LedgerError(f"{path}: cannot be opened: {error}") from error
        try:
            with self.naming("the start of a coordinator"):
                self._prepare()
                last = "SELECT epoch, config FROM epochs ORDER BY epoch DESC LIMIT 1"
                epoch, earlier = self.connection.execute(last).fetchone() or (0, None)
                self.epoch: int = epoch + 1
                if earlier is not None:
                    self._require_fit(earlier, config)
                row = (self.epoch, time.time(), pid, config.decode())
                self.connection.execute("INSERT INTO epochs VALUES (?, ?, ?, ?)", row)
        except BaseException:
            self.connection.close()
            raise

    def _prepare(self) -> None:
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=NORMAL")
        self.connection.execute("PRAGMA wal_autocheckpoint=0")  # it waits for the disk: see ``move_log``
        (layout,) = self.connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and layout != LAYOUT:
            raise LedgerError(
                f"{self.path} has layout {layout}, expected {LAYOUT}: it was written by another version of quartet; "
                "start the run under another run.name"
            )
        self.connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={LAYOUT}; COMMIT;")

    @contextmanager
    def naming(self, what: str) -> Generator[None]:
        """Turns SQLite's errors, such as of a full disk or a damaged file, into a LedgerError that names the file."""
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise LedgerError(f"{self.path}: {what} cannot be read or written: {error}") from error

    def write(self, what: str, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """One statement for each row, all of them or none. Raises LedgerError."""
        with self.naming(what):
            self.connection.execute("BEGIN")
            try:
                self.connection.executemany(statement, rows)
            except BaseException:
                if self.connection.in_transaction:  # a full disk has ended it
                    self.connection.execute("ROLLBACK")
                raise
            self.connection.execute("COMMIT")

    def _require_fit(self, earlier: str, config: bytes) -> None:
        """Raises LedgerError, with every difference, where this config does not fit that which the run began with."""
        try:
            differences = misfits(from_json(earlier.encode()), from_json(config))
        except ConfigError as error:
            raise LedgerError(f"{self.path}: the config that the run was begun with: {error}") from error
        if differences:
            listed = "; ".join(map(str, differences))
            raise LedgerError(
                f"{self.path} was written under another config: {listed}. Go on with the config that the run was begun "
                "with, or choose another run.name"
            )

    def move_log(self) -> None:
        """Moves what is in the write-ahead log into the database file, and waits for the disk. For another thread."""
        with self.naming("the write-ahead log"), closing(sqlite3.connect(self.path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def bind(self, cache: Path) -> None:
        """What the journal says of slots is true of this token cache, and no other: see ``bound_to``."""
        self.event(CACHE, str(file_identity(str(cache))))

    # ------------------------------------------------------------ what is done

    def step_done(self, record: StepRecord) -> None:
        """Records a step whose weights are published; raises LedgerError where it cannot be written."""
        row = (record.step, self.epoch, msgspec.json.encode(record).decode())
        self.write(f"step {record.step}", "INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", [row])

    def evaluation_done(self, record: EvaluationRecord) -> None:
        row = (record.step, self.epoch, msgspec.json.encode(record).decode())
        what = f"the evaluation after step {record.step}"
        self.write(what, "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)", [row])

    def steps(self, after: int = 0) -> Iterator[StepRecord]:
        """Steps that are done, in order, read one by one. Raises LedgerError for a damaged file."""
        return self._records("steps", StepRecord, after)

    def last_step(self) -> StepRecord | None:
        """The step that was done last."""
        with self.naming("steps"):
            (last,) = self.connection.execute("SELECT max(step) FROM steps").fetchone()
        return None if last is None else next(self.steps(after=last - 1))

    def evaluations(self) -> Iterator[EvaluationRecord]:
        return self._records("evaluations", EvaluationRecord, -1)

    def _records(self, table: str, kind: type[R], after: int) -> Iterator[R]:
        with self.naming(table):
            query = f"SELECT record FROM {table} WHERE step > ? ORDER BY step"
            for (record,) in self.connection.execute(query, (after,)):
                yield msgspec.json.decode(record, type=kind)

    def forget_after(self, step: int) -> None:
        """The run goes back to what it was after ``step``, before the evaluation that may follow it."""
        for table in ("steps", "samples", "leases"):
            self.write(table, f"DELETE FROM {table} WHERE step > ?", [(step,)])
        self.write("evaluations", "DELETE FROM evaluations WHERE step >= ?", [(step,)])
        self.write("samples", "DELETE FROM samples WHERE step = ? AND wave > 0", [(step,)])

    # ------------------------------------------------------------ what happened

    def event(self, kind: str, text: str) -> None:
        """Notes what happened. Whoever tells it has more to do, so a note that cannot be written is only logged."""
        self._note("events", (time.time(), self.epoch, kind, text))

    def committed(self, version: int) -> None:
        """Notes a policy version that the trainer has committed."""
        self._note("versions", (time.time(), self.epoch, version, "committed"))

    def _note(self, table: str, row: tuple[Any, ...]) -> None:
        try:
            self.connection.execute(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            log.error("%s: cannot be written: %s; what it lacks: %s", self.path, error, row[2:])

    def close(self) -> None:
        self.connection.close()


def bound_to(ledger: Path, cache: Path) -> bool:
    """Whether the journal in a ledger tells of the slots of this very cache; a new one may lie at the same path."""
    if not cache.exists() or not ledger.exists():
        return False
    query = "SELECT text FROM events WHERE kind = ? ORDER BY rowid DESC LIMIT 1"
    try:
        with closing(sqlite3.connect(ledger)) as connection:
            row = connection.execute(query, (CACHE,)).fetchone()
    except sqlite3.Error as error:
        log.warning("%s: cannot be read: %s", ledger, error)
        return False
    return row is not None and row[0] == str(file_identity(str(cache)))
