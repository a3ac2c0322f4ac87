"""Where the tensors of a weight set lie in its memory, so that engines with fused layers can run on them as they are.

Inference engines keep q, k and v in one matrix, gate and up in another, and pad the vocabulary. Rows of a matrix are
contiguous, so a fused matrix is nothing but its parts one after the other: laid out that way, trainer and engine use
the same bytes under different names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from common.messages import TensorEntry
from common.weights.header import HEADER_BYTES, WeightsError
from common.weights.names import plain_name

ALIGNMENT = 256
"""Bytes to which every tensor, or fused group of tensors, is aligned; CUDA allocations are aligned so too."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines fuse, in the order of their rows there."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Tensors with a row for each token of the vocabulary."""
VOCABULARY_ROWS = 64
"""Engines pad the vocabulary to a multiple of this (vLLM's DEFAULT_VOCAB_PADDING_SIZE)."""


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by their plain names (``names.plain_name``), tied ones once, and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return {plain_name(name): tensor for name, tensor in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"unknown dtype {name!r} in a weight manifest")
    return dtype


def entry_bytes(entry: TensorEntry) -> int:
    """Size of a tensor in bytes."""
    size = dtype_from_name(entry.dtype).itemsize
    for extent in entry.shape:
        size *= extent
    return size


def plan(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[TensorEntry, ...], int]:
    """Returns the entries, by rising offset, and the bytes of the whole set.

    The first ``HEADER_BYTES`` are left to whoever hosts the memory.
    """
    entries: list[TensorEntry] = []
    offset = HEADER_BYTES
    for group in _groups(tensors):
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        for name in group:
            tensor = tensors[name]
            entries.append(
                TensorEntry(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), offset=offset)
            )
            offset += tensor.nbytes + _padding(name, tensor)
    return tuple(entries), -(-offset // ALIGNMENT) * ALIGNMENT


def _padding(name: str, tensor: torch.Tensor) -> int:
    """Bytes of the vocabulary's padding rows, which are zero and belong to no tensor."""
    if not name.endswith(VOCABULARY) or tensor.ndim != 2:
        return 0
    return -len(tensor) % VOCABULARY_ROWS * tensor[0].nbytes


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, ...]]:
    """Names in the model's order, those of a fused group together where its first one stands."""
    placed: set[str] = set()
    for name in tensors:
        if name not in placed:
            group = fused_group(name, tensors)
            placed.update(group)
            yield group


def fused_group(name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """The tensors that an engine fuses with this one, in its order; the name alone where there are none.

    Weights of one width and dtype, or biases, of the same layer: ``….q_proj.weight``, ``….k_proj.weight``, ….
    """
    prefix, _, kind = name.rpartition(".")
    layer, _, projection = prefix.rpartition(".")
    for members in FUSED:
        if projection in members:
            names = tuple(f"{layer}.{member}.{kind}" for member in members)
            present = [tensors[other] for other in names if other in tensors]
            alike = {(tensor.dtype, tensor.shape[1:]) for tensor in present}
            if len(present) == len(names) and len(alike) == 1:
                return names
    return (name,)
