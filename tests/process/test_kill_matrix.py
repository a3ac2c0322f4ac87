"""Any service may be killed in any phase: the run ends as if nobody had been, bit for bit, and soon goes on.

Real processes, SIGKILL where traps.py says; a run kills one service in several phases in turn.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.process.killed_runs import KilledRun, Outcome, survive
from tests.process.traps import Trap

pytest_plugins = ("tests.process.killed_fixtures",)
pytestmark = pytest.mark.timeout(280)
NewRun = Callable[[], KilledRun]


def traps_of(service: str, *places: tuple[int, str], nth: int = 1) -> list[Trap]:
    """The service dies by itself at each (step, place), and by the coordinator's hand where the place is a phase."""
    traps: list[Trap] = []
    for step, place in places:
        host = "coordinator" if place.startswith("phase ") else service
        name = f"{service} {step} {place}"
        traps.append(Trap(name=name, service=host, place=place, step=step, nth=nth, victims=(f"{service}-0",)))
    return traps


def test_rollout(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            *traps_of("rollout", (0, "loading"), (1, "given Generate"), (2, "phase ADVANTAGE")),
            *traps_of("rollout", (2, "written"), nth=5),
            *traps_of("rollout", (3, "phase EVALUATION"), (4, "applied"), (5, "done Generate"), (6, "phase UPDATE")),
            *traps_of("rollout", (7, "written"), nth=40),  # the evaluation's eighth sample
        ],
        undisturbed,
    )


def test_reward(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            *traps_of("reward", (0, "loading"), (1, "given ScoreBatch"), (2, "done ScoreBatch"), (3, "phase GENERATE")),
            *traps_of("reward", (3, "phase EVALUATION"), (4, "phase UPDATE"), (5, "phase PUBLISH")),
            *traps_of("reward", (6, "phase ADVANTAGE"), (7, "phase CHECKPOINT")),
        ],
        undisturbed,
    )


def test_critic(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            *traps_of("critic", (0, "loading"), (1, "torn"), (2, "given Evaluate"), (3, "values learnt")),
            *traps_of("critic", (3, "phase EVALUATION"), (4, "phase PUBLISH"), (5, "done UpdateCritic")),
            *traps_of("critic", (6, "saving"), (7, "phase ADVANTAGE")),
            *traps_of("critic", (6, "done Evaluate"), nth=2),
        ],
        undisturbed,
    )


def test_trainer(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            *traps_of("trainer", (0, "loading"), (1, "torn"), (2, "given Logprobs"), (3, "policy learnt")),
            *traps_of("trainer", (3, "phase EVALUATION"), (4, "policy committed"), (5, "done UpdatePolicy")),
            *traps_of("trainer", (6, "phase GENERATE"), (6, "phase PUBLISH"), (7, "given SavePolicy")),
        ],
        undisturbed,
    )


def test_trainer_while_its_state_is_written(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    """The step after has begun or not: what it needs of the one before is not on disk."""
    state_written = Trap(name="both parts", service="coordinator", place="state written", step=7, until="both parts")
    survive(
        new_killed_run,
        [
            *traps_of("trainer", (2, "saving"), (4, "saved"), (5, "done SaveState"), (7, "given SavePolicy")),
            # Set later, and so come by first: the policy is not saved before the last step's state is.
            Trap(name="policy", service="trainer", place="given SavePolicy", step=7, until=state_written.name),
            state_written,
            *traps_of("critic", (3, "saved"), (6, "done SaveState")),
        ],
        undisturbed,
    )


def test_coordinator_between_messages(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            *traps_of("coordinator", (0, "loading"), (1, "heard Updated"), (2, "heard Scores"), (3, "heard Evaluated")),
            *traps_of("coordinator", (4, "commit heard"), (5, "receipt heard"), (6, "heard Generated")),
            *traps_of("coordinator", (5, "heard LogprobsDone"), (6, "heard StateStaged"), (7, "heard Saved")),
            *traps_of("coordinator", (7, "samples"), nth=3),
        ],
        undisturbed,
    )


def test_coordinator_at_each_phase(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            *traps_of("coordinator", (0, "phase START"), (0, "phase EVALUATION"), (1, "phase GENERATE")),
            *traps_of("coordinator", (2, "phase ADVANTAGE"), (3, "phase UPDATE")),
            *traps_of("coordinator", (2, "phase START")),  # while it takes over from the one killed in step 3
            *traps_of("coordinator", (4, "phase PUBLISH"), (3, "phase EVALUATION"), (7, "phase CHECKPOINT")),
        ],
        undisturbed,
    )


def test_coordinator_while_it_writes_down(new_killed_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_killed_run,
        [
            *traps_of("coordinator", (0, "evaluation written"), (1, "metrics written"), (2, "step written")),
            *traps_of("coordinator", (3, "evaluation written"), (4, "slots freed"), (6, "state written")),
            *traps_of("rollout", (4, "written"), nth=5),
        ],
        undisturbed,
    )
