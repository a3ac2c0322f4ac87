"""When did any service compute? Intervals of ``time.monotonic()``, which all processes of a host share."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union_seconds(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Seconds of [start, end] that at least one interval covers."""
    covered, reach = 0.0, start
    for begin, stop in sorted(intervals):
        begin, stop = max(begin, reach), min(stop, end)
        if stop > begin:
            covered += stop - begin
            reach = stop
    return covered


class BusyClock:
    """Collects the intervals in which services computed, by phase."""

    def __init__(self) -> None:
        self._by_phase: dict[str, list[Interval]] = {}

    def add(self, phase: str, started: float, ended: float) -> None:
        self._by_phase.setdefault(phase, []).append((started, ended))

    def phase_seconds(self, start: float, end: float) -> dict[str, float]:
        """Seconds of [start, end] by phase; phases in which nobody computed then are left out."""
        seconds = {phase: union_seconds(intervals, start, end) for phase, intervals in self._by_phase.items()}
        return {phase: busy for phase, busy in seconds.items() if busy > 0}

    def busy_seconds(self, start: float, end: float) -> float:
        return union_seconds((interval for intervals in self._by_phase.values() for interval in intervals), start, end)

    def forget_before(self, time: float) -> None:
        """Drops intervals that ended before ``time``: they belong to steps that are written down."""
        for phase, intervals in self._by_phase.items():
            self._by_phase[phase] = [interval for interval in intervals if interval[1] > time]
