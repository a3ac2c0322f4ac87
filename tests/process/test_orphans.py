"""Nothing outlives its run, whoever is killed: the supervisor, the guardian, a service, or what services start."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.processes import descendants, is_alive, process_start
from common.run_lock import holder
from tests.process.supervised import LEAVING, Up, WaitUntil, guardian_of, left_behind
from tests.process.whole_runs import ENDLESS, FUNCTIONS, GONE_WITHIN, WholeRun, finish


@pytest.fixture
def up(run_name: str, tmp_path: Path, wait_until: WaitUntil) -> Iterator[Up]:
    case = Up(run_name, tmp_path, wait_until)
    yield case
    case.close()


def test_a_killed_supervisor_takes_everything_with_it(up: Up, wait_until: WaitUntil) -> None:
    """Also who obeys nobody, who is stopped, and what is in a session and an environment of its own."""
    process = up.start({"coordinator-0": "wait", "trainer-0": "deaf", **LEAVING}, restarts=5, stop_s=2.0)
    wait_until((up.files.path / "deaf").exists, "trainer ignores SIGTERM")
    wait_until(lambda: len(up.on_the_list()) == 6, "all are registered")
    seen, left, guardian = up.on_the_list(), left_behind(up), guardian_of(up)
    os.kill(seen["coordinator-0"].pid, signal.SIGSTOP)  # it can neither tell others nor clean up after itself
    process.kill()
    code, _, err = up.finish(process)  # standard error is open until the guardian has ended
    assert code == -signal.SIGKILL
    assert err == f"warning: `quartet up` is gone: stopping run '{up.run}', at most 2 s\n"
    assert [name for name, entry in seen.items() if is_alive(entry)] == []
    assert [pid for pid in left if process_start(pid)] == []
    assert not up.shared.path.exists()
    wait_until(lambda: not process_start(guardian), "the guardian's end")


def test_services_of_a_killed_supervisor_may_end_by_themselves(up: Up) -> None:
    process = up.start({"coordinator-0": "wait"}, stop_s=15.0)
    up.running(6)
    process.kill()
    up.finish(process)
    assert "trainer 0 stops: the run ends" in up.log("trainer-0")
    up.assert_nothing_left()


def test_a_killed_guardian_ends_the_run(up: Up) -> None:
    process = up.start({"coordinator-0": "wait", **LEAVING}, restarts=5)
    up.running(6)
    left, guardian = left_behind(up), guardian_of(up)
    os.kill(guardian, signal.SIGKILL)
    code, _, err = up.finish(process)
    assert code == 1
    assert err == f"error: the services' guardian (process {guardian}) was killed: stopping them\n"
    assert [pid for pid in left if process_start(pid)] == []
    up.assert_nothing_left()


def test_after_supervisor_and_guardian_the_next_start_cleans_up(up: Up, wait_until: WaitUntil) -> None:
    process = up.start({"coordinator-0": "wait", "trainer-0": "deaf"})
    wait_until((up.files.path / "deaf").exists, "trainer ignores SIGTERM")
    wait_until(lambda: len(up.on_the_list()) == 6, "all are registered")
    seen, guardian = up.on_the_list(), guardian_of(up)
    os.kill(seen["coordinator-0"].pid, signal.SIGSTOP)  # it cannot clean up after itself
    os.kill(process.pid, signal.SIGSTOP)  # nor does either of the two see the other's end
    for pid in (guardian, process.pid):
        os.kill(pid, signal.SIGKILL)
    obedient = [entry for name, entry in seen.items() if name not in ("trainer-0", "coordinator-0")]
    wait_until(lambda: not any(map(is_alive, obedient)), "replicas end with their parent")
    os.kill(seen["coordinator-0"].pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(seen["coordinator-0"]), "coordinator is dead")
    assert is_alive(seen["trainer-0"])
    assert up.shared.path.exists()
    code, _, err = up.finish(up.start({"coordinator-0": "steps 1"}))
    assert code == 0
    assert f"removed what the dead run '{up.run}' left in {up.shared.path}, killed 1 processes" in err
    assert f"starting over, its earlier files are in runs/{up.run}/attempt-1" in err
    assert (up.files.path / "attempt-1" / "logs" / "trainer-0.log").exists()
    assert not is_alive(seen["trainer-0"])
    assert not up.shared.path.exists()


# ---------------------------------------------------------------- real services


def sandbox_of(run: WholeRun, wait_until: WaitUntil) -> int:
    wait_until((run.folder / "sandbox").exists, "the start of the sandbox", 60.0)
    pid = int((run.folder / "sandbox").read_text())
    assert process_start(pid)
    return pid


SANDBOX = (*ENDLESS, f"reward.function={FUNCTIONS / 'leaving.py'}:sandbox", "reward.timeout_s=60", "timeouts.stop=4")


def test_a_scorers_sandbox_goes_with_a_killed_supervisor(run: WholeRun, wait_until: WaitUntil) -> None:
    process = run.start(*SANDBOX)
    sandbox = sandbox_of(run, wait_until)
    process.kill()
    finish(process)
    assert not process_start(sandbox)
    run.assert_nothing_left(within=0.0)
    assert holder(run.shared) is None


def test_a_scorers_sandbox_goes_with_its_service_which_is_started_again(run: WholeRun, wait_until: WaitUntil) -> None:
    process = run.start(*SANDBOX)
    first = sandbox_of(run, wait_until)
    (run.folder / "sandbox").unlink()
    service = run.pid("reward")
    started = descendants(service)
    assert first in started
    os.kill(service, signal.SIGKILL)
    second = sandbox_of(run, wait_until)
    assert [pid for pid in started if process_start(pid)] == []
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130
    assert re.search(rf"warning: reward-0 \(process {service}\) killed by SIGKILL, started again as", ended.err)
    assert not process_start(second)
    run.assert_nothing_left(within=0.0)


def test_a_scorer_that_is_killed_costs_nothing(run: WholeRun, wait_until: WaitUntil) -> None:
    process = run.start(*ENDLESS)
    run.reach(2)
    service = run.pid("reward")
    (scorer,) = descendants(service)
    os.kill(scorer, signal.SIGKILL)
    wait_until(lambda: scorer not in descendants(service) and bool(descendants(service)), "another scorer", GONE_WITHIN)
    status = run.status()
    assert status is not None
    run.reach(status.step + 2)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130
    assert "warning" not in ended.err
    run.assert_nothing_left()
