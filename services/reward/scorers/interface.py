"""What every scorer takes and returns, whether it calls functions or runs a model."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

SampleScores = list[float] | str
"""One sample's finite scores, one for each function in the config's order; or why there are none."""


class ScorerError(Exception):
    """The scorer itself cannot be used: a function cannot be loaded. The message names it and says why."""


class Batch(Struct, frozen=True):
    """Samples to score; all lists have the same length. ``ground_truths`` and ``metadata`` are JSON."""

    prompts: list[str]
    responses: list[str]
    ground_truths: list[bytes]
    metadata: list[bytes]
    sources: list[str]

    def __len__(self) -> int:
        return len(self.responses)

    def only(self, index: int) -> Batch:
        """The batch of this one sample."""
        part = slice(index, index + 1)
        columns = (self.prompts[part], self.responses[part], self.ground_truths[part], self.metadata[part])
        return Batch(*columns, self.sources[part])


class Scorer(Protocol):
    """Deadlines are ``time.monotonic()`` seconds. Called from one thread at a time."""

    def start(self, deadline: float) -> None:
        """Loads everything, so that the first batch does not pay for it; raises ScorerError."""
        ...

    def score(self, batch: Batch, deadline: float) -> list[SampleScores]:
        """One entry for each sample, in the batch's order, before the deadline.

        One bad sample does not spoil its neighbours. Raises ScorerError where nothing can be scored at all.
        """
        ...

    def close(self) -> None: ...
