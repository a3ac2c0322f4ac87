"""A guardian that does not answer is named, killed, and everything ends; nothing waits for ever. Real processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.processes import process_start
from tests.process.supervised import LEAVING, Up, WaitUntil, guardian_of, left_behind
from tools.guardian import Guardian
from tools.starter import GuardianGone, Starter

ANSWER_S = 1.5


@pytest.fixture
def up(run_name: str, tmp_path: Path, wait_until: WaitUntil) -> Iterator[Up]:
    case = Up(run_name, tmp_path, wait_until)
    yield case
    for guardian in (pid for process in case.started if process.poll() is None for pid in starters(process.pid)):
        os.kill(guardian, signal.SIGCONT)  # only after a failure there is one; it has to clean up
    case.close()


def starters(supervisor: int) -> list[int]:
    """The children of a supervisor: its guardian."""
    return list(map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()))


def stuck(guardian: int, request: str) -> str:
    return (
        f"error: the services' guardian (process {guardian}) has not answered '{request}' within {ANSWER_S:g} s: is it "
        "stopped (SIGSTOP), or is the host out of memory? It is killed, and the services are stopped\n"
    )


def stopped_guardian(up: Up) -> int:
    guardian = guardian_of(up)
    os.kill(guardian, signal.SIGSTOP)
    return guardian


@pytest.mark.parametrize("restarts", [0, 5])
def test_a_death_that_a_stopped_guardian_does_not_tell_of_ends_the_run(up: Up, restarts: int) -> None:
    behaviours = {"coordinator-0": "wait", "guardian": str(ANSWER_S), **LEAVING}
    process = up.start(behaviours, restarts=restarts)
    up.running(6)
    left, guardian = left_behind(up), stopped_guardian(up)
    os.kill(up.latest("trainer-0").pid, signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 1
    assert err == stuck(guardian, "reap")
    assert not process_start(guardian)
    assert [pid for pid in left if process_start(pid)] == []
    up.assert_nothing_left()


def test_a_guardian_that_is_stopped_before_the_end_does_not_hold_it_up(up: Up) -> None:
    process = up.start({"coordinator-0": "wait", "guardian": str(ANSWER_S)})
    up.running(6)
    guardian = stopped_guardian(up)
    process.send_signal(signal.SIGINT)
    code, _, err = up.finish(process)
    assert code == 130
    assert err == f"SIGINT: stopping, at most 4 s (once more kills at once)\n{stuck(guardian, 'reap')}"
    assert not process_start(guardian)
    up.assert_nothing_left()


def test_a_guardian_that_is_stopped_while_a_service_waits_for_its_restart(up: Up, wait_until: WaitUntil) -> None:
    """The death has been told; the start that follows it is not answered."""
    process = up.start({"coordinator-0": "wait", "trainer-0": "exit 3", "guardian": str(ANSWER_S)}, restarts=50)
    wait_until(lambda: up.log("trainer-0").count("started again") >= 3, "deaths after which the restart waits")
    (guardian,) = [pid for pid in starters(process.pid) if process_start(pid)]
    os.kill(guardian, signal.SIGSTOP)
    code, _, err = up.finish(process)
    assert code == 1
    assert stuck(guardian, "start") in err or stuck(guardian, "reap") in err
    assert err.count("error: ") == 1
    assert not process_start(guardian)
    up.assert_nothing_left()


def test_a_program_that_cannot_be_started_is_an_error_and_no_traceback(up: Up) -> None:
    code, _, err = up.finish(up.start({"coordinator-0": "wait", "critic-0": "missing"}))
    assert code == 1
    expected = "error: critic cannot be started: [Errno 2] No such file or directory: 'no-such-program'"
    assert err == f"{expected}\nStopping the other services\n"
    assert sorted(path.stem for path in up.files.logs.iterdir())[:2] == ["coordinator-0", "critic-0"]
    assert not (up.files.logs / "trainer-0.log").exists(), "it comes after the critic"
    up.assert_nothing_left()


# ---------------------------------------------------------------- both sides by themselves


def test_a_stopped_guardian_is_killed_at_its_first_question_and_asked_no_more(run_name: str, tmp_path: Path) -> None:
    told: list[str] = []
    starter = Starter(run_name, 1.0, told.append, answer_s=0.5)
    os.kill(starter.pid, signal.SIGSTOP)
    asked = time.monotonic()
    for _ in range(3):
        with pytest.raises(GuardianGone, match=f"process {starter.pid}, which starts the services, was killed"):
            starter.start("trainer", ["true"], {}, tmp_path / "log")
    assert 0.5 <= time.monotonic() - asked < 5.0
    (why,) = told
    assert why.startswith(f"the services' guardian (process {starter.pid}) has not answered 'start' within 0.5 s: ")
    starter.hang_up()
    starter.close()
    assert not process_start(starter.pid)
    assert len(told) == 1


def test_a_guardian_that_does_not_end_is_killed(run_name: str) -> None:
    told: list[str] = []
    starter = Starter(run_name, 1.0, told.append, answer_s=0.5)
    os.kill(starter.pid, signal.SIGSTOP)
    starter.hang_up()
    starter.close()
    assert not process_start(starter.pid)
    (why,) = told
    assert why.startswith(f"the services' guardian (process {starter.pid}) has not ended within 0.5 s. It is killed")


def test_the_guardian_does_not_wait_for_ever_for_an_exit_code(run_name: str, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    guardian = Guardian(run_name, 1.0, theirs, reaped_s=0.3)
    sleeping = [sys.executable, "-c", "import signal; signal.pause()"]
    request = {"start": sleeping, "service": "trainer", "environment": dict(os.environ), "log": str(tmp_path / "log")}
    pid = guardian.answer(request)["pid"]
    with ours, theirs:
        assert guardian.answer({"reap": pid}) == {"error": f"trainer (process {pid}) has no exit code after 0.3 s"}
        os.kill(pid, signal.SIGKILL)
        assert guardian.answer({"reap": pid}) == {"code": -signal.SIGKILL}
        assert guardian.services == {}
