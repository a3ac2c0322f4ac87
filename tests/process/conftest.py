"""Fixtures of the process tests: whole runs that leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.models import models_folder
from tests.process.whole_runs import WholeRun

GET_MODEL_WITHIN = 300.0


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


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with SmolLM2: the user's own if it is there, else one that is filled once for all tests."""
    if (models_folder() / "smollm2" / "config.json").is_file():
        return models_folder()
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-m", "tools", "get-model", "smollm2"]
    subprocess.run(command, env={**os.environ, "QUARTET_MODELS": str(folder)}, check=True, timeout=GET_MODEL_WITHIN)
    return folder
