"""Which of an engine's parameters is which run of a weight set's tensors. Knows names and shapes, nothing of vLLM.

An engine's ``…qkv_proj.weight`` is the rows of q, k and v one after the other; its embedding is the set's with padding
rows below. Where a parameter is exactly such a run of bytes, the engine can run on them as they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from common.messages import Manifest, TensorEntry
from common.weights.layout import VOCABULARY, VOCABULARY_ROWS, dtype_name, entry_bytes


class LayoutUnknown(Exception):
    """The engine's parameters are not runs of the set's tensors; the message says which and why."""


@dataclass(frozen=True)
class Placement:
    """One parameter of the engine: ``entries`` are its rows in order; ``shape`` may have padding rows more."""

    parameter: str
    entries: tuple[TensorEntry, ...]
    shape: tuple[int, ...]

    @property
    def offset(self) -> int:
        return self.entries[0].offset

    def rows(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameter's tensor by the names of the set, as views of its rows."""
        views: dict[str, torch.Tensor] = {}
        start = 0
        for entry in self.entries:
            views[entry.name] = tensor[start : start + entry.shape[0]] if entry.shape else tensor
            start += entry.shape[0] if entry.shape else 0
        return views


def place(
    parameters: Mapping[str, torch.Tensor], manifest: Manifest, packed: Mapping[str, Sequence[str]]
) -> list[Placement]:
    """Places every parameter of an engine; ``packed`` names what a fused module is made of (vLLM's own mapping).

    Raises LayoutUnknown where a parameter is not such a run, or a tensor of the set belongs to none of them.
    """
    by_name = {entry.name: entry for entry in manifest.tensors}
    placements = [
        _place_one(name, parameter, by_name, packed, _room_after(manifest)) for name, parameter in parameters.items()
    ]
    placed = {entry.name for placement in placements for entry in placement.entries}
    if left := sorted(set(by_name) - placed):
        raise LayoutUnknown(f"the engine has no place for {left[0]!r} and {len(left) - 1} more tensors")
    return placements


def _place_one(
    name: str, parameter: torch.Tensor, by_name: Mapping[str, TensorEntry], packed: Mapping[str, Sequence[str]],
    room_after: Mapping[str, int],
) -> Placement:  # fmt: skip
    entries = tuple(by_name[part] for part in part_names(name, packed) if part in by_name)
    if len(entries) != len(part_names(name, packed)):
        raise LayoutUnknown(f"the weight set has no tensor for the engine's {name!r}")
    dtype = dtype_name(parameter.dtype)
    if wrong := [entry.name for entry in entries if entry.dtype != dtype]:
        raise LayoutUnknown(f"{wrong[0]!r} is not {dtype} as the engine's {name!r} is")
    for before, after in pairwise(entries):
        if before.offset + entry_bytes(before) != after.offset:
            raise LayoutUnknown(
                f"{after.name!r} does not follow {before.name!r}, but the engine fuses both in {name!r}"
            )
    shape = tuple(parameter.shape)
    rows = sum(entry.shape[0] for entry in entries) if entries[0].shape else 0
    padding = shape[0] - rows if shape else 0
    padded = len(entries) == 1 and name.endswith(VOCABULARY) and padding == -rows % VOCABULARY_ROWS
    if any(entry.shape[1:] != shape[1:] for entry in entries) or (padding != 0 and not padded):
        raise LayoutUnknown(f"the engine's {name!r} is {shape}, the set has {[entry.shape for entry in entries]}")
    if padding and padding * parameter[0].nbytes > room_after[entries[0].name]:
        raise LayoutUnknown(f"no room for {padding} padding rows after {entries[0].name!r}")
    return Placement(name, entries, shape)


def part_names(name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """``layers.0.qkv_proj.weight`` -> the names of q, k and v; any other name stands for itself."""
    pieces = name.split(".")
    for index, piece in enumerate(pieces):
        if len(packed.get(piece, ())) > 1:
            return [".".join([*pieces[:index], part, *pieces[index + 1 :]]) for part in packed[piece]]
    return [name]


def _room_after(manifest: Manifest) -> dict[str, int]:
    """Bytes between the end of each tensor and the start of the next one, or the end of the set."""
    ordered = sorted(manifest.tensors, key=lambda entry: entry.offset)
    starts = [entry.offset for entry in ordered[1:]] + [manifest.nbytes]
    return {entry.name: start - entry.offset - entry_bytes(entry) for entry, start in zip(ordered, starts, strict=True)}
