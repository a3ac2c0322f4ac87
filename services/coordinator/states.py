"""Saved states of the run: what it is continued from after a death, a restart, or a reboot of the host.

    checkpoints/step-<n>/trainer/, critic/   written by those services in the background, each renamed when whole
    checkpoints/step-<n>/state.json          written here when all parts are whole: without it the state does not exist

A state is a file tree that no process has open: pruning one is deleting it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from common.config import CheckpointConfig
from common.messages import Role
from common.records import write_whole
from services.coordinator.ledger import StepRecord

log = logging.getLogger("states")

STATE_FILE = "state.json"
RECENT = 8
"""Steps whose parts may still be on their way to the disk."""
_NAME = re.compile(r"^step-(\d+)$")


class StateError(Exception):
    """A saved state is not what it should be; the message names its file."""


class SavedState(Struct, frozen=True, forbid_unknown_fields=True):
    """state.json: the coordinator's part."""

    run: str
    record: StepRecord
    """Data position, KL coefficient and place in the records after this step."""
    epoch: int
    parts: dict[Role, str]
    """What each part is known by (``common.checkpoints.files.Sealed.digest``); empty where nobody noted it."""
    accuracy: float | None = None
    """Of the evaluation after this step, if there was one and it is the best so far."""


class SavedStates:
    """The run's states, newest last. ``roles`` are those that have a part in one."""

    def __init__(self, directory: Path, run: str, epoch: int, roles: Sequence[Role], config: CheckpointConfig) -> None:
        self.directory = directory
        self.run = run
        self.epoch = epoch
        self.roles = tuple(roles)
        self.config = config
        self.whole: dict[int, SavedState] = {}
        self.distrusted: dict[int, str] = {}
        """States that turned out to be damaged, and how."""
        self._parts: dict[int, dict[Role, str]] = {}
        self._records: dict[int, StepRecord] = {}
        self._best: tuple[float, int] | None = None

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def scan(self) -> None:
        """Finds what earlier coordinators left; what is damaged is told and not used."""
        for entry in sorted(self.directory.glob("step-*")):
            found = _NAME.match(entry.name)
            if found is None:
                continue
            step = int(found[1])
            self._parts[step] = {role: "" for role in self.roles if (entry / role).is_dir()}
            try:
                if (entry / STATE_FILE).exists():
                    self._take(step, read_state(entry))
            except StateError as error:
                self.distrust(step, str(error))

    def _take(self, step: int, state: SavedState) -> None:
        if state.run != self.run or state.record.step != step:
            raise StateError(
                f"{self.path(step) / STATE_FILE} is of run {state.run!r}, step {state.record.step}; expected run "
                f"{self.run!r}, step {step}: was the directory copied or renamed?"
            )
        if self._parts[step].keys() >= set(self.roles):
            self._parts[step] |= state.parts
            self.whole[step] = state
            if state.accuracy is not None and (self._best is None or state.accuracy >= self._best[0]):
                self._best = (state.accuracy, step)

    def distrust(self, step: int, why: str) -> None:
        """A state that cannot be restored is no state; its files stay for whoever wants to look at them."""
        log.error("the state after step %d is not used: %s", step, why)
        self.distrusted[step] = why
        self.whole.pop(step, None)

    def newest(self, most: int) -> int:
        """The newest whole state of step ``most`` or before; 0: the run's beginning, which needs no file."""
        return max((step for step in self.whole if step <= most), default=0)

    def has(self, role: Role, step: int) -> bool:
        """Whether this role's part of the state is on disk."""
        if step > 0 and role not in self._parts.get(step, {}) and (self.path(step) / role).is_dir():
            self._parts.setdefault(step, {})[role] = ""  # it has its name since it is whole; who told so was not heard
        return step == 0 or role in self._parts.get(step, {})

    def digest(self, role: Role, step: int) -> str:
        """What this part is known by; empty where nobody noted it."""
        return self._parts.get(step, {}).get(role, "")

    # ------------------------------------------------------------ saving

    def due(self, step: int, every: int, last: int) -> bool:
        """Whether a state is to be saved after ``step``: every so many steps, and after the last."""
        kept = bool(self.config.every) and step % self.config.every == 0
        return step % every == 0 or kept or step == last

    def reached(self, record: StepRecord) -> None:
        """The run has come so far that it could go on from after this step."""
        recent = {step: old for step, old in self._records.items() if step > record.step - RECENT}
        self._records = {**recent, record.step: record}
        for role in self.roles:
            self.has(role, record.step)
        self._complete(record.step)

    def part_saved(self, role: Role, step: int, digest: str) -> None:
        self._parts.setdefault(step, {})[role] = digest
        self._complete(step)

    def evaluated(self, step: int, accuracy: float | None) -> None:
        """The best evaluation's state is kept."""
        if accuracy is None or not self.config.best or (self._best is not None and accuracy <= self._best[0]):
            return
        self._best = (accuracy, step)
        if step in self.whole:
            self._write(step, msgspec.structs.replace(self.whole[step], accuracy=accuracy))
        self.prune()

    def _complete(self, step: int) -> None:
        record = self._records.get(step)
        if (
            record is None
            or step in self.whole
            or step in self.distrusted
            or not self._parts.get(step, {}).keys() >= set(self.roles)
        ):
            return
        accuracy = self._best[0] if self._best is not None and self._best[1] == step else None
        self._write(step, SavedState(self.run, record, self.epoch, dict(self._parts[step]), accuracy))
        self.prune()

    def _write(self, step: int, state: SavedState) -> None:
        write_whole(self.path(step) / STATE_FILE, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        self.whole[step] = state

    # ------------------------------------------------------------ forgetting

    def forget_after(self, step: int) -> None:
        """The run goes back to this step: later states are of a past that will not be."""
        for later in [found for found in self._parts if found > step]:
            if later in self.distrusted:
                self._set_aside(later)
            else:
                self._remove(later)
        self._records = {found: record for found, record in self._records.items() if found <= step}
        self.distrusted = {found: why for found, why in self.distrusted.items() if found <= step}
        if self._best is not None and self._best[1] > step:
            known = [(state.accuracy, at) for at, state in self.whole.items() if state.accuracy is not None]
            self._best = max(known, default=None)

    def prune(self) -> None:
        """Deletes whole states that nothing asks to keep, and parts of older ones that never became whole."""
        newest = sorted(self.whole)[-self.config.keep :]
        old = [step for step in self._parts if newest and step < newest[0] and step not in self.distrusted]
        for step in old:
            regular = bool(self.config.every) and step % self.config.every == 0 and step in self.whole
            best = self._best is not None and step == self._best[1] and step in self.whole
            if not regular and not best:
                self._remove(step)

    def _set_aside(self, step: int) -> None:
        """Gives a distrusted state's files the name ``distrusted-step-<n>``: the step is done, and saved, again."""
        self._parts.pop(step, None)
        path = self.path(step)
        aside = path.with_name(f"distrusted-{path.name}")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be renamed to %s and is removed: %s", path, aside.name, error)
            self._remove(step)

    def _remove(self, step: int) -> None:
        """First state.json: what is half deleted does not exist."""
        self.whole.pop(step, None)
        self._parts.pop(step, None)
        path = self.path(step)
        try:
            (path / STATE_FILE).unlink(missing_ok=True)
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("cannot delete %s: %s", path, error)


def read_state(path: Path) -> SavedState:
    """The coordinator's part of a checkpoint. Raises StateError that names the file."""
    file = path / STATE_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=SavedState)
    except (OSError, msgspec.DecodeError) as error:
        raise StateError(
            f"{file}: cannot be read: {error}; delete {os.fspath(path)} to go on from an older state"
        ) from error
