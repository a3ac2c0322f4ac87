"""States that are not restored in time: their files are kept, and used again, and the run ends after a few tries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.coordinator.training import RESTORE_TRIES
from tests.process.killed_runs import KilledRun, Outcome, survive
from tests.process.test_coordinator import Run, Wait
from tests.process.traps import Trap

pytest_plugins = ("tests.process.killed_fixtures",)
pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def run(run_name: str, tmp_path: Path, wait_until: Wait) -> Iterator[Run]:
    limits = ("timeouts.checkpoint=0.5", "timeouts.generate=0.5")
    started = Run(run_name, tmp_path, wait_until, "run.steps=1000000", *limits)
    yield started
    started.close()


def states(run: Run) -> list[str]:
    return sorted(path.parent.name for path in run.files.checkpoints.glob("*/state.json"))


def test_a_run_whose_state_is_never_restored_in_time_ends_and_keeps_it(run: Run) -> None:
    """The learner is killed in each try, since it is stuck, and comes back."""
    run.join()
    run.wait_until(lambda: len(states(run)) == 2, "two saved states")
    run.replicas.started[2].kill()
    for number in range(1, RESTORE_TRIES + 1):
        critic = run.replicas.start("critic", number, "block:CHECKPOINT")
        run.wait_until(lambda critic=critic: critic.poll() is not None, f"the end of critic {number}", 20.0)
    assert run.ended(20.0) == 1
    assert run.log.count("was not restored to step") >= RESTORE_TRIES
    assert f"that happened {RESTORE_TRIES} times" in run.log
    assert "larger timeouts.checkpoint (0.5 s): `quartet up --resume`" in run.log
    assert "Traceback" not in run.log
    kept = states(run)
    assert len(kept) == 2
    assert not list(run.files.checkpoints.glob("distrusted-*"))
    for state in kept:
        parts = json.loads((run.files.checkpoints / state / "state.json").read_text())["parts"]
        assert sorted(parts) == ["critic", "trainer"]


def test_one_slow_restore_costs_nothing_but_time(new_killed_run: Callable[[], KilledRun], undisturbed: Outcome) -> None:
    run = survive(
        new_killed_run,
        [
            Trap(name="critic", service="critic", place="values learnt", step=3),
            # Set later, and so come by first.
            Trap(name="slow", service="critic", place="restoring", step=2, until="rewind"),
            Trap(name="rewind", service="coordinator", place="phase REWIND", step=3, until="rewind"),
        ],
        undisturbed,
        "timeouts.checkpoint=4",
        within=25.0,
    )
    assert "critic 0 was not restored to step 2 within timeouts.checkpoint (4 s)" in run.log("coordinator")
    assert "is not used" not in run.log("coordinator")
    assert not list(run.files.checkpoints.glob("distrusted-*"))
