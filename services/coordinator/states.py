"""Saved states of the run: what it is continued from after a death, a restart, or a reboot of the host.

    checkpoints/step-<n>/trainer/, critic/   written by those services in the background, each renamed when whole
    checkpoints/step-<n>/state.json          written here when all parts are whole: without it the state does not exist

A state is a file tree that no process has open: pruning one is deleting it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from common.config import CheckpointConfig
from common.messages import Role
from common.records import sync_directory, write_whole
from common.run_files import STATE_FILE, state_directories, state_directory
from services.coordinator.ledger import StepRecord

log = logging.getLogger("states")

RECENT = 1000
"""Steps whose parts may still be on their way to the disk: writing may take long, and a step be short."""


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
    """Of the evaluation after this step, if there was one."""


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
        self.late: Counter[int] = Counter()
        """How often the restoring of a state did not end in time since the run last got on."""
        self._parts: dict[int, dict[Role, str]] = {}
        self._records: dict[int, StepRecord] = {}
        self._accuracies: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._writing: dict[int, SavedState] = {}
        """What is to be in a state.json that the disk does not have yet."""
        self._jobs: set[asyncio.Future[OSError | None]] = set()

    def path(self, step: int) -> Path:
        return state_directory(self.directory, step)

    def scan(self) -> None:
        """Finds what earlier coordinators left; what is damaged is told and not used."""
        for step, entry in state_directories(self.directory).items():
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

    def distrust(self, step: int, why: str) -> None:
        """A state that cannot be restored is no state; its files stay for whoever wants to look at them."""
        log.error("the state after step %d is not used: %s", step, why)
        self.distrusted[step] = why
        self.whole.pop(step, None)
        self._writing.pop(step, None)

    def not_in_time(self, step: int) -> None:
        """It was not restored within its time, which says nothing of its files."""
        self.late[step] += 1

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

    def reached(self, record: StepRecord) -> None:
        """The run has come so far that it could go on from after this step."""
        self.late.clear()
        self._records.pop(record.step, None)
        self._records[record.step] = record
        if len(self._records) > RECENT:
            del self._records[next(iter(self._records))]
        for role in self.roles:
            self.has(role, record.step)
        self._complete(record.step)

    def part_saved(self, role: Role, step: int, digest: str) -> None:
        self._parts.setdefault(step, {})[role] = digest
        self._complete(step)

    def evaluated(self, step: int, accuracy: float | None) -> None:
        """The state of the best evaluation is kept."""
        if accuracy is None or not self.config.best:
            return
        self._accuracies[step] = accuracy
        state = self._writing.get(step) or self.whole.get(step)
        if state is not None and state.accuracy != accuracy:
            self._write(step, msgspec.structs.replace(state, accuracy=accuracy))

    def _complete(self, step: int) -> None:
        record, parts = self._records.get(step), self._parts.get(step, {})
        known = step in self.whole or step in self._writing or step in self.distrusted
        if record is not None and not known and parts.keys() >= set(self.roles):
            accuracy = self._accuracies.get(step)
            self._write(step, SavedState(self.run, record, self.epoch, dict(parts), accuracy))

    # ------------------------------------------------------------ state.json

    def write_beside(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on files are written in a thread beside this loop, since that waits for the disk."""
        self._loop = loop

    def _write(self, step: int, state: SavedState) -> None:
        """Has state.json written. The state is whole, and older ones go, when the disk has it."""
        self._writing[step] = state
        if self._loop is None:
            self._written(step, state, self._store(step, state))
            return
        job = self._loop.run_in_executor(self._thread, self._store, step, state)
        self._jobs.add(job)
        job.add_done_callback(lambda _: self._stored(step, state, job))

    def _stored(self, step: int, state: SavedState, job: asyncio.Future[OSError | None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            self._written(step, state, job.result())

    def _store(self, step: int, state: SavedState) -> OSError | None:
        """In the thread. Durable are the file, and the names of all directories up to the run's."""
        content = msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"
        try:
            write_whole(self.path(step) / STATE_FILE, content, durable=True)
            for directory in (self.directory, self.directory.parent):
                sync_directory(directory)
        except OSError as error:
            return error
        return None

    def _written(self, step: int, state: SavedState, error: OSError | None) -> None:
        """A state.json that cannot be written costs this state, and not the run."""
        if self._writing.get(step) is not state:
            return  # it is written again, or the run has gone back
        del self._writing[step]
        if error is None:
            self.whole[step] = state
            self.prune()
        elif step in self.whole:
            log.warning("the evaluation after step %d is not noted in its state: %s", step, error)
        else:
            log.warning("the state after step %d is not saved: %s", step, error)

    async def until_written(self, timeout: float) -> None:
        """Waits until the disk has what is being written here."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=timeout)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

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
        self._accuracies = {found: accuracy for found, accuracy in self._accuracies.items() if found <= step}
        self._writing = {found: state for found, state in self._writing.items() if found <= step}

    def prune(self) -> None:
        """Deletes whole states that nothing asks to keep, and parts of older ones that never became whole."""
        newest = sorted(self.whole)[-self.config.keep :]
        old = [step for step in self._parts if newest and step < newest[0] and step not in self.distrusted]
        best = self._best()
        for step in old:
            regular = bool(self.config.every) and step % self.config.every == 0 and step in self.whole
            if not regular and step != best:
                self._remove(step)

    def _best(self) -> int | None:
        """The whole state of the best evaluation, if one is to be kept; of equals the first."""
        known = [(state.accuracy, -step) for step, state in self.whole.items() if state.accuracy is not None]
        return -max(known)[1] if known and self.config.best else None

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
        self._writing.pop(step, None)
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
