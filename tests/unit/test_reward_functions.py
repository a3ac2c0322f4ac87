"""Built-in reward functions, how a function is called and its values checked, and the frames to the child."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from common.messages import ScoreItem, SlotRef
from services.reward import functions, reasoning
from services.reward.calling import Convention, ScoreFunction
from services.reward.service import score_of
from services.reward.wire import Began, FrameReader, Scored, frame, from_child


def one(name: str, response: str, truth: object = None, **options: Any) -> float:
    scores = functions.BUILT_IN[name](["p"], [response], [truth], [None], **options)
    assert len(scores) == 1
    assert isinstance(scores[0], float)
    return scores[0]


@pytest.mark.parametrize(
    ("response", "truth", "options", "expected"),
    [
        (" 28\n", "28", {}, 1.0),
        ("28", 28, {}, 1.0),
        ("28.", "28", {}, 0.0),
        ("", "28", {}, 0.0),
        ("", "", {}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"case_sensitive": False}, 1.0),
    ],
)
def test_exact_match(response: str, truth: object, options: dict[str, Any], expected: float) -> None:
    assert one("exact_match", response, truth, **options) == expected


@pytest.mark.parametrize(
    ("response", "truth", "options", "expected"),
    [
        ("it is Paris, I think", "Paris", {}, 1.0),
        ("it is paris", "Paris", {}, 0.0),
        ("it is paris", "Paris", {"case_sensitive": False}, 1.0),
        ("Lyon", ["Paris", "Lyon"], {}, 1.0),
    ],
)
def test_contains(response: str, truth: object, options: dict[str, Any], expected: float) -> None:
    assert one("contains", response, truth, **options) == expected


@pytest.mark.parametrize(
    ("response", "truth", "align", "expected"),
    [
        ("128", "128", "right", 1.0),
        ("28", "128", "right", 2 / 3),
        ("28", "128", "left", 0.0),
        ("129", "128", "left", 2 / 3),
        ("1280", "128", "right", 0.0),
        ("1280", "128", "left", 3 / 4),
        ("", "128", "right", 0.0),
        (" 7 ", 7, "right", 1.0),
    ],
)
def test_digits(response: str, truth: object, align: str, expected: float) -> None:
    assert one("digits", response, truth, align=align) == pytest.approx(expected)


@given(response=st.text(max_size=12), truth=st.text(max_size=12), align=st.sampled_from(["left", "right"]))
def test_digits_is_a_share_and_1_only_for_the_truth(response: str, truth: str, align: str) -> None:
    score = one("digits", response, truth, align=align)
    assert 0 <= score <= 1
    assert (score == 1) == (response.strip() == truth.strip())


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("First 3, then the sum is 12.", "12", 1.0),
        ("The sum is 12, not 3", "12", 0.0),
        ("4 - 7 = -3", "-3", 1.0),
        ("the result of 9-3", "3", 1.0),
        ("10−13=−3", -3, 1.0),
        ("It costs $1,234.50 in all", "1234.5", 1.0),
        ("either 1,2", "2", 1.0),
        ("12.0", "12", 1.0),
        ("12.01", "12", 0.0),
        ("no number", "12", 0.0),
        ("", "0", 0.0),
        ("1,000,000", 1e6, 1.0),
    ],
)
def test_last_number(response: str, truth: object, expected: float) -> None:
    assert one("last_number", response, truth) == expected


def test_last_number_within_a_tolerance() -> None:
    assert one("last_number", "3.14", "3.1416", tolerance=0.01) == 1.0
    assert one("last_number", "3.12", "3.1416", tolerance=0.01) == 0.0


@given(st.integers(-(10**30), 10**30))
def test_last_number_reads_every_integer(number: int) -> None:
    assert one("last_number", f"so x = {number}.", str(number)) == 1.0
    assert one("last_number", f"so x = {number + 1}.", str(number)) == 0.0


def test_format_regex() -> None:
    pattern = r"<answer>.*</answer>"
    assert one("format_regex", "so <answer>1\n2</answer>", pattern=pattern) == 1.0
    assert one("format_regex", "so <answer>12</answer>", pattern=pattern, whole=True) == 0.0
    assert one("format_regex", "<answer>12</answer>", pattern=pattern, whole=True) == 1.0
    assert one("format_regex", "12", pattern=pattern) == 0.0


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (99, -1.0)])
def test_length_penalty(length: int, expected: float) -> None:
    assert one("length_penalty", "x" * length, free=10, limit=20) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["exact_match", "contains", "digits", "last_number"])
@pytest.mark.parametrize("truth", [None, True, {"answer": 1}, []])
def test_a_ground_truth_that_is_missing_or_of_a_wrong_kind_is_an_error(name: str, truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth: expected"):
        one(name, "28", truth)


@pytest.mark.parametrize("truth", ["twelve", "1 2", "", float("nan")])
def test_last_number_refuses_a_ground_truth_that_is_no_number(truth: object) -> None:
    with pytest.raises(ValueError, match="expected a number"):
        one("last_number", "12", truth)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("digits", {"align": "middle"}),
        ("last_number", {"tolerance": -1.0}),
        ("format_regex", {"pattern": "("}),
        ("length_penalty", {"free": 5, "limit": 5}),
    ],
)
def test_bad_options_are_refused_before_any_sample(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="option"):
        functions.BUILT_IN[name]([], [], [], [], **options)


def test_every_built_in_documents_its_options() -> None:
    for name, function in functions.BUILT_IN.items():
        options = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert function.__doc__ is not None
        assert [option for option in options if f"``{option}" not in function.__doc__] == [], name


# ---------------------------------------------------------------- reasoning-gym


def test_reasoning_gym_scores_by_the_tasks_own_scorer() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    row = {"task": "chain_sum", "entry": entry}
    right = str(entry["answer"])

    def score(response: str, **options: str) -> float:
        return reasoning.score(["p"], [response], [None], [row], **options)[0]

    assert score(f" {right}\n") == 1.0
    assert score("no idea") == 0.0
    assert score(f"So it is {right}.", answer="last_number") == 1.0
    assert score("so it is unknown", answer="last_number") == 0.0
    assert score(f"Hm. <answer>{right}</answer>", answer="tag") == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "task = None"),
        ({"task": "chain_sum"}, "entry = None"),
        ({"task": "no_such_task", "entry": {"answer": "1"}}, "no task 'no_such_task'"),
    ],
)
def test_reasoning_gym_refuses_metadata_of_another_kind(row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reasoning.score(["p"], ["1"], [None], [row])


# ---------------------------------------------------------------- calling


def returning(value: object) -> Callable[..., object]:
    def function(prompts: list[str], responses: list[str], truths: list[object], metadata: list[object]) -> object:
        return value

    return function


def scores(function: Any, count: int = 3, convention: Convention = "batch") -> list[float | str]:
    loaded = ScoreFunction("file.py:f", function, convention, {}, __file__)
    texts = [str(index) for index in range(count)]
    return loaded.score(texts, texts, [None] * count, [None] * count, [""] * count)


def test_numbers_of_every_kind_are_scores() -> None:
    kinds = [1, True, 0.5, np.float32(0.25), np.int64(2), np.array(3.0)]
    assert scores(returning(kinds), len(kinds)) == [1.0, 1.0, 0.5, 0.25, 2.0, 3.0]
    assert scores(returning(np.array([1.0, 2.0, 3.0]))) == [1.0, 2.0, 3.0]
    assert scores(returning(iter([1.0, 2.0, 3.0]))) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "1.0", None, 10**400, [1.0], {"score": 1.0}, 1j])
def test_a_value_that_is_no_finite_float_is_an_error_of_its_sample_alone(bad: object) -> None:
    first, second, third = scores(returning([1.0, bad, 2.0]))
    assert (first, third) == (1.0, 2.0)
    assert isinstance(second, str)
    assert second.startswith("file.py:f returned ")
    assert repr(bad)[:40] in second
    assert "expected a finite float" in second


@pytest.mark.parametrize("returned", ["abc", None, 0.5, {"0": 1.0, "1": 1.0, "2": 1.0}, [1.0, 2.0], []])
def test_a_return_that_is_no_list_of_floats_is_an_error(returned: object) -> None:
    for value in scores(returning(returned)):
        assert isinstance(value, str)
        assert value.startswith("file.py:f returned")


def test_a_batch_that_raises_is_scored_sample_by_sample() -> None:
    def function(prompts: list[str], responses: list[str], truths: list[object], metadata: list[object]) -> list[float]:
        return [1 / int(response) for response in responses]

    bad, *good = scores(function)
    assert good == [1.0, 0.5]
    line = function.__code__.co_firstlineno + 1
    assert bad == f"file.py:f raised ZeroDivisionError: division by zero (test_reward_functions.py, line {line})"


def test_a_function_cannot_change_the_batch_for_the_next_one() -> None:
    responses = ["a", "b"]

    def function(prompts: list[str], given: list[str], truths: list[object], metadata: list[object]) -> list[float]:
        given.clear()
        return [1.0, 1.0]

    ScoreFunction("f", function, "batch", {}).score(responses, responses, [None] * 2, [None] * 2, [""] * 2)
    assert responses == ["a", "b"]


def test_verls_convention_returns_a_float_or_a_score() -> None:
    def function(data_source: str, solution_str: str, ground_truth: object, extra_info: object) -> object:
        return {"0": 0.25, "1": {"score": 0.5, "acc": 1}, "2": {"acc": 1}}[solution_str]

    first, second, third = scores(function, convention="verl")
    assert (first, second) == (0.25, 0.5)
    assert isinstance(third, str)


# ---------------------------------------------------------------- combining, frames


def test_reward_is_the_weighted_sum_and_accuracy_the_first_score() -> None:
    item = ScoreItem(ref=SlotRef(4, 1), prompt="p", ground_truth=b"null", metadata=b"null", source="")
    score = score_of(item, "r", [0.5, 1.0], [2.0, -0.25])
    assert (score.reward, score.accuracy, score.error) == (0.75, 0.5, "")
    failed = score_of(item, "r" * 1000, "f raised KeyError: 1", [2.0, -0.25])
    assert (failed.reward, failed.accuracy) == (0.0, 0.0)
    assert failed.error.startswith("f raised KeyError: 1 (slot 4, prompt 'p', response …'rrr")
    assert len(failed.error) < 250


@given(st.lists(st.lists(st.floats(allow_nan=False), max_size=3), max_size=5), st.integers(1, 40))
def test_frames_come_out_as_they_went_in_however_they_are_cut(samples: list[list[float]], size: int) -> None:
    messages = [Began("f"), Scored([*samples, "error"]), Began("")]
    data = b"".join(map(frame, messages))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, found = FrameReader(theirs), []
        for start in range(0, len(data), size):
            ours.sendall(data[start : start + size])
            assert reader.fill()
            while (part := reader.take()) is not None:
                found.append(from_child.decode(part))
        ours.close()
        assert not reader.fill()
    assert found == messages
