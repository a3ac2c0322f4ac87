"""Several services die at once, replacements die while they are restored, runs go back over several steps, and one
stops until its lease has run out and goes on then."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence

import pytest

from tests.process.killed_runs import RECOVERY_S, KilledRun, Outcome, assert_same, outcome, survive
from tests.process.traps import Trap, mark_of

pytest_plugins = ("tests.process.killed_fixtures",)
pytestmark = pytest.mark.timeout(280)
NewRun = Callable[[], KilledRun]
REPLICAS = ("rollout-0", "reward-0", "critic-0", "trainer-0")
STALLED_S = 60.0


def test_several_at_once(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            Trap(name="all", service="coordinator", place="phase GENERATE", step=2, victims=REPLICAS),
            Trap(name="learners", service="trainer", place="torn", step=3, victims=("critic-0", "trainer-0")),
            Trap(
                name="trainer, coordinator", service="trainer", place="policy learnt", step=4,
                victims=("coordinator-0", "trainer-0"),
            ),
            Trap(
                name="critic, coordinator", service="critic", place="done UpdateCritic", step=5,
                victims=("critic-0", "coordinator-0"),
            ),
            Trap(
                name="rollout, coordinator", service="rollout", place="written", step=6, nth=5,
                victims=("rollout-0", "coordinator-0"),
            ),
            Trap(
                name="everybody", service="coordinator", place="phase UPDATE", step=7,
                victims=(*REPLICAS, "coordinator-0"),
            ),
        ],
        undisturbed,
        within=2 * RECOVERY_S,  # three services that load torch at once, on two cores
    )  # fmt: skip


def test_replacements_die_while_they_are_restored(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            Trap(name="trainer", service="trainer", place="torn", step=2),
            Trap(name="trainer again", service="trainer", place="restoring", step=1),
            Trap(name="critic", service="critic", place="values learnt", step=3),
            Trap(name="critic again", service="critic", place="restoring", step=2),
            Trap(name="trainer later", service="trainer", place="policy learnt", step=5),
            Trap(
                name="trainer later, coordinator", service="trainer", place="weights restored", step=4,
                victims=("coordinator-0", "trainer-0"),
            ),
            Trap(name="critic later", service="critic", place="torn", step=6),
            Trap(
                name="coordinator that restores", service="critic", place="restoring", step=5,
                victims=("coordinator-0",),
            ),
        ],
        undisturbed,
    )  # fmt: skip


def test_a_run_goes_back_where_the_step_before_is_not_saved(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    """The state of the step before is still being written when its holder dies: it is lost."""
    run = survive(
        new_killed_run,
        [
            Trap(name="trainer saves", service="trainer", place="saving", step=2, until="trainer"),
            Trap(name="trainer", service="trainer", place="torn", step=3),
            Trap(name="critic saves", service="critic", place="saved", step=4, until="critic"),
            Trap(name="critic", service="critic", place="done UpdateCritic", step=5),
            Trap(name="trainer saves late", service="trainer", place="saved", step=6, until="trainer late"),
            Trap(name="trainer late", service="trainer", place="given Logprobs", step=7),
            Trap(name="coordinator in the rewind", service="coordinator", place="forgotten", step=7),
        ],
        undisturbed,
    )
    assert rewinds(run) >= 3


def test_a_run_goes_back_over_several_steps(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    run = survive(
        new_killed_run,
        [
            Trap(name="trainer", service="trainer", place="torn", step=3),
            Trap(name="critic", service="critic", place="values learnt", step=5),
            Trap(name="coordinator goes back", service="coordinator", place="phase REWIND", step=5),
            Trap(name="both", service="trainer", place="policy learnt", step=6, victims=("critic-0", "trainer-0")),
            Trap(name="coordinator has gone back", service="coordinator", place="cut", step=3),
            Trap(name="late", service="trainer", place="given SavePolicy", step=7),
        ],
        undisturbed,
        "checkpoint.snapshot_every=3",
    )
    assert rewinds(run) >= 3


def test_by_default_a_step_does_not_wait_for_the_disk_and_may_have_to_be_repeated(
    new_killed_run: NewRun, undisturbed: Outcome
) -> None:
    """The state after step 2 is not written before step 5: step 3 would wait for it if it were to be saved."""
    run = survive(
        new_killed_run,
        [
            Trap(name="slow disk", service="trainer", place="saving", step=2, until="critic"),
            Trap(name="critic", service="critic", place="values learnt", step=5),
        ],
        undisturbed,
        "checkpoint.snapshot_every=0",
    )
    log = run.log("coordinator")
    assert re.search(r"back from step 5 to the state after step [12]: .* after step 4 was not saved", log)


def rewinds(run: KilledRun) -> int:
    return len(run.ledger_rows("SELECT 1 FROM events WHERE kind = 'rewind'"))


def test_a_rollout_replica_is_stopped_past_its_deadline_and_continued(
    new_killed_run: NewRun, undisturbed: Outcome
) -> None:
    """What it writes then goes to slots in quarantine, and what it reports is dropped."""
    run = new_killed_run()
    traps = [
        Trap(name="one", service="rollout", place="written", step=2, nth=3, signal=signal.SIGSTOP),
        Trap(name="one of two", service="rollout", place="written", step=4, nth=3, signal=signal.SIGSTOP),
        Trap(name="other", service="rollout", replica=1, place="given Generate", step=4, signal=signal.SIGSTOP),
    ]  # fmt: skip
    process = run.start_killed(traps, "rollout.replicas=2", "timeouts.generate=3")
    continue_late(run, traps[:1], lost_by_then=1)
    continue_late(run, traps[1:], lost_by_then=3)
    ended = run.finish(process)
    assert ended.code == 0, ended.err
    assert "warning" not in ended.err
    assert "late answer of rollout 0" in run.log("coordinator")
    assert sum(line.timings["retries"] for line in run.steps()) > 0
    assert_same(outcome(run), undisturbed)
    run.assert_nothing_left()


def continue_late(run: KilledRun, traps: Sequence[Trap], lost_by_then: int) -> None:
    """Continues what these traps have stopped, when so many leases have run out."""

    def lost() -> int:
        return len(run.ledger_rows("SELECT 1 FROM leases WHERE role = 'rollout' AND state IN ('lost', 'late')"))

    for trap in traps:
        run.wait_until(lambda trap=trap: mark_of(run.plan, trap) is not None, f"trap {trap.name}", STALLED_S)
    run.wait_until(lambda: lost() >= lost_by_then, "the leases of stopped replicas run out", STALLED_S)
    for trap in traps:
        mark = mark_of(run.plan, trap)
        assert mark is not None
        (pid,) = mark.pids.values()
        os.kill(pid, signal.SIGCONT)
