"""Cutting a step's samples into mini- and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def consecutive(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Cuts a sequence into consecutive pieces of ``size``; 0 means one piece. The order is the caller's."""
    for start in range(0, len(items), size or max(1, len(items))):
        yield items[start : start + (size or len(items))]
