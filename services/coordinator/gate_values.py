"""Whether manifests, proofs and results can be: names, sizes and places in them (pure)."""

from __future__ import annotations

from pathlib import PurePosixPath

from common.messages import (
    CudaHandle,
    HostBuffer,
    Hosted,
    Manifest,
    Proof,
    Result,
    Saved,
    ScoreBatch,
    Scores,
    SlotRef,
    Task,
    TensorEntry,
)

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""By torch's name of the dtype."""


def manifest_problem(manifest: Manifest, before: Manifest | None, shared: str) -> str:
    """``before`` is what the same trainer committed last; ``shared`` the run's directory in memory."""
    where = f"{manifest.name!r}@{manifest.version}"
    if manifest.version < 0:
        return f"weights {where}: expected version 0 or later"
    if manifest.path and not within(manifest.path, shared):
        return f"weights {where}: {manifest.path!r} does not lie in {shared}"
    same_memory = before is not None and (before.name, before.identity) == (manifest.name, manifest.identity)
    if same_memory and before is not None and before.tensors == manifest.tensors and before.nbytes == manifest.nbytes:
        return ""
    names: set[str] = set()
    for tensor in manifest.tensors:
        found = tensor_problem(tensor, manifest.nbytes) or ("twice" if tensor.name in names else "")
        if found:
            return f"weights {where}: tensor {tensor.name!r}: {found}"
        names.add(tensor.name)
    if same_memory:
        return f"weights {where}: other tensors than before in the same memory ({manifest.identity})"
    return ""


def tensor_problem(tensor: TensorEntry, nbytes: int) -> str:
    """What is wrong with a tensor in a set of so many bytes."""
    if not tensor.name or ".." in tensor.name or "/" in tensor.name or not tensor.name.isprintable():
        return "this is no tensor's name"
    item = ITEM_BYTES.get(tensor.dtype)
    if item is None:
        return f"dtype {tensor.dtype!r}, expected one of {', '.join(ITEM_BYTES)}"
    size = item
    for extent in tensor.shape:
        size *= extent
    if tensor.offset % item or tensor.offset + size > nbytes:
        return f"{size} bytes at offset {tensor.offset}, but the set has {nbytes}"
    return ""


def proof_problem(proof: Proof, manifest: Manifest | None) -> str:
    """What is in a proof is compared with every receipt; here it matters that there is something to prove."""
    if manifest is None or proof.version > manifest.version:
        committed = "nothing" if manifest is None else f"version {manifest.version}"
        return f"it proves version {proof.version}, and has committed {committed}"
    return ""


def result_problem(result: Result, task: Task, refs: frozenset[SlotRef], run_directory: str) -> str:
    """A result of another kind than the task's is the dispatcher's to refuse."""
    match result, task:
        case Scores(scores=scores), ScoreBatch(items=items):
            alien = next((score.ref for score in scores if score.ref not in refs), None)
            if alien is not None:
                return f"slot {alien.slot} (generation {alien.generation}) is not in its lease"
            return f"{len(scores)} scores for {len(items)} samples" if len(scores) > len(items) else ""
        case Hosted(handle=handle), HostBuffer() as wanted:
            return handle_problem(handle, wanted)
        case Saved(path=path), _ if not within(path, run_directory):
            return f"{path!r} does not lie in {run_directory}"
        case _:
            return ""


def handle_problem(handle: CudaHandle, wanted: HostBuffer) -> str:
    """What is wrong with the handle of a buffer, before anybody gives it to CUDA."""
    if handle.gpu != wanted.gpu or handle.nbytes < wanted.nbytes:
        return f"{handle.nbytes} bytes on {handle.gpu}, expected {wanted.nbytes} on {wanted.gpu}"
    return handle.wrong_length()


def within(path: str, directory: str) -> bool:
    """Whether a path names something in a directory, without '..'; one that is relative is taken as within."""
    pure = PurePosixPath(path)
    inside = not pure.is_absolute() or (pure.is_relative_to(directory) and pure != PurePosixPath(directory))
    return inside and ".." not in pure.parts and "\0" not in path
