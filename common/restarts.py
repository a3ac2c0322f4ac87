"""How often a service that dies is started again, and after what wait."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 5.0


@dataclass
class Deaths:
    """Counts the deaths of each service without a finished step in between; ``limit`` of them are forgiven."""

    limit: int
    seen: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """By name: deaths, and the furthest step in which there was one."""

    def count(self, name: str, step: int) -> int:
        """Counts one more, in this step, and returns how many there are by now.

        A run that is rewound and dies in the same step again has not got on: the furthest step counts.
        """
        number, furthest = self.seen.get(name, (0, 0))
        number = 1 if step > furthest else number + 1
        self.seen[name] = number, max(step, furthest)
        return number


def wait_before(number: int) -> float:
    """Seconds before the start that follows this death in a row: none after the first, then growing."""
    return 0.0 if number == 1 else min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (number - 2))
