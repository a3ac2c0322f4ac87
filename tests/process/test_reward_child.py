"""Reward functions in real child processes: functions that behave, hang, crash, print, lie, or cannot be loaded."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from common.config import RewardFunctionConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.interface import Batch, SampleScores, ScorerError
from services.reward.wire import OptionValue

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = ROOT / "tests" / "functions"
GOOD, BAD = FUNCTIONS / "well_behaved.py", FUNCTIONS / "misbehaving.py"
LIMIT_S = 1.0
GONE_WITHIN_S = 5.0

Start = Callable[..., FunctionScorer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts scorers and closes them after the test."""
    running: list[FunctionScorer] = []

    def begin(*functions: str | RewardFunctionConfig, limit_s: float = LIMIT_S) -> FunctionScorer:
        entries = [f if isinstance(f, RewardFunctionConfig) else RewardFunctionConfig(function=f) for f in functions]
        scorer = FunctionScorer(entries, [f"reward.functions[{i}].function" for i in range(len(entries))], limit_s)
        running.append(scorer)
        scorer.start(time.monotonic() + 30)
        return scorer

    yield begin
    for scorer in running:
        scorer.close()


def batch(*responses: str, truth: object = "28", metadata: object = None, prompt: str = "p", source: str = "") -> Batch:
    n = len(responses)
    values = [msgspec.json.encode(value) for value in (truth, metadata)]
    return Batch([prompt] * n, list(responses), values[:1] * n, values[1:] * n, [source] * n)


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def error(outcome: SampleScores) -> str:
    assert isinstance(outcome, str)
    return outcome


def wait_until_gone(pidfd: int) -> None:
    with open(pidfd):
        assert select.select([pidfd], [], [], GONE_WITHIN_S)[0], "the process lives on"


def child_pid(scorer: FunctionScorer) -> int:
    assert scorer.child.process is not None
    return scorer.child.process.pid


# ---------------------------------------------------------------- functions that behave


def test_built_in_function(start: Start) -> None:
    assert start("exact_match").score(batch("28", "29", " 28"), soon()) == [[1.0], [0.0], [1.0]]


def test_an_empty_batch_needs_no_child(start: Start) -> None:
    assert start("exact_match").score(batch(), soon()) == []


def test_user_functions_in_both_conventions_see_the_whole_row(start: Start) -> None:
    scorer = start(f"{GOOD}:sees", f"{GOOD}:compute_score")
    row = batch("7", truth={"n": [7, None]}, metadata={"level": 2}, prompt="3+4=", source="sums")
    assert scorer.score(row, soon()) == [[1.0, 1.0]]


def test_options_reach_the_function_and_its_neighbours_can_be_imported(start: Start) -> None:
    scorer = start(RewardFunctionConfig(function=f"{GOOD}:score", options={"limit": 4}))
    assert scorer.score(batch("ab", "abcdef"), soon()) == [[0.5], [1.0]]


def test_a_relative_path_holds_from_where_the_service_was_started(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FUNCTIONS)
    assert start("well_behaved.py:score").score(batch("x" * 10), soon()) == [[1.0]]


def test_a_null_ground_truth_is_an_error_of_its_sample(start: Start) -> None:
    rows = batch("28", "28")
    rows.ground_truths[1] = b"null"
    good, bad = start("exact_match").score(rows, soon())
    assert good == [1.0]
    assert error(bad).startswith("exact_match raised ValueError: ground truth: expected")


