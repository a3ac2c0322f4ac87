"""Doctors in several processes try each other's memory, as they do in several containers."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.run_files import SHM_ROOT
from tests.conftest import ROOT, wait_until
from tools.doctor.finding import Finding
from tools.doctor.meeting import Meeting
from tools.doctor.memory import NBYTES, FileBuffer

LIMIT_S = 60.0
DOCTOR = """
import sys
from pathlib import Path
import msgspec
from tools.doctor.meeting import Meeting
from tools.doctor.memory import NBYTES, FileBuffer
name, folder, seconds = sys.argv[1:]
with Meeting(False, name, Path(folder)) as meeting:
    print(msgspec.json.encode(meeting.hold(float(seconds))).decode())
"""
Start = Callable[[str, float], "subprocess.Popen[str]"]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = SHM_ROOT / f".quartet-doctor-test-{uuid.uuid4().hex[:8]}"
    yield path
    assert list(path.iterdir()) == []
    path.rmdir()


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(name: str, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DOCTOR, name, str(folder), str(seconds)]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def findings(process: subprocess.Popen[str]) -> dict[str, str]:
    output, _ = process.communicate(timeout=LIMIT_S)
    return {entry["check"]: entry["level"] for entry in json.loads(output)}


def meet(name: str, folder: Path, seconds: float) -> list[Finding]:
    with Meeting(False, name, folder) as meeting:
        return meeting.hold(seconds)


def test_three_find_each_other_and_leave_nothing(start: Start) -> None:
    doctors = {name: start(name, LIMIT_S) for name in ("one", "two", "three")}
    for name, doctor in doctors.items():
        assert findings(doctor) == {f"memory with {other}": "ok" for other in doctors if other != name}


def test_nobody_comes(folder: Path) -> None:
    (found,) = meet("alone", folder, 0.3)
    assert (found.level, "nobody else came within 0.3 s" in found.found) == ("error", True)


def test_one_that_is_stopped_is_told_of_and_what_it_leaves_is_cleared(start: Start, folder: Path) -> None:
    stopped = start("stopped", LIMIT_S)
    wait_until((folder / "stopped.here").exists, "it is there", LIMIT_S)
    stopped.send_signal(signal.SIGSTOP)
    (found,) = meet("other", folder, 1.0)
    assert found == Finding("memory with stopped", "error", "it did not answer in time", found.why, found.change)
    stopped.kill()
    stopped.wait(LIMIT_S)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    meet("next", folder, 0.1)


class Elsewhere(FileBuffer):
    """Memory of this process alone, though there is a file of that name: as with two /dev/shm."""

    def __init__(self, path: Path, value: int) -> None:
        super().__init__(path, value)
        self.map = mmap.mmap(-1, NBYTES)


def test_memory_that_is_not_shared_is_found_out(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.doctor.meeting.FileBuffer", Elsewhere)
    other = start("other", LIMIT_S)
    (found,) = meet("me", folder, LIMIT_S)
    assert (found.level, found.found) == ("error", "what it wrote did not arrive")
    assert findings(other) == {"memory with me": "ok"}
