"""User functions that do what is asked of them."""

from __future__ import annotations

import os
from typing import Any

from length_helper import share  # pyright: ignore[reportMissingImports, reportUnknownVariableType]


def score(
    prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[dict[str, Any]], limit: int = 10
) -> list[float]:
    """The share of ``limit`` characters that a response has."""
    return [share(response, limit) for response in responses]


def prints(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """Writes to standard output in every way there is."""
    print("printed by a reward function", flush=True)
    os.write(1, b"\x00\x00\x00\x02{}" * 1000 + b"\n")
    return [1.0 for _ in responses]


def sees(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """1 where all four lists are as the test's batch has them."""
    rows = zip(prompts, responses, ground_truths, metadata, strict=True)
    return [float(row == ("3+4=", "7", {"n": [7, None]}, {"level": 2, "data_source": "sums"})) for row in rows]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """One sample at a time, by verl's convention."""
    seen = (data_source, solution_str, ground_truth, extra_info)
    return {"score": float(seen == ("sums", "7", {"n": [7, None]}, {"level": 2})), "remark": "ignored"}


def pid(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """The process that scores."""
    return [float(os.getpid()) for _ in responses]
