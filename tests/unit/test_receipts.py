"""Every way in which a receipt can be wrong is named, with the first wrong tensor."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from common.messages import Manifest, Proof, Receipt, TensorEntry
from common.weights.receipts import Tolerance, canary_tolerance, problem

NAMES = ("embedding", "attention", "head")


def manifest(*dtypes: str) -> Manifest:
    used = dtypes or ("float32",) * len(NAMES)
    tensors = tuple(
        TensorEntry(name=name, dtype=dtype, shape=(4,), offset=4096 + 16 * place)
        for place, (name, dtype) in enumerate(zip(NAMES, used, strict=True))
    )
    return Manifest(
        name="policy", version=7, path="", identity="one", gpu="", nbytes=4144, tensors=tensors, canary_ids=(5, 6, 7)
    )


MANIFEST = manifest()
PROOF = Proof(version=7, checksums=(11, -22, 33), canary_logprobs=(-1.0, -2.0))
ALIAS = Receipt(
    transport="alias", identity="one", offsets=(4096, 4112, 4128), checksums=(11, -22, 33),
    canary_logprobs=(-1.0, -2.001),
)  # fmt: skip
COPY = msgspec.structs.replace(ALIAS, transport="copy", offsets=(-1, -1, -1), copied_bytes=48)


def changed(receipt: Receipt, **fields: Any) -> Receipt:
    return msgspec.structs.replace(receipt, **fields)


@pytest.mark.parametrize("receipt", [ALIAS, COPY, changed(COPY, offsets=(4096, -1, -1))])
def test_the_right_receipt_has_no_problem(receipt: Receipt) -> None:
    assert problem(MANIFEST, PROOF, receipt) == ""


@pytest.mark.parametrize("receipt", [ALIAS, COPY])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"identity": "two"}, "it maps other memory (identity 'two', expected 'one')"),
        ({"offsets": (4096, 4128, 4112)}, "its tensor attention lies at offset 4128"),
        ({"offsets": (4096, 4112)}, "its receipt has 2 offsets, expected 3"),
        ({"checksums": (11, -23, 34)}, "its tensor attention has checksum -23, expected -22"),
        ({"checksums": (11, -22, 33, 44)}, "its receipt has 4 checksums, expected 3"),
        ({"stale_tokens": 2}, "its prefix cache still answers from before version 7 (2 tokens"),
        ({"canary_logprobs": (-1.0, -2.0021)}, "canary token 2 is -2.0021, expected -2: it differs from the writer's"),
        ({"canary_logprobs": (math.nan, -2.0)}, "canary token 1 is nan"),
        ({"canary_logprobs": (-math.inf, -2.0)}, "canary token 1 is -inf"),
        ({"canary_logprobs": (-1.0,)}, "its receipt has 1 canary logprobs, expected 2"),
    ],
)
def test_what_is_wrong_with_a_receipt_is_named(receipt: Receipt, fields: dict[str, Any], said: str) -> None:
    assert said in problem(MANIFEST, PROOF, changed(receipt, **fields))


def test_an_aliased_tensor_is_no_copy() -> None:
    found = problem(MANIFEST, PROOF, changed(ALIAS, offsets=(4096, 4112, -1)))
    assert found == "its tensor head is a copy of its own (transport alias), expected offset 4128"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 6}, "the writer's proof is of version 6, expected 7"),
        ({"checksums": (11, -22)}, "the writer's proof has 2 checksums, expected one for each of 3 tensors"),
        ({"canary_logprobs": ()}, "the writer's proof has 0 canary logprobs, expected 2"),
        ({"canary_logprobs": (math.nan, -2.0)}, "canary token 1 is -1, expected nan"),
        ({"canary_logprobs": (-math.inf, -2.0)}, "canary token 1 is -1, expected -inf"),
    ],
)
def test_a_proof_that_proves_nothing_is_named(fields: dict[str, Any], said: str) -> None:
    assert said in problem(MANIFEST, msgspec.structs.replace(PROOF, **fields), ALIAS)


def test_logprobs_that_are_infinite_on_both_sides_do_not_pass() -> None:
    infinite = (-math.inf, -2.0)
    proof = msgspec.structs.replace(PROOF, canary_logprobs=infinite)
    assert "canary token 1" in problem(MANIFEST, proof, changed(ALIAS, canary_logprobs=infinite))


@pytest.mark.parametrize(
    ("dtypes", "mean", "largest"),
    [
        (("float32", "float32", "float32"), 2e-3, 2e-3),
        (("float32", "bfloat16", "float32"), 0.15, 1.0),
        (("bfloat16", "bfloat16", "bfloat16"), 0.15, 1.0),
    ],
)
def test_the_tolerance_goes_by_the_coarsest_dtype(dtypes: tuple[str, ...], mean: float, largest: float) -> None:
    length = 16
    found = msgspec.structs.replace(manifest(*dtypes), canary_ids=tuple(range(length + 1)))
    proof = msgspec.structs.replace(PROOF, canary_logprobs=(-2.0,) * length)
    assert canary_tolerance(found) == Tolerance(mean, largest)
    for factor, right in ((0.99, True), (1.01, False)):
        one = (-2.0 - factor * largest, *(-2.0,) * (length - 1))
        assert (problem(found, proof, changed(ALIAS, canary_logprobs=one)) == "") is right
        each = (-2.0 - factor * mean,) * length
        assert (problem(found, proof, changed(ALIAS, canary_logprobs=each)) == "") is right


def test_without_a_canary_the_tensors_alone_count() -> None:
    bare = msgspec.structs.replace(MANIFEST, canary_ids=())
    proof = msgspec.structs.replace(PROOF, canary_logprobs=())
    assert problem(bare, proof, changed(ALIAS, canary_logprobs=())) == ""
