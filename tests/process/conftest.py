"""Fixtures of the process tests: whole runs that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.process.whole_runs import WholeRun


@pytest.fixture(scope="module")
def new_run(
    tmp_path_factory: pytest.TempPathFactory, wait_until: Callable[..., None]
) -> Iterator[Callable[[], WholeRun]]:
    """Makes runs that tests of a module may share; at its end they are killed and removed."""
    made: list[WholeRun] = []

    def make() -> WholeRun:
        made.append(WholeRun(tmp_path_factory.mktemp("run"), wait_until))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.fixture
def run(new_run: Callable[[], WholeRun]) -> Iterator[WholeRun]:
    """One run for one test."""
    run = new_run()
    yield run
    run.close()
