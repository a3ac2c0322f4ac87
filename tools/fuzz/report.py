"""What a fuzz run found: one JSON object, and a failure for each case that did other than refuse or be right."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

import msgspec

log = logging.getLogger("fuzz")

MOST_FAILURES = 50
"""Failures that are described; the others are counted."""


class Failure(msgspec.Struct, frozen=True):
    """One case to look at. ``seed`` and ``case`` make it again."""

    seed: int
    case: str
    what: str


class Result(msgspec.Struct, frozen=True):
    """What is printed."""

    target: str
    seed: int
    cases: int
    seconds: float
    cases_per_s: float
    slowest_ms: float
    outcomes: dict[str, int]
    failed: int
    failures: list[Failure]


@dataclass
class Tally:
    """Counts cases by outcome. A case that takes longer than ``slow_s`` has failed."""

    target: str
    seed: int
    slow_s: float
    began: float = field(default_factory=time.monotonic)
    cases: int = 0
    slowest_s: float = 0.0
    failed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    failures: list[Failure] = field(default_factory=list[Failure])

    @contextlib.contextmanager
    def case(self, name: str) -> Generator[None]:
        """One case: whatever it raises is a failure, and so is too long a time."""
        self.cases += 1
        started = time.perf_counter()
        try:
            yield
        except Exception as error:  # that is what is looked for
            log.exception("%s, seed %d", name, self.seed)
            self.fail(name, f"{type(error).__name__}: {error}")
        else:
            self.took(name, time.perf_counter() - started)

    def took(self, name: str, seconds: float) -> None:
        self.slowest_s = max(self.slowest_s, seconds)
        if seconds > self.slow_s:
            self.fail(name, f"took {seconds:.3f} s, allowed {self.slow_s:g} s")

    def fail(self, name: str, what: str) -> None:
        self.failed += 1
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(Failure(self.seed, name, what[:500]))

    def result(self) -> Result:
        seconds = time.monotonic() - self.began
        return Result(
            self.target, self.seed, self.cases, seconds, self.cases / max(seconds, 1e-9), 1000 * self.slowest_s,
            dict(self.outcomes), self.failed, self.failures,
        )  # fmt: skip