def test_prints_go_to_the_log_and_not_into_the_protocol(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    scorer = start(f"{GOOD}:prints")
    assert [scorer.score(batch("a", "b"), soon()) for _ in range(3)] == [[[1.0], [1.0]]] * 3
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("printed by a reward function") == 3


def test_one_child_stays_for_all_batches_and_dies_on_close(start: Start) -> None:
    scorer = start(f"{GOOD}:pid")
    pids = {scores[0] for _ in range(3) for scores in scorer.score(batch("a", "b"), soon())}
    assert pids == {child_pid(scorer)}
    pidfd = os.pidfd_open(child_pid(scorer))
    scorer.close()
    wait_until_gone(pidfd)


def test_a_child_outlives_the_thread_in_which_it_was_asked_for(start: Start) -> None:
    scorers: list[FunctionScorer] = []
    thread = threading.Thread(target=lambda: scorers.append(start("exact_match")))
    thread.start()
    thread.join()
    pid = child_pid(scorers[0])
    for _ in range(3):
        assert scorers[0].score(batch("28", "29"), soon()) == [[1.0], [0.0]]
    assert child_pid(scorers[0]) == pid


def test_a_batch_larger_than_a_socket_buffer(start: Start) -> None:
    responses = ["x" * 100_000 + str(index) for index in range(64)]
    assert start(f"{GOOD}:score").score(batch(*responses), soon()) == [[1.0]] * 64


# ---------------------------------------------------------------- functions that misbehave


def test_an_endless_loop_is_killed_in_time_and_spoils_neither_neighbours_nor_the_next_batch(start: Start) -> None:
    scorer = start(f"{BAD}:score")
    hanging = os.pidfd_open(child_pid(scorer))
    started = time.monotonic()
    first, second, third = scorer.score(batch("a", "hang", "b"), soon())
    assert 2 * LIMIT_S <= time.monotonic() - started < 2 * LIMIT_S + GONE_WITHIN_S
    assert (first, third) == ([1.0], [1.0])
    assert error(second) == "misbehaving.py:score ran longer than 1 s and was killed"
    wait_until_gone(hanging)
    assert scorer.score(batch("c"), soon()) == [[1.0]]


def test_the_log_says_where_a_function_hung(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    start(f"{BAD}:score").score(batch("hang"), soon())
    assert "misbehaving.py" in capfd.readouterr().err


def test_hanging_samples_leave_the_others_their_time(start: Start) -> None:
    scorer = start(f"{BAD}:score", limit_s=2.0)
    *hung, good = scorer.score(batch("hang", "hang", "a"), soon(6.0))
    assert all("ran longer than" in error(outcome) for outcome in hung)
    assert good == [1.0]


def test_a_lease_that_is_too_short_ends_in_errors_and_in_time(start: Start) -> None:
    scorer = start(f"{BAD}:score", limit_s=60.0)
    started = time.monotonic()
    first, second = scorer.score(batch("hang", "a"), soon(0.5))
    assert time.monotonic() - started < 0.5 + GONE_WITHIN_S
    assert "no time to score this sample alone" in error(first)
    assert "no time to score this sample alone" in error(second)


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("exit", "misbehaving.py:score ended its process with exit status 7"),
        ("os_exit", "misbehaving.py:score ended its process with exit status 3"),
        ("orphan", "misbehaving.py:score ended its process with exit status 4"),
        ("segfault", "misbehaving.py:score ended its process by SIGSEGV"),
        ("kill", "misbehaving.py:score ended its process by SIGKILL (out of memory?)"),
        ("close", "misbehaving.py:score ended its process with exit status 1"),
    ],
)
def test_a_child_that_dies_is_noticed_at_once_and_told_how(start: Start, deed: str, message: str) -> None:
    scorer = start(f"{BAD}:score", limit_s=60.0)
    started = time.monotonic()
    first, second, third = scorer.score(batch("a", deed, "b"), soon(120))
    assert time.monotonic() - started < GONE_WITHIN_S
    assert (first, third) == ([1.0], [1.0])
    assert error(second) == message
    assert scorer.score(batch("c"), soon()) == [[1.0]]


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("raise", "misbehaving.py:score raised KeyError: 'no such unit' (misbehaving.py, line "),
        ("nan", "misbehaving.py:score returned nan; expected a finite float"),
        ("inf", "misbehaving.py:score returned -inf; expected a finite float"),
        ("huge", "misbehaving.py:score returned 1000"),
        ("text", "misbehaving.py:score returned '1.0'; expected a finite float"),
        ("none", "misbehaving.py:score returned None; expected a finite float"),
    ],
)
def test_a_bad_score_is_an_error_of_its_sample_and_the_child_lives(start: Start, deed: str, message: str) -> None:
    scorer = start(f"{BAD}:score")
    pid = child_pid(scorer)
    first, second, third = scorer.score(batch("a", deed, "b"), soon())
    assert (first, third) == ([1.0], [1.0])
    assert error(second).startswith(message)
    assert child_pid(scorer) == pid


