"""Controllers of the KL coefficient: fixed, or adaptive towards a target (config keys ``ppo.kl.*``)."""

from __future__ import annotations

import math
from typing import Final, Protocol

from common.config import KLConfig

MAX_ERROR: Final = 0.2
"""Largest relative error that the adaptive controller reacts to."""


class KLController(Protocol):
    """Holds the factor of the KL penalty and learns from each step's KL."""

    @property
    def coefficient(self) -> float:
        """Factor of the penalty for the next step."""
        ...

    def observe(self, kl: float, n_samples: float) -> None:
        """Take in a step's mean KL per response, in nats, over ``n_samples`` samples."""
        ...


class FixedKL:
    """The coefficient never changes."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient: Final = coefficient

    def observe(self, kl: float, n_samples: float) -> None:
        """Check the observation; the coefficient stays. Raises ValueError if it is no KL of a step."""
        _check(kl, n_samples)


class AdaptiveKL:
    """Proportional controller in log space (Ziegler et al. 2019, section 2.2).

    Each step multiplies the coefficient by 1 + clip(kl / target - 1, -0.2, 0.2) * n_samples / horizon. The coefficient
    is its whole state: to resume, start with the last one.
    """

    def __init__(self, coefficient: float, target: float, horizon: float) -> None:
        if coefficient < 0 or target <= 0 or horizon <= 0:
            raise ValueError(
                f"adaptive KL needs coefficient >= 0, target > 0 and horizon > 0, "
                f"got coefficient {coefficient}, target {target}, horizon {horizon}"
            )
        self._coefficient = coefficient
        self._target = target
        self._horizon = horizon

    @property
    def coefficient(self) -> float:
        """Factor of the penalty for the next step."""
        return self._coefficient

    def observe(self, kl: float, n_samples: float) -> None:
        """Move the coefficient after a step of ``n_samples`` samples with mean KL per response ``kl``, in nats.

        Raises:
            ValueError: if ``kl`` is not finite.
        """
        _check(kl, n_samples)
        error = min(max(kl / self._target - 1.0, -MAX_ERROR), MAX_ERROR)
        self._coefficient *= 1.0 + error * n_samples / self._horizon


def kl_controller(config: KLConfig, *, samples_per_step: int, coefficient: float | None = None) -> KLController:
    """The controller that ``ppo.kl`` asks for; ``coefficient`` replaces the first one where a run resumes.

    Raises:
        ValueError: if a step has so many samples that a small KL would turn the adaptive coefficient's sign.
    """
    start = config.coefficient if coefficient is None else coefficient
    if config.controller == "fixed":
        return FixedKL(start)
    if MAX_ERROR * samples_per_step >= config.horizon:
        raise ValueError(
            f"ppo.kl.horizon = {config.horizon} is too short for steps of {samples_per_step} samples: "
            f"set it above {MAX_ERROR * samples_per_step}"
        )
    return AdaptiveKL(start, config.target, config.horizon)


def _check(kl: float, n_samples: float) -> None:
    if not math.isfinite(kl):
        raise ValueError(f"KL to the reference policy is {kl}, expected a finite number: look for broken logprobs")
    if n_samples < 0:
        raise ValueError(f"KL was observed over {n_samples} samples, expected 0 or more")
