"""Reward functions that fork and start processes: who answers, and what is left of it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.config import RewardFunctionConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.interface import Batch

LEAVING = Path(__file__).resolve().parents[1] / "functions" / "leaving.py"
GONE_WITHIN_S = 5.0

Start = Callable[[str], FunctionScorer]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Starts a scorer whose functions work in the test's folder; closes it after the test."""
    monkeypatch.chdir(tmp_path)
    running: list[FunctionScorer] = []

    def begin(function: str) -> FunctionScorer:
        scorer = FunctionScorer([RewardFunctionConfig(function=f"{LEAVING}:{function}")], ["reward.function"], 1.0)
        running.append(scorer)
        scorer.start(time.monotonic() + 30)
        return scorer

    yield begin
    for scorer in running:
        scorer.close()


def batch() -> Batch:
    return Batch(["p"], ["r"], [b'"1"'], [b"null"], [""])


def test_a_copy_that_a_function_forks_does_not_answer(start: Start) -> None:
    scorer = start("twice")
    answers = [scorer.score(batch(), time.monotonic() + 30) for _ in range(3)]
    assert answers == [[[1.0]]] * 3


def test_a_sandbox_in_its_own_session_goes_with_the_function_that_hangs(start: Start, tmp_path: Path) -> None:
    (outcome,) = start("sandbox").score(batch(), time.monotonic() + 30)
    assert isinstance(outcome, str)
    assert "ran longer than 1 s and was killed" in outcome
    pid = int((tmp_path / "sandbox").read_text())
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with open(pidfd):
        assert select.select([pidfd], [], [], GONE_WITHIN_S)[0], f"process {pid} lives on"