def test_wrong_number_of_values(start: Start) -> None:
    assert start(f"{BAD}:too_few").score(batch("a", "b", "c"), soon()) == [[1.0]] * 3
    for name in ("none_at_all", "one_number"):
        for outcome in start(f"{BAD}:{name}").score(batch("a", "b"), soon()):
            assert error(outcome).startswith(f"misbehaving.py:{name} returned ")
            assert error(outcome).endswith("expected a list of 1 floats")


def test_the_function_at_fault_is_named_among_several(start: Start) -> None:
    scorer = start("exact_match", f"{BAD}:score", f"{GOOD}:score")
    good, nan, dead = scorer.score(batch("28", "nan", "os_exit"), soon())
    assert good == [1.0, 1.0, 0.2]
    assert error(nan).startswith("misbehaving.py:score returned nan")
    assert error(dead).startswith("misbehaving.py:score ended its process")


def test_processes_that_a_function_started_die_with_the_child(start: Start) -> None:
    scorer = start(f"{BAD}:score")
    [outcome] = scorer.score(batch("adopt"), soon())
    pidfd = os.pidfd_open(int(outcome[0]))
    scorer.close()
    wait_until_gone(pidfd)


def test_a_child_killed_between_two_batches_is_replaced(start: Start) -> None:
    scorer = start("exact_match")
    os.kill(child_pid(scorer), signal.SIGKILL)
    assert scorer.score(batch("28", "29"), soon()) == [[1.0], [0.0]]


# ---------------------------------------------------------------- functions that cannot be loaded


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("exact_mach", {}, "no built-in reward function 'exact_mach'. Did you mean 'exact_match'?"),
        ("digits", {"align": "middle"}, "digits: option align: expected 'left' or 'right', found 'middle'"),
        ("format_regex", {}, "missing a required argument: 'pattern'"),
        (f"{FUNCTIONS}/missing.py:score", {}, f"no such file: {FUNCTIONS}/missing.py"),
        (f"{GOOD}:scores", {}, f"{GOOD} has no function 'scores'"),
        (f"{GOOD}:score", {"limits": 3}, "got an unexpected keyword argument 'limits'"),
        (f"{BAD}:NOT_A_FUNCTION", {}, "is a int, expected a function"),
        (f"{BAD}:asynchronous", {}, "'asynchronous' in "),
        (f"{BAD}:wants_less", {}, "too many positional arguments"),
        (f"{FUNCTIONS}/broken_import.py:score", {}, "raised OSError: the answer key is not mounted"),
    ],
)
def test_a_function_that_cannot_be_loaded(
    start: Start, function: str, options: dict[str, OptionValue], message: str
) -> None:
    with pytest.raises(ScorerError) as caught:
        start(RewardFunctionConfig(function=function, options=options))
    assert str(caught.value).startswith("reward.functions[0].function: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def score(:\n", "reward.functions[0].function: {file}, line 1: syntax error: "),
        ("import sys\nsys.exit(5)\n", "{file}:score ended its process with exit status 5 while "),
    ],
)
def test_a_file_that_cannot_be_loaded(start: Start, tmp_path: Path, code: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(ScorerError) as caught:
        start(f"{file}:score")
    assert str(caught.value).startswith(message.format(file=file))


def test_child_loads_neither_torch_nor_transformers(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "modules.py"
    file.write_text(
        "import sys\n"
        "def score(prompts, responses, ground_truths, metadata):\n"
        "    return [float(any(name in sys.modules for name in ('torch', 'transformers')))]\n"
    )
    scorer = start("exact_match", "reasoning_gym", f"{file}:score")
    metadata = {"task": "chain_sum", "entry": {"answer": "28", "metadata": {}}}
    assert scorer.score(batch("28", metadata=metadata), soon()) == [[1.0, 1.0, 0.0]]
