"""Beside the reward functions, which import it as a script would."""

from __future__ import annotations


def share(text: str, limit: int) -> float:
    return min(len(text), limit) / limit
