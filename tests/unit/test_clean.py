"""The run lock and ``clean``: a live run is never touched, a dead one goes whole, and neither races with a start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import processes
from common.run_files import SharedDirectory
from common.run_lock import RunLock, RunLocked, holder, is_held_by, record_supervisor, supervisor
from tools.clean import clean, shared_directories

HOLD = """
import signal, sys
from common.run_files import SharedDirectory
from common.run_lock import RunLock
lock = RunLock.acquire(SharedDirectory.of_run(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""
SUPERVISE = """
import signal, sys
from common.run_files import SharedDirectory
from common.run_lock import record_supervisor
record_supervisor(SharedDirectory.of_run(sys.argv[1]))
print("recorded", flush=True)
signal.pause()
"""
CHURN = """
import sys
from common.run_files import SharedDirectory
from common.run_lock import RunLock
shared = SharedDirectory.of_run(sys.argv[1])
for turn in range(150):
    lock = RunLock.acquire(shared)
    (shared.path / "tokens").write_bytes(b"x")
    assert shared.lock.stat().st_ino
    assert (shared.path / "tokens").read_bytes() == b"x"
    lock.release()
print("done")
"""


@pytest.fixture
def shared(run_name: str) -> SharedDirectory:
    return SharedDirectory.of_run(run_name)


@pytest.fixture
def python(run_name: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts Python code that gets the run's name as its argument."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", code, run_name], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def leave_a_dead_run(shared: SharedDirectory) -> None:
    lock = RunLock.acquire(shared)
    shared.tokens.write_bytes(b"x" * 8192)
    shared.weights.mkdir()
    (shared.weights / "policy").write_bytes(b"w")
    lock.release()


def test_a_lock_is_exclusive_and_names_its_holder(
    shared: SharedDirectory, run_name: str, python: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = python(HOLD)
    assert first_line(process) == "held"
    assert shared.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(RunLocked, match=rf"run '{run_name}' is live: process {process.pid} ") as caught:
        RunLock.acquire(shared)
    assert (caught.value.run, caught.value.pid) == (run_name, process.pid)
    assert holder(shared) == process.pid
    assert is_held_by(shared, process.pid)
    assert not is_held_by(shared, os.getpid())


def test_a_lock_whose_directory_was_deleted_by_hand_does_not_touch_the_next_run(shared: SharedDirectory) -> None:
    first = RunLock.acquire(shared)
    shutil.rmtree(shared.path)
    second = RunLock.acquire(shared)
    shared.status.write_bytes(b"{}")
    assert first.clear_directory() == 0
    assert first.remove_directory() == 0
    assert shared.status.read_bytes() == b"{}"
    assert is_held_by(shared, os.getpid())
    shutil.rmtree(shared.path)
    assert second.remove_directory() == 0
    assert not shared.path.exists()


def test_the_lock_of_a_killed_holder_is_free(
    shared: SharedDirectory, python: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = python(HOLD)
    assert first_line(process) == "held"
    process.kill()
    process.wait()
    assert holder(shared) is None
    lock = RunLock.acquire(shared)
    assert holder(shared) == os.getpid()
    lock.release()
    assert holder(shared) is None


def test_a_live_run_is_not_touched(run_lock: RunLock, run_name: str) -> None:
    run_lock.shared.tokens.write_bytes(b"x")
    child = subprocess.Popen(["/bin/sh", "-c", "read x"], stdin=subprocess.PIPE)
    try:
        entry = processes.register(run_lock.shared.processes, "trainer", 0, child.pid)
        assert clean(run_name) == []
        assert all(removed.run != run_name for removed in clean())
        assert run_lock.shared.tokens.read_bytes() == b"x"
        assert processes.registered(run_lock.shared.processes) == [entry]
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()


def test_a_run_without_coordinator_is_not_dead_while_its_supervisor_lives(
    shared: SharedDirectory, run_name: str, python: Callable[[str], subprocess.Popen[str]]
) -> None:
    leave_a_dead_run(shared)
    assert supervisor(shared) is None
    process = python(SUPERVISE)
    assert first_line(process) == "recorded"
    assert (holder(shared), supervisor(shared)) == (None, process.pid)
    assert clean(run_name) == []
    assert shared.tokens.exists()
    process.kill()
    process.wait()
    assert supervisor(shared) is None
    assert [removed.run for removed in clean(run_name)] == [run_name]
    assert not shared.path.exists()


def test_a_supervisor_cleans_up_after_its_own_run(shared: SharedDirectory, run_name: str) -> None:
    leave_a_dead_run(shared)
    record_supervisor(shared)
    lock = RunLock.acquire(shared)
    assert lock.clear_directory() >= 8192
    lock.release()
    assert not shared.tokens.exists()
    assert supervisor(shared) == os.getpid(), "a coordinator that begins anew is supervised as well"
    assert [removed.run for removed in clean(run_name)] == [run_name]


def test_who_has_ended_is_taken_off_the_list(run_lock: RunLock) -> None:
    listed = run_lock.shared.processes
    first, second = (processes.register(listed, "reward", number, os.getpid()) for number in (0, 1))
    processes.unregister(listed, "reward", 0, os.getpid())
    processes.unregister(listed, "reward", 0, os.getpid())
    assert processes.registered(listed) == [second]
    assert first != second


def test_a_dead_run_goes_with_its_processes(shared: SharedDirectory, run_name: str) -> None:
    leave_a_dead_run(shared)
    child = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; read x"], stdin=subprocess.PIPE)
    try:
        entry = processes.register(shared.processes, "trainer", 0, child.pid)
        (removed,) = clean(run_name)
        assert (removed.run, removed.path, removed.killed) == (run_name, str(shared.path), [entry])
        assert removed.freed_bytes >= 8192
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
    assert not shared.path.exists()
    assert clean(run_name) == []


def test_a_process_that_got_an_old_pid_is_not_killed(shared: SharedDirectory, run_name: str) -> None:
    leave_a_dead_run(shared)
    child = subprocess.Popen(["/bin/sh", "-c", "read x"], stdin=subprocess.PIPE)
    try:
        path = shared.processes
        entry = processes.register(path, "trainer", 0, child.pid)
        text = next(path.glob("*.json")).read_text()
        next(path.glob("*.json")).write_text(text.replace(str(entry.start), str(entry.start - 1)))
        (removed,) = clean(run_name)
        assert removed.killed == []
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()


def test_a_directory_without_a_lock_file_is_dead(shared: SharedDirectory, run_name: str) -> None:
    shared.path.mkdir(mode=0o700)
    shared.tokens.write_bytes(b"x")
    assert [removed.run for removed in clean(run_name)] == [run_name]
    assert not shared.path.exists()


def test_a_symbolic_link_is_neither_listed_nor_locked(shared: SharedDirectory, run_name: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    shared.path.symlink_to(tmp_path)
    try:
        assert shared.path not in [found.path for found in shared_directories()]
        assert clean(run_name) == []
        with pytest.raises(PermissionError, match="is not a directory of this user"):
            RunLock.acquire(shared)
    finally:
        shared.path.unlink()
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_link_inside_a_dead_run_is_not_followed(shared: SharedDirectory, run_name: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    leave_a_dead_run(shared)
    (shared.path / "link").symlink_to(tmp_path)
    assert len(clean(run_name)) == 1
    assert not shared.path.exists()
    assert (tmp_path / "precious").read_text() == "kept"


def test_cleaning_does_not_race_with_a_start(
    shared: SharedDirectory, run_name: str, python: Callable[[str], subprocess.Popen[str]]
) -> None:
    """A coordinator that has its lock keeps its files, however often others clean meanwhile."""
    process = python(CHURN)
    finished = threading.Event()

    def wait() -> None:
        process.wait(60)
        finished.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    removed = 0
    while not finished.is_set():
        removed += len(clean(run_name))
    waiting.join()
    assert process.returncode == 0
    assert first_line(process) == "done"
    assert removed > 0, "nothing was cleaned between two locks: the race was not tried"
