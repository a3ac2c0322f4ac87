"""User functions that cannot score some samples, or any; what they do depends on the ground truth alone."""

from __future__ import annotations

from typing import Any


def score(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """Raises for a ground truth that is a multiple of 4, NaN for the next; else 1, or 2 for a right answer."""
    return [judged(response, int(truth)) for response, truth in zip(responses, ground_truths, strict=True)]


def judged(response: str, truth: int) -> float:
    if truth % 4 == 0:
        raise ZeroDivisionError(f"{truth} cannot be judged")
    return float("nan") if truth % 4 == 1 else 1.0 + (response == str(truth))


def never(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """Has no judge."""
    raise ConnectionError("the judge is not there")
