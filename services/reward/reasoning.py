"""The built-in function ``reasoning_gym``: scores a response by the task's own scorer in the package reasoning-gym."""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# (reasoning-gym ships no stubs)

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

from reasoning_gym.factory import DATASETS, get_score_answer_fn
from reasoning_gym.utils import extract_answer

from services.reward.functions import numbers_in

EXTRACTS = ("response", "tag", "last_number")


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[object],
    metadata: Sequence[object],
    *,
    answer: str = "response",
) -> list[float]:
    """Scores in [0, 1]; each row's metadata is ``{"task": name, "entry": {...}}`` with the entry as generated.

    ``answer`` says what part of the response is the answer: the whole ``response`` without white space around it, the
    last ``<answer>`` ``tag``, or its ``last_number``. A response without that part scores as an empty answer does.
    """
    if answer not in EXTRACTS:
        raise ValueError(f"option answer: expected one of {', '.join(EXTRACTS)}, found {answer!r}")
    return [
        float(scorer_of(row)(part(response, answer), entry_of(row)))
        for response, row in zip(responses, metadata, strict=True)
    ]


def part(response: str, answer: str) -> str | None:
    """The answer within a response; None if there is none."""
    if answer == "tag":
        return extract_answer(response)
    if answer == "last_number":
        found = numbers_in(response)
        return format(found[-1], "f") if found else None
    return response.strip()


def field(row: object, name: str, kind: type) -> Any:
    """A field of a row's metadata; ValueError where it is missing or of another type."""
    found = cast("dict[str, object]", row).get(name) if isinstance(row, dict) else None
    if not isinstance(found, kind):
        raise ValueError(f'metadata: expected {{"task": name, "entry": {{...}}}}, found {name} = {found!r}')
    return found


def entry_of(row: object) -> dict[str, Any]:
    """The generated problem, with its answer and metadata."""
    return field(row, "entry", dict)


def scorer_of(row: object) -> Callable[[str | None, dict[str, Any]], float]:
    """The scorer of the row's task; ValueError where the package has no such task."""
    return task_scorer(field(row, "task", str))


@cache
def task_scorer(task: str) -> Callable[[str | None, dict[str, Any]], float]:
    if task not in DATASETS:
        raise ValueError(f"metadata: reasoning-gym has no task {task!r}")
    return cast("Callable[[str | None, dict[str, Any]], float]", get_score_answer_fn(task))
