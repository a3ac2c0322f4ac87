"""state.json: when the disk has it, what that waits for, and what it costs where it cannot be written."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from services.coordinator.states import RECENT, read_state
from tests.unit.saved_states import LIMIT_S, ROLES, on_disk, part, record, save, states


def test_a_state_whose_writing_takes_many_steps_becomes_whole(tmp_path: Path) -> None:
    found = states(tmp_path)
    for step in range(1, RECENT):
        found.reached(record(step))
    for role in ROLES:
        part(found, role, 1)
    assert read_state(tmp_path / "step-1").record == record(1)


def test_older_states_go_when_the_newer_ones_state_json_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the names of all directories up to the run's; the loop goes on meanwhile."""
    directory, synced, go = tmp_path / "checkpoints", list[tuple[str, list[int]]](), threading.Event()
    found, fsync = states(directory, keep=1), os.fsync

    def slow_disk(descriptor: int) -> None:
        assert go.wait(LIMIT_S)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), on_disk(found)))
        fsync(descriptor)

    async def scenario() -> None:
        save(found, 1)
        monkeypatch.setattr(os, "fsync", slow_disk)
        found.write_beside(asyncio.get_running_loop())
        save(found, 2)
        assert (found.newest(9), on_disk(found)) == (1, [1, 2])
        await found.until_written(0.05)
        assert (found.newest(9), on_disk(found)) == (1, [1, 2])
        go.set()
        await found.until_written(LIMIT_S)
        assert (found.newest(9), on_disk(found)) == (2, [2])
        found.close()

    asyncio.run(scenario())
    step = directory / "step-2"
    unfinished = str(step / f".state.json.{os.getpid()}")
    assert synced == [(path, [1, 2]) for path in (unfinished, str(step), str(directory), str(tmp_path))]


def test_what_is_being_written_when_the_run_goes_back_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        found = states(tmp_path)
        save(found, 1)
        found.write_beside(asyncio.get_running_loop())
        save(found, 2)
        found.forget_after(1)
        await found.until_written(LIMIT_S)
        assert (found.newest(9), found.whole.keys()) == (1, {1})
        found.close()

    asyncio.run(scenario())


def test_an_evaluation_that_ends_while_its_state_is_being_written_is_noted(tmp_path: Path) -> None:
    async def scenario() -> None:
        found = states(tmp_path)
        found.write_beside(asyncio.get_running_loop())
        save(found, 1)
        found.evaluated(1, 0.5)
        await found.until_written(LIMIT_S)
        assert read_state(tmp_path / "step-1").accuracy == 0.5
        assert found.whole[1].accuracy == 0.5
        found.close()

    asyncio.run(scenario())


def test_an_evaluation_that_cannot_be_noted_costs_no_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = states(tmp_path)
    save(found, 1)
    file = tmp_path / "step-1" / "state.json"
    file.unlink()
    (file / "in the way").mkdir(parents=True)
    found.evaluated(1, 0.5)
    assert found.newest(9) == 1
    (warning,) = caplog.messages
    assert "the evaluation after step 1 is not noted in its state: " in warning
    assert str(file) in warning


def test_the_best_evaluation_that_was_not_saved_costs_no_state_of_another(tmp_path: Path) -> None:
    found = states(tmp_path, keep=1)
    save(found, 1)
    found.evaluated(1, 0.5)
    found.reached(record(2))
    found.evaluated(2, 0.9)
    save(found, 3, 4)
    assert on_disk(found) == [1, 4]
