"""Figures, seeds and texts at the edge of what their places hold."""

from __future__ import annotations

import logging
import math

import pytest

from common.config_loading import ConfigError, load_config
from common.messages import ScoreItem, SlotRef
from services.coordinator.report import finite
from services.reward.calling import ScoreFunction
from services.reward.service import score_of


def test_what_json_does_not_have_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert finite(3, {"a": 1.0, "b": math.nan, "c": -math.inf}) == {"a": 1.0}
    assert caplog.messages == ["step 3: left out of metrics.jsonl, since not finite: b is nan, c is -inf"]
    caplog.clear()
    assert finite(4, {"a": 0.0}) == {"a": 0.0}
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("scores", "weights"), [([1e308], [1.0]), ([1e300, 1e300], [1e300, -1e300]), ([-3.5e38], [1.0])]
)
def test_a_reward_that_float32_does_not_hold_is_an_error(scores: list[float], weights: list[float]) -> None:
    item = ScoreItem(ref=SlotRef(0, 1), prompt="p", ground_truth=b"1", metadata=b"null", source="")
    score = score_of(item, "r", scores, weights)
    assert "more than float32 holds" in score.error
    assert (score.reward, score.accuracy) == (0.0, 0.0)
    assert score_of(item, "r", [3.4e38], [1.0]).error == ""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("\ud83d bad"), "f raised ValueError: \\ud83d bad"),
        (ValueError("z" * 10**6), "f raised ValueError: " + "z" * 500 + "…"),
        (Unprintable(), "f raised Unprintable: (it cannot be shown)"),
    ],
    ids=["surrogate", "endless", "unprintable"],
)
def test_whatever_an_exception_says_fits_into_a_message(error: Exception, expected: str) -> None:
    def function(prompts: object, responses: object, ground_truths: object, metadata: object) -> list[float]:
        raise error

    (value,) = ScoreFunction("f", function, "batch", {}).score(["p"], ["r"], ["1"], [None], [""])
    assert value == expected
    expected.encode()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"run.seed={2**32}", "run.seed: expected int <= 4294967295"),
        ("rollout.temperature=1e-40", "rollout.temperature: expected float >= 0.001"),
        ("rollout.temperature=1e30", "rollout.temperature: expected float <= 1000"),
    ],
)
def test_bounds_of_what_random_numbers_and_logits_can_take(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config("tiny", [override])
