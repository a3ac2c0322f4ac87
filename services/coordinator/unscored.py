"""Ends a run whose samples are not scored at all: it would go on for days and learn nothing."""

from __future__ import annotations

from collections.abc import Sequence

from services.coordinator.failures import RunFailed
from services.coordinator.sample import Sample, counted

STEPS = 3
"""Steps one after the other without a single score that end a run; fewer may be an outage of what the scorer asks."""
REMEDY = "mend what reward.* names, then go on with this run (`quartet up --resume`, under compose `docker compose up`)"


class Unscored:
    """Counts the steps of which no sample could be scored."""

    def __init__(self) -> None:
        self.steps = 0

    def check_step(self, step: int, samples: Sequence[Sample]) -> None:
        """Raises RunFailed at the third such step in a row."""
        self.steps = 0 if counted(samples) else self.steps + 1
        if self.steps == STEPS:
            raise RunFailed(
                f"steps {step - STEPS + 1} to {step}: no sample could be scored; the first of step {step}: "
                f"{reason(samples)}; {REMEDY}"
            )

    def check_evaluation(self, step: int, samples: Sequence[Sample]) -> None:
        """Raises RunFailed where nothing of the evaluation before the first step could be scored."""
        if step == 0 and samples and not counted(samples):
            raise RunFailed(
                f"evaluation before the first step: none of {len(samples)} samples could be scored; the first: "
                f"{reason(samples)}; {REMEDY}"
            )


def reason(samples: Sequence[Sample]) -> str:
    """Why the first masked sample is masked."""
    return next((sample.masked for sample in samples if sample.masked), "")
