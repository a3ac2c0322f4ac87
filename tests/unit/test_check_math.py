"""``quartet check-math``: it passes right numbers, finds planted wrong ones, and refuses what it cannot check."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Aggregation
from common.kl import KL_ESTIMATORS, Array
from services.coordinator.advantages import ADVANTAGES, AdvantageInputs, Advantages
from tools.check_math import OPERATIONS, main

CASES = Path(__file__).parent / "cases" / "ppo_math.json"
Case = dict[str, Any]


def load() -> list[Case]:
    cases: list[Case] = json.loads(CASES.read_text())["cases"]
    return cases


def run(tmp_path: Path, cases: object) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"format": 1, "cases": cases}))
    out = io.StringIO()
    code = main(path, out)
    return code, json.loads(out.getvalue() or "{}")


def first(op: str) -> Case:
    return next(case for case in load() if case["op"] == op)


def test_the_command_passes_the_own_cases() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.check_math", str(CASES)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"passed": len(load()), "failed": 0, "failures": []}


def test_the_own_cases_cover_every_operation_aggregation_and_estimator() -> None:
    cases = load()
    assert {case["op"] for case in cases} == set(OPERATIONS)
    for op in ("policy_loss", "gspo_loss", "value_loss"):
        modes = {case["inputs"]["aggregation"] for case in cases if case["op"] == op}
        assert modes == set(typing.get_args(Aggregation))
    assert {case["inputs"]["estimator"] for case in cases if case["op"] == "kl"} == set(KL_ESTIMATORS)


Value = float | list["Value"]


def spoil(value: Value) -> Value:
    """Add 0.01 to the last number."""
    return [*value[:-1], spoil(value[-1])] if isinstance(value, list) else value + 0.01


@pytest.mark.parametrize("case", load(), ids=lambda case: case["id"])
def test_a_planted_wrong_number_is_found_in_every_field(tmp_path: Path, case: Case) -> None:
    for field, value in case["expected"].items():
        wrong = {**case, "expected": {**case["expected"], field: spoil(value)}}
        code, report = run(tmp_path, [case, wrong])
        assert (code, report["passed"], report["failed"]) == (1, 1, 1)
        (failure,) = report["failures"]
        assert (failure["id"], failure["field"]) == (case["id"], field)
        assert failure["max_error"] == pytest.approx(0.01, abs=1e-6)


def test_a_case_with_two_wrong_fields_counts_once(tmp_path: Path) -> None:
    case = first("gae")
    case["expected"] = {field: spoil(value) for field, value in case["expected"].items()}
    code, report = run(tmp_path, [case])
    assert (code, report["passed"], report["failed"], len(report["failures"])) == (1, 0, 1, 2)


def test_an_expectation_of_another_shape_fails_without_a_number(tmp_path: Path) -> None:
    case = first("grpo")
    case["expected"]["advantages"] = case["expected"]["advantages"][1:]
    code, report = run(tmp_path, [case])
    assert code == 1
    assert report["failures"] == [{"id": case["id"], "field": "advantages", "max_error": None}]


def test_it_checks_the_function_that_the_registry_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ADVANTAGES["gae"]

    def wrong(inputs: AdvantageInputs) -> Advantages:
        result = right(inputs)
        return Advantages(result.advantages * 1.001, result.returns)

    monkeypatch.setitem(ADVANTAGES, "gae", wrong)
    code, report = run(tmp_path, [first("gae")])
    assert code == 1
    assert [failure["field"] for failure in report["failures"]] == ["advantages"]


@pytest.mark.parametrize("broken", [np.ndarray, torch.Tensor])
def test_kl_is_checked_through_numpy_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: type[object]
) -> None:
    right = KL_ESTIMATORS["k1"]

    def wrong(logprobs: Array, ref_logprobs: Array, exp: Callable[[Array], Array], /) -> Array:
        result = right(logprobs, ref_logprobs, exp)
        return result + 1.0 if isinstance(result, broken) else result

    monkeypatch.setitem(KL_ESTIMATORS, "k1", wrong)
    code, report = run(tmp_path, [first("kl")])
    assert code == 1
    assert report["failures"][0]["max_error"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("off", [0, 0.0, None, "absent"])
def test_dual_clip_is_off_when_zero_null_or_absent(tmp_path: Path, off: float | str | None) -> None:
    case = first("policy_loss")
    assert case["inputs"].pop("dual_clip") == 0
    if off != "absent":
        case["inputs"]["dual_clip"] = off
    case["inputs"].pop("importance_weights", None)
    assert run(tmp_path, [case])[0] == 0
    case["inputs"]["dual_clip"] = 1.0001
    assert run(tmp_path, [case])[0] == 1


def drop(name: str) -> Callable[[Case], None]:
    return lambda case: case["inputs"].pop(name)


def put(name: str, value: object) -> Callable[[Case], None]:
    return lambda case: case["inputs"].update({name: value})


def replace(name: str, value: object) -> Callable[[Case], None]:
    return lambda case: case.update({name: value})


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("gae", replace("op", "gea"), "(gea): unknown op, expected one of gae, policy_loss"),
        ("gae", drop("values"), "inputs lack 'values'"),
        ("gae", drop("rewards"), "missing required field `rewards`"),
        ("gae", put("mask", [[1, 1], [1], [1, 1]]), "mask is not rectangular"),
        ("gae", put("rewards", [["1", "2"]]), "Expected `float`, got `str`"),
        ("gae", put("bootstrap_values", [0.0]), "bootstrap_values has shape [1], expected [3]"),
        ("rloo", drop("group"), "inputs lack 'group'"),
        ("rloo", put("rewards", []), "rewards has shape [0]"),
        ("remax", drop("baselines"), "inputs lack 'baselines'"),
        ("policy_loss", put("mask", [[1, 1, 1, 1]]), "mask has shape [1, 4], logprobs has [3, 4]"),
        ("policy_loss", put("aggregation", "mean"), "Invalid enum value 'mean' - at `$.aggregation`"),
        ("kl", put("estimator", "k4"), "Invalid enum value 'k4' - at `$.estimator`"),
        ("adaptive_kl", put("observations", [[1.0]]), "Expected `array` of length 2, got 1"),
        ("grpo", replace("expected", {}), "expects nothing"),
        ("grpo", replace("expected", {"loss": 0.0}), "unknown field 'loss' in 'expected'"),
    ],
)
def test_a_case_that_cannot_be_checked_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], op: str, change: Callable[[Case], None], message: str
) -> None:
    case = first(op)
    change(case)
    assert run(tmp_path, [case]) == (2, {})
    complaint = capsys.readouterr().err
    assert f"case {case['id']!r} ({case['op']}): " in complaint
    assert message in complaint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "Input data was truncated"),
        ('{"format": 2, "cases": []}', "Invalid enum value 2 - at `$.format`"),
        ('{"format": 1}', "missing required field `cases`"),
        ('{"format": 1, "cases": [{"id": "a", "op": "gae"}]}', "missing required field `inputs` - at `$.cases[0]`"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "cases.json"
    if content is not None:
        path.write_text(content)
    assert main(path, io.StringIO()) == 2
    complaint = capsys.readouterr().err
    assert str(path) in complaint
    assert message in complaint
