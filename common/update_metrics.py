"""Metrics of an update, collected over its mini-batches."""

from __future__ import annotations

import torch


class UpdateMetrics:
    """Shares of a mini-batch's metrics add up over its micro-batches; mini-batches are averaged, maxima kept apart."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._mini_batches = 0

    def add(self, **shares: torch.Tensor | float) -> None:
        for name, share in shares.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(share)

    def keep_max(self, **values: torch.Tensor | float) -> None:
        for name, value in values.items():
            self._maxima[name] = max(self._maxima.get(name, float("-inf")), float(value))

    def end_mini_batch(self) -> None:
        self._mini_batches += 1

    def result(self) -> dict[str, float]:
        count = max(1, self._mini_batches)
        return {name: total / count for name, total in self._sums.items()} | self._maxima
