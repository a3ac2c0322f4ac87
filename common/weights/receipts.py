"""Whether an engine's receipt proves that it runs the version that the writer proved (pure, torch-free).

manifest   what was committed: where each tensor lies
proof      what the writer computed on it: checksums and canary logprobs
receipt    what the engine computed on what it holds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.messages import Manifest, Proof, Receipt
from common.weights.names import adapter_tensors


@dataclass(frozen=True)
class Tolerance:
    """How far writer's and engine's canary logprobs may be apart, in nats: in the mean, and at any one token."""

    mean: float
    largest: float


CANARY_TOLERANCE = {"float32": Tolerance(2e-3, 2e-3), "bfloat16": Tolerance(0.15, 1.0)}
"""By the dtype of the weights. In bfloat16 two right implementations of SmolLM2-135M are 0.04 to 0.08 apart in the mean
and up to 0.3 at a token, and so is each from float32; two tensors of one layer in each other's place make the mean 0.3
to 8 (keys and values, gate and up, the norms; first, middle and last layer)."""
OWN_COPY = -1
"""Offset of a tensor that is the engine's own copy."""


def problem(manifest: Manifest, proof: Proof, receipt: Receipt) -> str:
    """What is wrong with a receipt, naming the first wrong tensor; empty if it proves the manifest's version."""
    checks: tuple[Callable[[Manifest, Proof, Receipt], str], ...] = (
        _proof_problem, _count_problem, _place_problem, _checksum_problem, _cache_problem, _canary_problem,
    )  # fmt: skip
    return next((found for check in checks if (found := check(manifest, proof, receipt))), "")


def canary_tolerance(manifest: Manifest) -> Tolerance:
    """That of the coarsest dtype among the tensors."""
    coarsest = CANARY_TOLERANCE["bfloat16"]
    dtypes = {tensor.dtype for tensor in manifest.tensors} or {"float32"}
    return max((CANARY_TOLERANCE.get(dtype, coarsest) for dtype in dtypes), key=lambda allowed: allowed.largest)


def _proof_problem(manifest: Manifest, proof: Proof, receipt: Receipt) -> str:
    """The writer's own word must fit its manifest, or it proves nothing."""
    if proof.version != manifest.version:
        return f"the writer's proof is of version {proof.version}, expected {manifest.version}"
    tensors, logprobs = len(manifest.tensors), max(0, len(manifest.canary_ids) - 1)
    if len(proof.checksums) != tensors:
        return f"the writer's proof has {len(proof.checksums)} checksums, expected one for each of {tensors} tensors"
    if len(proof.canary_logprobs) != logprobs:
        return f"the writer's proof has {len(proof.canary_logprobs)} canary logprobs, expected {logprobs}"
    return ""


def _count_problem(manifest: Manifest, proof: Proof, receipt: Receipt) -> str:
    parts: tuple[tuple[str, Sequence[float], int], ...] = (
        ("offsets", receipt.offsets, len(manifest.tensors)),
        ("checksums", receipt.checksums, len(manifest.tensors)),
        ("canary logprobs", receipt.canary_logprobs, len(proof.canary_logprobs)),
    )
    for what, found, expected in parts:
        if len(found) != expected:
            return f"its receipt has {len(found)} {what}, expected {expected}"
    return ""


def _place_problem(manifest: Manifest, proof: Proof, receipt: Receipt) -> str:
    if receipt.identity != manifest.identity:
        return f"it maps other memory (identity {receipt.identity!r}, expected {manifest.identity!r})"
    # Engines keep adapters in a form of their own, whatever the base's transport.
    own = set(manifest.tensors if receipt.transport == "copy" else adapter_tensors(manifest))
    for tensor, offset in zip(manifest.tensors, receipt.offsets, strict=True):
        if offset != tensor.offset and not (offset == OWN_COPY and tensor in own):
            found = "is a copy of its own" if offset == OWN_COPY else f"lies at offset {offset}"
            return f"its tensor {tensor.name} {found} (transport {receipt.transport}), expected offset {tensor.offset}"
    return ""


def _checksum_problem(manifest: Manifest, proof: Proof, receipt: Receipt) -> str:
    # Only a copy may have tensors in a form of the engine's own, which the canary alone proves.
    unchecked = set(receipt.unchecked if receipt.transport == "copy" else ())
    sums = zip(manifest.tensors, proof.checksums, receipt.checksums, strict=True)
    for place, (tensor, expected, found) in enumerate(sums):
        if found != expected and place not in unchecked:
            return f"its tensor {tensor.name} has checksum {found}, expected {expected}: its bytes are not the writer's"
    return ""


def _cache_problem(manifest: Manifest, proof: Proof, receipt: Receipt) -> str:
    if receipt.stale_tokens == 0:
        return ""
    return (
        f"its prefix cache still answers from before version {manifest.version} ({receipt.stale_tokens} tokens of the "
        "canary, expected 0)"
    )


def _canary_problem(manifest: Manifest, proof: Proof, receipt: Receipt) -> str:
    allowed = canary_tolerance(manifest)
    pairs = list(zip(proof.canary_logprobs, receipt.canary_logprobs, strict=True))
    for place, (expected, found) in enumerate(pairs, 1):
        if not abs(found - expected) <= allowed.largest:  # NaN never passes
            return (
                f"its logprob of canary token {place} is {found:.6g}, expected {expected:.6g}: it differs from the "
                f"writer's by {abs(found - expected):.4g} nats, allowed {allowed.largest}"
            )
    mean = sum(abs(found - expected) for expected, found in pairs) / max(1, len(pairs))
    if mean > allowed.mean:
        return (
            f"its logprobs of {len(pairs)} canary tokens differ from the writer's by {mean:.4g} nats in the mean, "
            f"allowed {allowed.mean}"
        )
    return ""
