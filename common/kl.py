"""Estimators of KL(policy || reference) from sampled tokens, one implementation for numpy arrays and torch tensors.

Importing this module does not import torch: the caller passes the exponential that fits its arrays, ``numpy.exp`` or
``torch.exp``. Source: Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[np.float64], "torch.Tensor")

MAX_EXPONENT: Final = 20.0
"""k3's exponent is clamped to +- this many nats."""
MAX_K3: Final = 10.0
"""k3's result is clamped to +- this."""


class KLEstimator(Protocol):
    """(logprobs, ref_logprobs, exp) -> KL of each token, in nats, of the same shape and dtype."""

    def __call__(self, logprobs: Array, ref_logprobs: Array, exp: Callable[[Array], Array], /) -> Array: ...


def k1(logprobs: Array, ref_logprobs: Array, exp: Callable[[Array], Array], /) -> Array:
    """The log ratio: unbiased, of either sign, high variance."""
    return logprobs - ref_logprobs


def absolute(logprobs: Array, ref_logprobs: Array, exp: Callable[[Array], Array], /) -> Array:
    """The log ratio's absolute value (``abs``): penalises either direction."""
    return (logprobs - ref_logprobs).__abs__()


def k2(logprobs: Array, ref_logprobs: Array, exp: Callable[[Array], Array], /) -> Array:
    """Half the squared log ratio: biased; its gradient is the KL's."""
    log_ratio = logprobs - ref_logprobs
    return 0.5 * log_ratio * log_ratio


def k3(logprobs: Array, ref_logprobs: Array, exp: Callable[[Array], Array], /) -> Array:
    """exp(d) - 1 - d with d = ref_logprobs - logprobs: unbiased, never negative, low variance."""
    inverse = (ref_logprobs - logprobs).clip(-MAX_EXPONENT, MAX_EXPONENT)
    estimate: Array = exp(inverse) - inverse - 1.0
    return estimate.clip(-MAX_K3, MAX_K3)


KL_ESTIMATORS: Final[dict[str, KLEstimator]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
"""Estimators by the value of ``ppo.kl.estimator``."""
