"""Where tensors lie in a weight set: fused groups side by side, padded vocabularies, alignment."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages import TensorEntry
from common.weights.header import HEADER_BYTES
from common.weights.layout import ALIGNMENT, FUSED, entry_bytes, fused_group, model_tensors, plan
from tests.unit.weights_support import FUSED_FAMILIES, Pair, entry_end, fused_model

MODELS: list[tuple[str, dict[str, Any]]] = [
    *((family, {"tie_word_embeddings": tied}) for family in FUSED_FAMILIES for tied in (True, False)),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ("mistral", {"num_key_value_heads": 1, "vocab_size": 128}),
]


def planned(family: str, changes: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, TensorEntry]]:
    tensors = model_tensors(fused_model(family, **changes))
    entries, _ = plan(tensors)
    return tensors, {entry.name: entry for entry in entries}


def require_fused(entries: dict[str, TensorEntry], module: str, parts: tuple[str, ...], kind: str) -> int:
    """Requires the parts one after the other, aligned as a whole; returns how many there are."""
    group = [entries[f"{module}.{part}.{kind}"] for part in parts if f"{module}.{part}.{kind}" in entries]
    if group:
        assert len(group) == len(parts)
        assert group[0].offset % ALIGNMENT == 0
        assert all(entry_end(before) == after.offset for before, after in pairwise(group))
    return len(group)


# ---------------------------------------------------------------- fused groups


@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_what_engines_fuse_lies_side_by_side(family: str, changes: dict[str, Any]) -> None:
    tensors, entries = planned(family, changes)
    assert set(entries) == set(tensors)
    found = 0
    for layer in range(2):
        for kind in ("weight", "bias"):
            attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            found += require_fused(entries, attention, ("q_proj", "k_proj", "v_proj"), kind)
            found += require_fused(entries, mlp, ("gate_proj", "up_proj"), kind)
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert found == sum(any(f".{part}." in name for part in names) for name in tensors)
    biases = {"qwen2": 6, "llama": 10 if "mlp_bias" in changes else 0, "qwen3": 6 if "attention_bias" in changes else 0}
    assert found == 10 + biases.get(family, 0)


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_fused_rows_are_the_concatenated_parts_after_every_update(path: Path, family: str) -> None:
    """Read as one matrix, as an engine reads them, from the memory itself."""
    pair = Pair(path, family)
    entries = {entry.name: entry for entry in pair.manifest.tensors}
    for version in (0, 1):
        if version:
            pair.step(version)
        tensors = model_tensors(pair.model)
        for module, parts in (("self_attn", FUSED[0]), ("mlp", FUSED[1])):
            names = [f"model.layers.1.{module}.{part}.weight" for part in parts]
            expected = torch.cat([tensors[name].detach() for name in names])
            first = entries[names[0]]
            fused = pair.reader.memory.span(first.offset, first.dtype, tuple(expected.shape), "fused")
            assert torch.equal(fused, expected), (module, version)


def test_parts_that_do_not_fit_together_stay_apart() -> None:
    """One missing, of another width, of another dtype: no engine fuses them, and none is lost."""
    weight = torch.empty(4, 8)
    alone = {"a.q_proj.weight": weight, "a.k_proj.weight": weight}
    widths = {"a.gate_proj.weight": weight, "a.up_proj.weight": torch.empty(4, 6)}
    dtypes = {"a.gate_proj.weight": weight, "a.up_proj.weight": weight.bfloat16()}
    others = {"a.gate_proj.weight": weight, "b.up_proj.weight": weight}
    for tensors in (alone, widths, dtypes, others):
        assert [fused_group(name, tensors) for name in tensors] == [(name,) for name in tensors]
        entries, _ = plan(tensors)
        assert [entry.name for entry in entries] == list(tensors)
        assert all(entry.offset % ALIGNMENT == 0 for entry in entries)


def test_a_group_lies_where_its_first_part_stands_whatever_the_order() -> None:
    weight = torch.empty(4, 8)
    names = ("a.v_proj.weight", "a.norm.weight", "a.q_proj.weight", "a.k_proj.weight")
    tensors: dict[str, torch.Tensor] = dict.fromkeys(names, weight)
    entries, _ = plan(tensors)
    assert [entry.name for entry in entries] == [
        "a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "a.norm.weight",
    ]  # fmt: skip


# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("vocabulary", "padding"), [(97, 31), (128, 0), (129, 63)])
def test_vocabulary_is_padded_with_zeros_that_stay_zero(path: Path, vocabulary: int, padding: int, tied: bool) -> None:
    pair = Pair(path, "llama", vocab_size=vocabulary, tie_word_embeddings=tied)
    entries = {entry.name: entry for entry in pair.manifest.tensors}
    names = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    assert ("lm_head.weight" in entries) is not tied
    pair.step(1)
    for name in names:
        entry = entries[name]
        rows = pair.reader.memory.span(entry.offset, entry.dtype, (vocabulary + padding, 32), name)
        assert torch.equal(rows[:vocabulary], model_tensors(pair.model)[name])
        assert not rows[vocabulary:].any()
        room = entry_end(entry) + padding * 32 * 4
        starts = [other.offset for other in pair.manifest.tensors if other.offset > entry.offset]
        assert room <= min([*starts, pair.manifest.nbytes]), "another tensor lies in the padding"


# ---------------------------------------------------------------- any set of tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)
PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "norm", "embed_tokens")


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Up to a dozen tensors under the names that mean something to the layout, in any order."""
    names = draw(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.sampled_from(PARTS), st.sampled_from(("weight", "bias"))).map(".".join),
            unique=True, max_size=14,
        )
    )  # fmt: skip
    shapes = st.lists(st.integers(0, 9), max_size=2).map(tuple)
    return {
        name: torch.empty(draw(shapes), dtype=draw(st.sampled_from(DTYPES[: draw(st.integers(1, 4))])), device="meta")
        for name in names
    }


@given(tensor_sets())
def test_every_tensor_has_a_place_of_its_own(tensors: dict[str, torch.Tensor]) -> None:
    entries, nbytes = plan(tensors)
    assert sorted(entry.name for entry in entries) == sorted(tensors)
    assert nbytes % ALIGNMENT == 0
    end = HEADER_BYTES
    for entry in entries:
        tensor = tensors[entry.name]
        assert (entry.shape, entry_bytes(entry)) == (tuple(tensor.shape), tensor.nbytes)
        assert entry.offset >= end, "tensors overlap, or lie in the header"
        assert entry.offset % tensor.itemsize == 0, "not readable as its dtype"
        end = entry.offset + tensor.nbytes
    assert end <= nbytes
    groups = {fused_group(name, tensors) for name in tensors}
    assert sorted(name for group in groups for name in group) == sorted(tensors), "a tensor is in two groups"
    by_name = {entry.name: entry for entry in entries}
    for group in groups:
        assert by_name[group[0]].offset % ALIGNMENT == 0
        assert all(
            by_name[before].offset + tensors[before].nbytes == by_name[after].offset
            for before, after in pairwise(group)
        )
