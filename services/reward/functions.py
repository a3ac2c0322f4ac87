"""The built-in reward functions: pure, and called as a user's function is.

All take (prompts, responses, ground_truths, metadata) of equal length and return a float for each sample. Options are
keyword arguments. A ground truth that is missing, or of the wrong kind, raises ValueError: such a sample has no score.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import cast

NUMBER = re.compile(
    r"(?:(?<![\w)\].])-)?"  # a minus after a digit, letter or bracket subtracts
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"  # commas only between whole thousands
    r"(?:\.[0-9]+)?"
)


def exact_match(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[object],
    metadata: Sequence[object],
    *,
    case_sensitive: bool = True,
) -> list[float]:
    """1 where the response, without white space around it, is the ground truth, else 0.

    A ground truth that is a list holds several right answers. ``case_sensitive = false`` compares without case.
    """
    fold = str if case_sensitive else str.casefold
    return [
        float(fold(response.strip()) in [fold(answer) for answer in answers(truth)])
        for response, truth in zip(responses, ground_truths, strict=True)
    ]


def contains(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[object],
    metadata: Sequence[object],
    *,
    case_sensitive: bool = True,
) -> list[float]:
    """1 where the ground truth, or one of a list of them, occurs in the response, else 0.

    ``case_sensitive = false`` compares without case.
    """
    fold = str if case_sensitive else str.casefold
    return [
        float(any(fold(answer) in fold(response) for answer in answers(truth)))
        for response, truth in zip(responses, ground_truths, strict=True)
    ]


def digits(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[object],
    metadata: Sequence[object],
    *,
    align: str = "right",
) -> list[float]:
    """Share of characters that are right: matches over the length of the longer of response and ground truth.

    ``align = "right"`` compares units with units, as numbers are compared; ``"left"`` compares from the first
    character. White space around the response does not count. With a list of ground truths the best one counts.
    """
    if align not in ("left", "right"):
        raise ValueError(f"option align: expected 'left' or 'right', found {align!r}")
    step = -1 if align == "right" else 1
    return [
        max(share(response.strip()[::step], answer[::step]) for answer in answers(truth))
        for response, truth in zip(responses, ground_truths, strict=True)
    ]


def share(found: str, wanted: str) -> float:
    """Share of equal characters from the first one on; 1 for two empty texts."""
    longer = max(len(found), len(wanted))
    return sum(a == b for a, b in zip(found, wanted, strict=False)) / longer if longer else 1.0


def last_number(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[object],
    metadata: Sequence[object],
    *,
    tolerance: float = 0.0,
) -> list[float]:
    """1 where the last number in the response equals the ground truth as a number, else 0.

    Numbers may have a sign, a fraction and commas between thousands; a minus right after a digit, letter or closing
    bracket is an operator. ``tolerance`` is the greatest difference that still counts as equal.
    """
    if not tolerance >= 0:
        raise ValueError(f"option tolerance: expected at least 0, found {tolerance}")
    return [
        float(equal(numbers_in(response)[-1:], number_of(truth), Decimal(tolerance)))
        for response, truth in zip(responses, ground_truths, strict=True)
    ]


def equal(found: list[Decimal], wanted: Decimal, tolerance: Decimal) -> bool:
    """Whether there is a number, and it is the wanted one."""
    return any(number == wanted or (tolerance > 0 and abs(number - wanted) <= tolerance) for number in found)


def numbers_in(text: str) -> list[Decimal]:
    """Every number of a text, in order."""
    return [Decimal(found.replace(",", "")) for found in NUMBER.findall(text.replace("−", "-"))]


def number_of(truth: object) -> Decimal:
    """The ground truth as a number; ValueError where it is none."""
    if isinstance(truth, int | float) and not isinstance(truth, bool) and math.isfinite(truth):
        return Decimal(repr(truth))
    if isinstance(truth, str):
        text = truth.strip().replace("−", "-")
        if NUMBER.fullmatch(text):
            return Decimal(text.replace(",", ""))
    raise ValueError(f"ground truth: expected a number, found {truth!r}")


def format_regex(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[object],
    metadata: Sequence[object],
    *,
    pattern: str,
    whole: bool = False,
) -> list[float]:
    """1 where the regular expression ``pattern`` (Python's ``re``, dot matches newlines) is found, else 0.

    ``whole = true`` demands that it matches the whole response. Needs no ground truth.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"option pattern: {pattern!r} is no regular expression: {error}") from None
    match: Callable[[str], object] = compiled.fullmatch if whole else compiled.search
    return [float(match(response) is not None) for response in responses]


def length_penalty(
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[object],
    metadata: Sequence[object],
    *,
    free: int,
    limit: int,
) -> list[float]:
    """0 up to ``free`` characters, then falling linearly to -1 at ``limit`` characters, and -1 beyond.

    The soft overlong punishment of DAPO (Yu et al. 2025, equation 13), in characters. Needs no ground truth.
    """
    if not 0 <= free < limit:
        raise ValueError(f"options free and limit: expected 0 <= free < limit, found free {free} and limit {limit}")
    return [-min(max(len(response) - free, 0) / (limit - free), 1.0) for response in responses]


def answers(truth: object) -> list[str]:
    """The right answers as texts; ValueError where there is none."""
    several = cast("list[object]", truth) if isinstance(truth, list) else [truth]
    for one in several:
        if not isinstance(one, str | int | float) or isinstance(one, bool):
            raise ValueError(f"ground truth: expected a text, a number or a list of them, found {truth!r}")
    if not several:
        raise ValueError("ground truth: expected at least one right answer, found an empty list")
    return [str(one).strip() for one in several]


BUILT_IN: dict[str, Callable[..., list[float]]] = {
    "exact_match": exact_match,
    "contains": contains,
    "digits": digits,
    "last_number": last_number,
    "format_regex": format_regex,
    "length_penalty": length_penalty,
}
"""By the name that ``reward.function`` gives; ``reasoning_gym`` joins them in ``services.reward.loading``."""
