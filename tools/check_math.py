"""``quartet check-math CASES.json``: run the numerics that services select by name against given expected values.

``tools.math_cases`` describes the file. Everything is computed in float64 by the functions in the services' own
registries; gradients come from autograd; KL estimators run through both numpy and torch and the larger error counts.
Only the fields that a case expects are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from common.aggregation import Normalizer
from common.kl import KL_ESTIMATORS
from services.coordinator.advantages import ADVANTAGES, AdvantageInputs
from services.coordinator.kl_control import AdaptiveKL
from services.critic.objective import value_loss
from services.trainer.objective import POLICY_LOSSES, PolicyBatch, PolicyOptions
from tools.math_cases import (
    AdaptiveKLCase,
    AdvantageCase,
    Case,
    CaseError,
    CaseFile,
    FloatArray,
    KLCase,
    PolicyCase,
    ValueCase,
    matrices_of,
    to_array,
)

Outputs = dict[str, list[FloatArray]]
"""Results by name; a quantity that is computed in several ways has several."""


class Failure(Struct, frozen=True):
    """A field over its tolerance, with its largest absolute error.

    ``max_error`` is null where shapes differ or a result is not finite.
    """

    id: str
    field: str
    max_error: float | None


class Report(Struct, frozen=True):
    """Numbers of cases that passed and failed, and every field that failed."""

    passed: int
    failed: int
    failures: list[Failure]


def check_math(cases: list[Case]) -> Report:
    """Check all cases.

    Raises:
        CaseError: naming the case, if its operation is unknown or its inputs do not fit.
    """
    failures: list[Failure] = []
    failed = 0
    for case in cases:
        try:
            found = _check(case)
        except (msgspec.ValidationError, ValueError) as error:
            raise CaseError(f"case {case.id!r} ({case.op}): {error}") from error
        failed += bool(found)
        failures += found
    return Report(passed=len(cases) - failed, failed=failed, failures=failures)


def main(path: str | Path, out: TextIO) -> int:
    """Check a file and print the report as one JSON object on ``out``.

    Returns 0 if all passed, 1 if any failed, 2 (with a message on standard error) if the file cannot be checked.
    """
    try:
        cases = msgspec.json.decode(Path(path).read_bytes(), type=CaseFile).cases
        report = check_math(cases)
    except OSError as error:
        print(f"check-math: cannot read {path}: {error.strerror}", file=sys.stderr)
        return 2
    except (msgspec.DecodeError, CaseError) as error:
        print(f"check-math: {path}: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(report).decode(), file=out)
    return 1 if report.failed else 0


def _check(case: Case) -> list[Failure]:
    if case.op not in OPERATIONS:
        raise CaseError(f"unknown op, expected one of {', '.join(OPERATIONS)}")
    outputs = OPERATIONS[case.op](case.inputs)
    if not case.expected:
        raise CaseError("expects nothing: name at least one field in 'expected'")
    found: list[Failure] = []
    for field, value in case.expected.items():
        if field not in outputs:
            raise CaseError(f"unknown field {field!r} in 'expected', this op gives {', '.join(outputs)}")
        expected = to_array(msgspec.convert(value, float | list[float | list[float]]), f"expected.{field}")
        error = max(_error(result, expected) for result in outputs[field])
        if not error <= case.tolerance:
            found.append(Failure(case.id, field, error if np.isfinite(error) else None))
    return found


def _error(result: FloatArray, expected: FloatArray) -> float:
    if result.shape != expected.shape or not np.isfinite(result).all():
        return float("inf")
    return float(np.abs(result - expected).max(initial=0.0))


def _advantages(op: str, required: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Outputs]:
    """The check of one estimator; ``required`` are the inputs that it needs beside rewards and mask."""

    def run(raw: Mapping[str, Any]) -> Outputs:
        case = msgspec.convert(raw, AdvantageCase)
        for name in required:
            if getattr(case, name) is None:
                raise CaseError(f"inputs lack {name!r}")
        matrices = matrices_of(case)
        rows = len(case.rewards)
        result = ADVANTAGES[op](
            AdvantageInputs(
                rewards=matrices["rewards"],
                mask=matrices["mask"],
                values=matrices.get("values"),
                group=np.zeros(rows, np.int64) if case.group is None else np.asarray(case.group, np.int64),
                bootstrap_values=None if case.bootstrap_values is None else np.asarray(case.bootstrap_values),
                baselines=None if case.baselines is None else np.asarray(case.baselines),
                gamma=1.0 if case.gamma is None else case.gamma,
                lam=1.0 if case.lam is None else case.lam,
                whiten=bool(case.whiten),
            )
        )
        return {"advantages": [result.advantages], "returns": [result.returns]}

    return run


def _tensors(inputs: Struct) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in matrices_of(inputs).items()}


def _policy(loss: str) -> Callable[[Mapping[str, Any]], Outputs]:
    """The check of one policy loss, by its name in the registry."""

    def run(raw: Mapping[str, Any]) -> Outputs:
        case = msgspec.convert(raw, PolicyCase)
        tensors = _tensors(case)
        logprobs = tensors["logprobs"].requires_grad_()
        options = PolicyOptions(
            clip_low=case.clip_low,
            clip_high=case.clip_high,
            dual_clip=case.dual_clip or 0.0,
            aggregation=case.aggregation,
        )
        result = POLICY_LOSSES[loss](PolicyBatch(**tensors), options, Normalizer.of(tensors["mask"]))
        return _loss_outputs(result.loss, result.clip_fraction, "grad_logprobs", logprobs)

    return run


def _value(raw: Mapping[str, Any]) -> Outputs:
    case = msgspec.convert(raw, ValueCase)
    tensors = _tensors(case)
    preds = tensors["value_preds"].requires_grad_()
    result = value_loss(
        **tensors,
        clip_range=case.clip_range or 0.0,
        aggregation=case.aggregation,
        normalizer=Normalizer.of(tensors["mask"]),
    )
    return _loss_outputs(result.loss, result.clip_fraction, "grad_value_preds", preds)


def _loss_outputs(loss: Tensor, clip_fraction: Tensor, gradient_name: str, leaf: Tensor) -> Outputs:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {
        "loss": [loss.detach().numpy()],
        gradient_name: [gradient.numpy()],
        "clip_fraction": [clip_fraction.numpy()],
    }


def _kl(raw: Mapping[str, Any]) -> Outputs:
    case = msgspec.convert(raw, KLCase)
    matrices = matrices_of(case)
    estimate = KL_ESTIMATORS[case.estimator]
    logprobs, reference = matrices["logprobs"], matrices["ref_logprobs"]
    by_numpy = estimate(logprobs, reference, np.exp)
    by_torch = estimate(torch.tensor(logprobs), torch.tensor(reference), torch.exp)
    return {"kl": [np.asarray(by_numpy), by_torch.numpy()]}


def _adaptive_kl(raw: Mapping[str, Any]) -> Outputs:
    case = msgspec.convert(raw, AdaptiveKLCase)
    controller = AdaptiveKL(case.init, case.target, case.horizon)
    coefficients: list[float] = []
    for kl, n_steps in case.observations:
        controller.observe(kl, n_steps)
        coefficients.append(controller.coefficient)
    return {"coefficients": [np.asarray(coefficients)]}


OPERATIONS: Final[dict[str, Callable[[Mapping[str, Any]], Outputs]]] = {
    "gae": _advantages("gae", ("values", "gamma", "lam", "whiten")),
    "policy_loss": _policy("ppo"),
    "gspo_loss": _policy("gspo"),
    "value_loss": _value,
    "kl": _kl,
    "grpo": _advantages("grpo", ("group",)),
    "dr_grpo": _advantages("dr_grpo", ("group",)),
    "rloo": _advantages("rloo", ("group",)),
    "reinforce_pp": _advantages("reinforce_pp", ("gamma",)),
    "reinforce_pp_baseline": _advantages("reinforce_pp_baseline", ("group",)),
    "remax": _advantages("remax", ("baselines",)),
    "adaptive_kl": _adaptive_kl,
}
"""Operations by the name that a case file uses."""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: check_math CASES.json", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1], sys.stdout))
