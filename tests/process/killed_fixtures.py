"""A pytest plugin: runs with deaths in them, and the undisturbed run that they are compared with, once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.process.killed_runs import KilledRun, Outcome, outcome
from tests.process.whole_runs import WaitUntil


@pytest.fixture(scope="session")
def new_killed_run(
    tmp_path_factory: pytest.TempPathFactory, wait_until: WaitUntil
) -> Iterator[Callable[[], KilledRun]]:
    made: list[KilledRun] = []

    def make() -> KilledRun:
        made.append(KilledRun(tmp_path_factory.mktemp("killed"), wait_until))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.fixture(scope="session")
def undisturbed(new_killed_run: Callable[[], KilledRun]) -> Outcome:
    run = new_killed_run()
    ended = run.finish(run.start_killed(()))
    assert ended.code == 0, ended.err
    assert "warning" not in ended.err, "it may only tell what it has removed of other dead runs"
    return outcome(run)
