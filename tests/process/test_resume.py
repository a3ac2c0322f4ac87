"""``quartet up --resume`` goes on where a run was killed or stopped, and its end is that of the undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.process.killed_runs import KilledRun, Outcome, assert_same, outcome
from tests.process.traps import Trap
from tests.process.whole_runs import GONE_WITHIN, Ended

pytest_plugins = ("tests.process.killed_fixtures",)
pytestmark = pytest.mark.timeout(280)
NewRun = Callable[[], KilledRun]
EVERYBODY = ("rollout-0", "reward-0", "critic-0", "trainer-0", "supervisor", "guardian", "coordinator-0")


def kill(step: int, place: str, nth: int = 1) -> Trap:
    """The whole run is killed there, supervisor, guardian and all."""
    return Trap(
        name=f"{step} {place}", service="coordinator", place=place, step=step, nth=nth, victims=EVERYBODY
    )  # fmt: skip


def stop(step: int, place: str, sig: signal.Signals, nth: int = 1) -> Trap:
    """``quartet up`` is told to stop there, as by Ctrl-C or by ``kill``."""
    return Trap(
        name=f"{step} {place}", service="coordinator", place=place, step=step, nth=nth, victims=("supervisor",),
        signal=sig,
    )  # fmt: skip


def go(run: KilledRun, traps: Sequence[Trap], resume: bool) -> Ended:
    """Starts or resumes the run, and waits until nothing of it lives."""
    ended = run.finish(run.start_killed(traps, resume=resume))
    run.wait_until(lambda: not run.processes(), "the end of every process", GONE_WITHIN)
    return ended


def go_through(run: KilledRun, traps: Sequence[Trap], code_of: Callable[[Trap], int]) -> None:
    """Starts the run and resumes it until its end; it ends early at every trap in turn."""
    for number, trap in enumerate(traps):
        ended = go(run, traps, resume=number > 0)
        assert ended.code == code_of(trap), ended.err
        assert run.sprung() == [trap.name for trap in traps[: number + 1]]
    ended = go(run, traps, resume=True)
    assert ended.code == 0, ended.err


def test_after_sigkill_of_everything_at_every_boundary(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    run = new_killed_run()
    traps = [
        kill(0, "evaluation written"),
        kill(1, "metrics written"),
        kill(2, "step written"),
        kill(3, "state written"),
        kill(7, "phase CHECKPOINT"),
    ]
    go_through(run, traps, lambda trap: -signal.SIGKILL)
    assert_same(outcome(run), undisturbed)
    assert run.summary().epoch == len(traps) + 1
    assert run.summary().steps == 7
    run.assert_nothing_left()


def test_after_a_stop_in_every_phase(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    run = new_killed_run()
    traps = [
        stop(1, "samples", signal.SIGTERM, nth=2),
        stop(2, "heard Evaluated", signal.SIGINT),
        stop(3, "phase EVALUATION", signal.SIGINT),
        stop(4, "commit heard", signal.SIGTERM),
        stop(5, "phase PUBLISH", signal.SIGINT),
        stop(7, "phase CHECKPOINT", signal.SIGTERM),
    ]
    go_through(run, traps, lambda trap: 128 + trap.signal)
    assert_same(outcome(run), undisturbed)
    run.assert_nothing_left()


def test_a_damaged_state_is_told_and_an_older_one_used(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    run = new_killed_run()
    traps = [kill(4, "phase UPDATE"), kill(5, "phase UPDATE")]
    assert go(run, traps, resume=False).code == -signal.SIGKILL
    newest = states(run)[-1]
    flip(next((newest / "trainer").glob("*.distcp")))
    # Its coordinator dies before it has gone back: what it has opened by then fits nothing in the ledger.
    early = Trap(name="opened", service="coordinator", place="opened", step=0)
    assert go(run, [*traps, early], resume=True).code == -signal.SIGKILL
    assert run.sprung() == ["4 phase UPDATE", "5 phase UPDATE", "opened"]
    log = run.log("coordinator")
    assert f"the state after step {number(newest)} is not used: " in log
    assert re.search(rf"back from step {number(newest)} to the state after step {number(newest) - 1}", log)

    newest = states(run)[-1]
    (newest / "state.json").write_bytes((newest / "state.json").read_bytes()[:100])
    ended = go(run, traps, resume=True)
    assert ended.code == 0, ended.err
    assert re.search(rf"the state after step {number(newest)} is not used: .*state\.json", run.log("coordinator"))
    assert_same(outcome(run), undisturbed)


def test_without_any_whole_state_the_run_ends_and_says_why(new_killed_run: NewRun) -> None:
    run = new_killed_run()
    traps = [kill(4, "phase UPDATE")]
    assert go(run, traps, resume=False).code == -signal.SIGKILL
    whole = run.folder / "whole"
    shutil.copytree(run.files.checkpoints, whole)
    for state in states(run):
        flip(next((state / "critic").glob("*.distcp")))
    ended = go(run, traps, resume=True)
    assert ended.code == 1
    assert re.search(r"; no other saved state in .* can be used: step \d+: .*Delete them to begin from", ended.err)
    assert "Traceback" not in ended.err

    shutil.rmtree(run.files.checkpoints)
    shutil.copytree(whole, run.files.checkpoints)
    for state in states(run):
        os.truncate(state / "state.json", 10)
    ended = go(run, traps, resume=True)
    assert ended.code == 1
    assert "no saved state in" in ended.err
    assert "state.json: cannot be read" in ended.err
    assert "Traceback" not in ended.err


def states(run: KilledRun) -> list[Path]:
    """Directories of whole states, the newest last."""
    found = [path.parent for path in run.files.checkpoints.glob("step-*/state.json")]
    return sorted(found, key=number)


def number(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def flip(path: Path) -> None:
    """One bit of the byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
