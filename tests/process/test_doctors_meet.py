"""Doctors in several processes try each other's memory, as they do in several containers."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.config_loading import load_config
from common.run_files import SHM_ROOT
from tests.conftest import ROOT, wait_until
from tools.doctor.finding import Finding
from tools.doctor.folder import CannotMeet, Folder
from tools.doctor.meeting import Meeting
from tools.doctor.memory import NBYTES, FileBuffer
from tools.doctor.report import examine

LIMIT_S = 60.0
DOCTOR = """
import sys
from pathlib import Path
import msgspec
from tools.doctor.meeting import Meeting
name, folder, seconds = sys.argv[1:]
with Meeting(name.startswith("gpu"), name, Path(folder)) as meeting:
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
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        started.append(subprocess.Popen(command, cwd=ROOT, env=hidden, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def told(process: subprocess.Popen[str]) -> list[dict[str, str]]:
    output, _ = process.communicate(timeout=LIMIT_S)
    return json.loads(output)


def findings(process: subprocess.Popen[str]) -> dict[str, str]:
    return {entry["check"]: entry["level"] for entry in told(process)}


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
    meet("next", folder, 0.1)
    assert list(folder.iterdir()) == []


def test_one_that_dies_is_not_waited_for(start: Start, folder: Path) -> None:
    """Its lock goes with it, however fresh its file is; a stopped one is alive until then."""
    dead = start("dead", LIMIT_S)
    wait_until((folder / "dead.here").exists, "it is there", LIMIT_S)
    dead.send_signal(signal.SIGSTOP)
    waits = start("waits", LIMIT_S)
    wait_until((folder / "waits.to.dead.offer").exists, "memory is offered", LIMIT_S)
    began = time.monotonic()
    dead.kill()
    (found,) = told(waits)
    assert (found["check"], found["level"]) == ("memory with dead", "error")
    assert "it went before it answered" in found["found"]
    assert time.monotonic() - began < LIMIT_S / 2


def test_all_leftovers_of_the_dead_are_removed_and_nothing_else(folder: Path) -> None:
    """However old or new they are, answers to the dead too; files of other names are nobody's."""
    left = ["a.here", "a.unfinished", "a.to.b.offer", "a.to.b.memory", "a.to.b.unfinished", "b.to.a.written"]
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").touch()
    for name in left:
        (folder / name).touch()
    with Meeting(False, "me", folder) as meeting:
        assert {path.name for path in folder.iterdir()} == {"me.here", "notes.txt"}
        for name in (*left, "a.to.me.offer", "a.to.me.written", "me.to.a.written"):
            (folder / name).touch()
        assert meeting.folder.others() == set()
        assert {path.name for path in folder.iterdir()} == {"me.here", "notes.txt", "a.to.me.written"}
    assert {path.name for path in folder.iterdir()} == {"notes.txt"}
    (folder / "notes.txt").unlink()


def test_the_living_keep_what_is_theirs(start: Start, folder: Path) -> None:
    with Meeting(False, "me", folder), Meeting(False, "other", folder) as other:
        kept = {"me.here", "other.here", "me.to.other.offer", "me.to.other.memory", "gone.to.me.written"}
        for name in kept - {"me.here", "other.here"}:
            (folder / name).touch()
        other.folder.clear()
        assert {path.name for path in folder.iterdir()} == kept
        assert other.folder.others() == {"me"}


def test_a_name_is_taken_by_one(folder: Path) -> None:
    with Meeting(False, "me", folder):
        with pytest.raises(CannotMeet, match=r"me\.here"), Meeting(False, "me", folder):
            pass
        assert [path.name for path in folder.iterdir()] == ["me.here"]


def test_one_without_memory_to_lend_leaves_at_once(start: Start, folder: Path) -> None:
    """It asks for a GPU that is not there; the other learns that it has gone, and does not wait."""
    waits = start("waits", LIMIT_S)
    wait_until((folder / "waits.here").exists, "it is there", LIMIT_S)
    began = time.monotonic()
    (refused,) = told(start("gpu", LIMIT_S))
    assert (refused["check"], refused["level"]) == ("memory", "error")
    assert "has left the meeting: " in refused["found"]
    assert "GPU 0" in refused["found"]
    assert findings(waits) == {"memory with gpu": "error"}
    assert time.monotonic() - began < LIMIT_S / 2


def test_a_word_that_cannot_be_read_is_a_finding(folder: Path) -> None:
    with Meeting(False, "old", folder), Meeting(False, "me", folder) as meeting:
        (folder / "old.to.me.offer").write_text('{"file": 7}')
        (found, *_) = meeting.hold(0.3)
    assert (found.check, found.level, "another version" in found.found) == ("memory with old", "error", True)


@pytest.mark.parametrize("name", ["../up", "a.b", "a/b", "", "x" * 101])
def test_a_name_that_leads_elsewhere_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(CannotMeet, match="is no name"):
        Folder(folder).enter(name)
    folder.mkdir()


def test_memory_is_found_by_names_alone(folder: Path, tmp_path: Path) -> None:
    """A link there does not lead out of the folder, and a word cannot name a file."""
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(NBYTES))
    with Meeting(False, "me", folder), Meeting(False, "other", folder) as other:
        (folder / "me.to.other.memory").symlink_to(outside)
        (folder / "me.to.other.offer").write_text(json.dumps({"value": 7, "file": str(outside)}))
        other.hold(0.3)
        assert "symbolic" in json.loads((folder / "other.to.me.written").read_text())["problem"]
    assert outside.read_bytes() == bytes(NBYTES)


def as_link(folder: Path, target: Path) -> None:
    folder.symlink_to(target)


def as_another_users(folder: Path, target: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 4242, 4242)


def as_open(folder: Path, target: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def as_file(folder: Path, target: Path) -> None:
    folder.touch()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (as_link, "is not a directory"),
        (as_file, "is not a directory"),
        (as_another_users, "belongs to user 4242"),
        (as_open, "has mode 0770, expected 0700"),
    ],
)
def test_a_folder_that_others_have_a_part_in_is_refused(
    make: Callable[[Path, Path], None], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    folder = tmp_path / f".quartet-doctor-{os.geteuid()}"
    make(folder, target)
    monkeypatch.setattr("tools.doctor.meeting.SHM_ROOT", tmp_path)
    cpu = ["rollout.device=cpu", "trainer.device=cpu", "critic.device=cpu"]
    (found,) = [one for one in examine(load_config("tiny", cpu), 0.2) if one.check == str(folder)]
    assert (found.level, problem in found.found) == ("error", True)
    assert list(target.iterdir()) == []


def test_a_folder_may_go_and_come(folder: Path) -> None:
    """What vanishes between looking and use is skipped, the folder itself too."""
    with Meeting(False, "me", folder) as meeting:
        (folder / "me.here").unlink()
        folder.rmdir()
        (found,) = meeting.hold(0.2)
        assert "nobody else came" in found.found
    folder.mkdir()


def test_many_come_and_go_at_once(start: Start, folder: Path) -> None:
    """Each sweeps while others join and leave: nobody is taken for dead, nothing is left."""
    joined = [0] * 4

    def come_and_go(number: int) -> None:
        for turn in range(100):
            with Meeting(False, f"n{number}-{turn}", folder) as meeting:
                assert (folder / f"n{number}-{turn}.here").exists()
                assert f"n{number}-{turn}" not in meeting.folder.others()
                meeting.folder.clear()
                assert (folder / f"n{number}-{turn}.here").exists()
                joined[number] += 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(come_and_go, number) for number in range(4)]:
            done.result(LIMIT_S)
    assert joined == [100] * 4


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
