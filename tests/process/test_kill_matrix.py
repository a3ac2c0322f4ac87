"""Any service may be killed in any phase: the run ends as if nobody had been, bit for bit, and soon goes on.

Real processes, SIGKILL where traps.py says; a run kills one service in several phases in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.process.killed_runs import KilledRun, Outcome, outcome, survive
from tests.process.traps import Trap
from tests.process.whole_runs import WaitUntil

pytestmark = pytest.mark.timeout(240)
NewRun = Callable[[], KilledRun]


@pytest.fixture(scope="module")
def new_run(tmp_path_factory: pytest.TempPathFactory, wait_until: WaitUntil) -> Iterator[NewRun]:
    made: list[KilledRun] = []

    def make() -> KilledRun:
        made.append(KilledRun(tmp_path_factory.mktemp("killed"), wait_until))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.fixture(scope="module")
def undisturbed(new_run: NewRun) -> Outcome:
    run = new_run()
    ended = run.finish(run.start_killed(()))
    assert ended.code == 0, ended.err
    assert ended.err == ""
    return outcome(run)


def traps_of(service: str, *places: tuple[int, str], nth: int = 1) -> list[Trap]:
    """The service dies by itself at each (step, place), and by the coordinator's hand where the place is a phase."""
    traps: list[Trap] = []
    for step, place in places:
        host = "coordinator" if place.startswith("phase ") else service
        name = f"{service} {step} {place}"
        traps.append(Trap(name=name, service=host, place=place, step=step, nth=nth, victims=(f"{service}-0",)))
    return traps


def test_rollout(new_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_run,
        [
            *traps_of("rollout", (0, "loading"), (1, "given Generate"), (2, "phase ADVANTAGE")),
            *traps_of("rollout", (2, "written"), nth=5),
            *traps_of("rollout", (3, "phase EVALUATION"), (4, "applied"), (5, "done Generate"), (6, "phase UPDATE")),
            *traps_of("rollout", (7, "written"), nth=40),  # the evaluation's eighth sample
        ],
        undisturbed,
    )


def test_reward(new_run: NewRun, undisturbed: Outcome) -> None:
    survive(
        new_run,
        [
            *traps_of("reward", (0, "loading"), (1, "given ScoreBatch"), (2, "done ScoreBatch"), (3, "phase GENERATE")),
            *traps_of("reward", (3, "phase EVALUATION"), (4, "phase UPDATE"), (5, "phase PUBLISH")),
            *traps_of("reward", (6, "phase ADVANTAGE"), (7, "phase CHECKPOINT")),
        ],
        undisturbed,
    )
