"""Do trainer and engine compute the same? A step's difference between their logprobs is judged before the update.

PPO's objective takes the engine's samples for the trainer's: where the two disagree it is wrong without any other sign.
So a difference above the first bound is told, and one above the second ends the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from common.config import Config
from common.config_values import difference_bounds
from common.token_cache import TokenCache
from services.coordinator.batch_advantages import BatchStatistics
from services.coordinator.failures import RunFailed
from services.coordinator.sample import Sample

log = logging.getLogger("agreement")

Verdict = Literal["agree", "warn", "stop"]

WARN_EVERY = 10
"""Steps from one warning to the next."""
LOOK_AT = (
    "check that both use rollout.temperature and no other, model.dtype, model.attention, and that the engine's weights "
    "are the trainer's (weights.transport)"
)


def judge(difference: float, warn: float, stop: float) -> Verdict:
    """What a mean absolute difference of logprobs, in nats, asks for. One that is no number always stops."""
    if math.isnan(difference) or difference > stop:
        return "stop"
    return "warn" if difference > warn else "agree"


class Agreement:
    """Judges every step's difference by ``rollout.warn_difference`` and ``rollout.stop_difference``."""

    def __init__(self, config: Config) -> None:
        self.warn, self.stop = difference_bounds(config)
        self._warned: int | None = None

    def check(self, step: int, statistics: BatchStatistics, cache: TokenCache, samples: Sequence[Sample]) -> None:
        """Warns at most every ``WARN_EVERY`` steps. Raises RunFailed above the second bound.

        ``samples`` are those of the statistics; their slots are read where the run ends, to name the worst one.
        """
        verdict = judge(statistics.engine_difference, self.warn, self.stop)
        figures = (
            f"the logprobs of engine and trainer differ by {statistics.engine_difference:.4g} nats in the mean over "
            f"{statistics.tokens} tokens, at most {statistics.engine_difference_max:.4g}"
        )
        if verdict == "stop":
            sample, difference = worst_sample(cache, samples)
            raise RunFailed(
                f"step {step}: {figures}; allowed {self.stop:.4g} (rollout.stop_difference). Worst: sample "
                f"{sample.index} in slot {sample.ref.slot}, {difference:.4g} in the mean. The engine does not sample "
                f"what the trainer trains: {LOOK_AT}"
            )
        if verdict == "warn" and (self._warned is None or step - self._warned >= WARN_EVERY):
            self._warned = step
            log.warning(
                "step %d: %s; expected at most %.4g (rollout.warn_difference), the run ends above %.4g "
                "(rollout.stop_difference): %s", step, figures, self.warn, self.stop, LOOK_AT,
            )  # fmt: skip


def worst_sample(cache: TokenCache, samples: Sequence[Sample]) -> tuple[Sample, float]:
    """The sample with the largest mean absolute difference over its masked tokens, in nats; NaN is the largest."""
    means = [_mean_difference(cache, sample) for sample in samples]
    worst = int(np.argmax([math.inf if math.isnan(mean) else mean for mean in means]))
    return samples[worst], means[worst]


def _mean_difference(cache: TokenCache, sample: Sample) -> float:
    inside = cache.response("response_mask", sample.ref) > 0
    trainer, engine = (
        cache.response(name, sample.ref)[inside].astype(np.float64) for name in ("logprobs", "behaviour_logprobs")
    )
    return float(np.abs(trainer - engine).mean()) if inside.any() else 0.0
