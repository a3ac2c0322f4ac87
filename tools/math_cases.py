"""The format of the case files that ``quartet check-math`` reads, and the inputs of each operation.

A file is ``{"format": 1, "cases": [{"id", "op", "inputs", "expected", "tolerance"}]}``. Matrices are lists of rows,
``[batch][response position]``.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from common.config import Aggregation

FloatArray = NDArray[np.float64]
Row = list[float]
Matrix = list[list[float]]
Mask = list[list[float | bool]]


MATRICES: Final = (
    *("rewards", "mask", "values", "logprobs", "old_logprobs", "ref_logprobs", "advantages", "importance_weights"),
    *("value_preds", "old_values", "returns"),
)
"""Inputs that are matrices."""


class CaseError(ValueError):
    """A file or a case that cannot be checked, as opposed to one that fails."""


class Case(Struct, frozen=True):
    """One case of a file; ``inputs`` and ``expected`` are read by its operation."""

    id: str
    op: str
    inputs: dict[str, Any]
    expected: dict[str, Any]
    tolerance: float


class CaseFile(Struct, frozen=True):
    """A whole file."""

    format: Literal[1]
    cases: list[Case]


class AdvantageCase(Struct, frozen=True):
    """Inputs of every advantage estimator; which are needed depends on it."""

    rewards: Matrix
    mask: Mask
    group: list[int] | None = None
    values: Matrix | None = None
    bootstrap_values: Row | None = None
    baselines: Row | None = None
    gamma: float | None = None
    lam: float | None = None
    whiten: bool | None = None


class PolicyCase(Struct, frozen=True):
    """Inputs of ``policy_loss`` and ``gspo_loss``; ``dual_clip`` null, 0 or absent is off."""

    logprobs: Matrix
    old_logprobs: Matrix
    advantages: Matrix
    mask: Mask
    clip_low: float
    clip_high: float
    aggregation: Aggregation
    importance_weights: Matrix | None = None
    dual_clip: float | None = None


class ValueCase(Struct, frozen=True):
    """Inputs of ``value_loss``; ``clip_range`` null or 0 is off."""

    value_preds: Matrix
    old_values: Matrix
    returns: Matrix
    mask: Mask
    aggregation: Aggregation
    clip_range: float | None


class KLCase(Struct, frozen=True):
    """Inputs of ``kl``."""

    logprobs: Matrix
    ref_logprobs: Matrix
    estimator: Literal["k1", "abs", "k2", "k3"]


class AdaptiveKLCase(Struct, frozen=True):
    """Inputs of ``adaptive_kl``; an observation is (KL, number of samples)."""

    init: float
    target: float
    horizon: float
    observations: list[tuple[float, float]]


def to_array(value: float | list[Any], name: str) -> FloatArray:
    """One number, row or matrix as float64. Raises CaseError if it is not rectangular."""
    try:
        return np.asarray(value, dtype=np.float64)
    except ValueError as error:
        raise CaseError(f"{name} is not rectangular: its rows differ in length") from error


def matrices_of(inputs: Struct) -> dict[str, FloatArray]:
    """All matrices among the inputs, by name, checked to be of one shape with at least one row and column."""
    arrays: dict[str, FloatArray] = {}
    for name in inputs.__struct_fields__:
        if name in MATRICES and (value := getattr(inputs, name)) is not None:
            arrays[name] = to_array(value, name)
    first, shape = next((name, array.shape) for name, array in arrays.items())
    for name, array in arrays.items():
        if array.ndim != 2 or array.size == 0 or array.shape != shape:
            shapes = f"{name} has shape {list(array.shape)}, {first} has {list(shape)}"
            raise CaseError(f"{shapes}: expected [batch, tokens], the same for all")
    return arrays
