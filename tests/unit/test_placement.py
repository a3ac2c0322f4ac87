"""An engine's parameters as runs of a weight set's tensors: named as vLLM names them, and every reason to refuse."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Manifest, TensorEntry
from common.weights.layout import model_tensors, plan
from services.rollout.engines.vllm.placement import LayoutUnknown, Placement, part_names, place
from tests.unit.weights_support import FUSED_FAMILIES, Pair, fused_model

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""vLLM's ``packed_modules_mapping`` of all four families."""
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    entries, nbytes = plan(tensors)
    return Manifest(name="policy", version=0, path="", identity="", gpu="", nbytes=nbytes, tensors=entries)


def engine_parameters(
    *, tied: bool, layers: int = 2, hidden: int = 32, heads: int = 4, kv_heads: int = 2, head: int = 8, width: int = 48,
    padded: int = 128, qkv_bias: bool = False, head_norms: bool = False, dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The parameters of vLLM's Llama, Mistral, Qwen2 and Qwen3, by its names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (padded, hidden)}
    rows = (heads + 2 * kv_heads) * head
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.self_attn.qkv_proj.weight"] = (rows, hidden)
        if qkv_bias:
            shapes[f"{prefix}.self_attn.qkv_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads * head)
        if head_norms:
            shapes |= {f"{prefix}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
        shapes[f"{prefix}.mlp.gate_up_proj.weight"] = (2 * width, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, width)
        shapes |= {f"{prefix}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (padded, hidden)
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


def parameters_of(family: str, tied: bool) -> dict[str, torch.Tensor]:
    return engine_parameters(tied=tied, qkv_bias=family == "qwen2", head_norms=family == "qwen3")


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_every_parameter_of_the_engine_is_a_run_of_the_writers_tensors(path: Path, family: str, tied: bool) -> None:
    pair = Pair(path, family, tie_word_embeddings=tied)
    mine, memory = model_tensors(pair.model), pair.reader.memory
    parameters = parameters_of(family, tied)
    placements = place(parameters, pair.manifest, PACKED)
    assert [item.parameter for item in placements] == list(parameters)
    rows: dict[str, torch.Tensor] = {}
    for item in placements:
        assert item.shape == tuple(parameters[item.parameter].shape)
        rows |= item.rows(memory.span(item.offset, "float32", item.shape, item.parameter))
    assert set(rows) == set(mine)
    for name, tensor in mine.items():
        assert torch.equal(rows[name], tensor), name
        assert memory.offset(rows[name]) == pair.writer.memory.offset(tensor), f"{name} is not the writer's own"


def test_rows_of_a_fused_parameter_are_q_k_and_v(path: Path) -> None:
    pair = Pair(path, "qwen2")
    placements = {item.parameter: item for item in place(parameters_of("qwen2", False), pair.manifest, PACKED)}
    for kind in ("weight", "bias"):
        item = placements[f"{ATTENTION}.qkv_proj.{kind}"]
        assert [entry.name for entry in item.entries] == [
            f"{ATTENTION}.{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj")
        ]
        assert [len(rows) for rows in item.rows(torch.arange(64)).values()] == [32, 16, 16]
        assert torch.cat(list(item.rows(torch.arange(64)).values())).tolist() == list(range(64))


def test_rows_leave_the_padding_out() -> None:
    entry = TensorEntry(name="lm_head.weight", dtype="float32", shape=(97, 4), offset=4096)
    rows = Placement("lm_head.weight", (entry,), (128, 4)).rows(torch.zeros(128, 4))
    assert {name: tuple(tensor.shape) for name, tensor in rows.items()} == {"lm_head.weight": (97, 4)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn.qkv_proj.bias", [f"model.layers.3.self_attn.{p}_proj.bias" for p in "qkv"]),
        ("model.layers.3.mlp.gate_up_proj.weight", [f"model.layers.3.mlp.{p}_proj.weight" for p in ("gate", "up")]),
        ("model.layers.3.self_attn.o_proj.weight", ["model.layers.3.self_attn.o_proj.weight"]),
        ("lm_head.weight", ["lm_head.weight"]),
    ],
)
def test_part_names(name: str, expected: list[str]) -> None:
    assert part_names(name, PACKED) == expected


@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (8, 1)]),
    head=st.integers(1, 24), hidden=st.integers(1, 70), width=st.integers(1, 90), vocabulary=st.integers(1, 300),
    tied=st.booleans(), bias=st.booleans(), norms=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_every_size_has_a_place(
    heads: tuple[int, int], head: int, hidden: int, width: int, vocabulary: int, tied: bool, bias: bool, norms: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """The writer's layout and the engine's need of padding and fusing agree for any shape of these families."""
    padded = -(-vocabulary // 64) * 64
    parameters = engine_parameters(
        tied=tied, layers=1, hidden=hidden, heads=heads[0], kv_heads=heads[1], head=head, width=width, padded=padded,
        qkv_bias=bias, head_norms=norms, dtype=dtype,
    )  # fmt: skip
    parts = {"q_proj": heads[0] * head, "k_proj": heads[1] * head, "v_proj": heads[1] * head}
    parts |= {"gate_proj": width, "up_proj": width}
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for part in part_names(name, PACKED):
            rows = vocabulary if name.endswith(("embed_tokens.weight", "lm_head.weight")) else parameter.shape[0]
            rows = parts.get(part.split(".")[-2], rows)
            tensors[part] = torch.empty((rows, *parameter.shape[1:]), dtype=dtype, device="meta")
    manifest = manifest_of(tensors)
    placements = place(parameters, manifest, PACKED)
    assert sorted(entry.name for item in placements for entry in item.entries) == sorted(tensors)
    ends = sorted((item.offset, item.offset + parameters[item.parameter].nbytes) for item in placements)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "parameters overlap"
    assert ends[-1][1] <= manifest.nbytes


# ---------------------------------------------------------------- what is not known to match


class Case:
    """A tied Llama's set and the engine's parameters, which fit until a test changes one of them."""

    def __init__(self) -> None:
        self.manifest = manifest_of(model_tensors(fused_model("llama", tie_word_embeddings=True)))
        self.parameters = engine_parameters(tied=True)

    def change(self, name: str, **fields: Any) -> None:
        """Changes a tensor of the set."""
        tensors = tuple(
            msgspec.structs.replace(entry, **fields) if entry.name == name else entry for entry in self.manifest.tensors
        )
        self.manifest = msgspec.structs.replace(self.manifest, tensors=tensors)

    def entry(self, name: str) -> TensorEntry:
        return next(entry for entry in self.manifest.tensors if entry.name == name)

    def refused(self, reason: str) -> None:
        with pytest.raises(LayoutUnknown, match=re.escape(reason)):
            place(self.parameters, self.manifest, PACKED)


@pytest.fixture
def case() -> Case:
    case = Case()
    assert len(place(case.parameters, case.manifest, PACKED)) == len(case.parameters)
    return case


def test_parameter_that_the_set_does_not_have(case: Case) -> None:
    case.parameters[f"{ATTENTION}.k_scale"] = torch.empty(1, device="meta")
    case.refused(f"the weight set has no tensor for the engine's '{ATTENTION}.k_scale'")


def test_fused_parameter_of_which_the_set_has_not_all(case: Case) -> None:
    kept = tuple(entry for entry in case.manifest.tensors if entry.name != f"{ATTENTION}.k_proj.weight")
    case.manifest = msgspec.structs.replace(case.manifest, tensors=kept)
    case.refused(f"the weight set has no tensor for the engine's '{ATTENTION}.qkv_proj.weight'")


def test_another_dtype(case: Case) -> None:
    case.change(f"{MLP}.up_proj.weight", dtype="bfloat16")
    case.refused(f"'{MLP}.up_proj.weight' is not float32 as the engine's '{MLP}.gate_up_proj.weight' is")


def test_engine_of_another_dtype(case: Case) -> None:
    case.parameters = engine_parameters(tied=True, dtype=torch.bfloat16)
    case.refused("'model.embed_tokens.weight' is not bfloat16 as the engine's 'model.embed_tokens.weight' is")


def test_parts_that_do_not_follow_each_other(case: Case) -> None:
    name = f"{ATTENTION}.v_proj.weight"
    case.change(name, offset=case.entry(name).offset + 256)
    case.refused(f"'{name}' does not follow '{ATTENTION}.k_proj.weight', but the engine fuses both in '{ATTENTION}.qkv")


def test_parts_in_another_order(case: Case) -> None:
    gate, up = case.entry(f"{MLP}.gate_proj.weight"), case.entry(f"{MLP}.up_proj.weight")
    case.change(gate.name, offset=up.offset)
    case.change(up.name, offset=gate.offset)
    case.refused(f"'{up.name}' does not follow '{gate.name}'")


@pytest.mark.parametrize("shape", [(32, 48), (48, 31), (47, 32), (49, 32), (48,), (48, 32, 1)])
def test_another_shape(case: Case, shape: tuple[int, ...]) -> None:
    name = f"{MLP}.down_proj.weight"
    case.change(name, shape=(48, 32))
    case.parameters[name] = torch.empty(shape, device="meta")
    case.refused(f"the engine's '{name}' is {shape}, the set has [(48, 32)]")


@pytest.mark.parametrize("rows", [97, 100, 192])
def test_vocabulary_padded_otherwise(case: Case, rows: int) -> None:
    """97 rows, not padded at all, are a run as well; anything else than a multiple of 64 is not this engine's rule."""
    name = "model.embed_tokens.weight"
    case.parameters[name] = torch.empty(rows, 32, device="meta")
    if rows == 97:
        assert place(case.parameters, case.manifest, PACKED)[0].shape == (97, 32)
    else:
        case.refused(f"the engine's '{name}' is ({rows}, 32), the set has [(97, 32)]")


def test_padding_of_anything_but_the_vocabulary(case: Case) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    case.parameters[name] = torch.empty(64, 32, device="meta")
    case.refused(f"the engine's '{name}' is (64, 32), the set has [(32, 32)]")


@pytest.mark.parametrize("last", [True, False])
def test_no_room_for_the_padding(case: Case, last: bool) -> None:
    """Rows behind the vocabulary are another tensor's, or behind the end of the memory."""
    embedding = case.entry("model.embed_tokens.weight")
    end = embedding.offset + 97 * 32 * 4
    if last:
        case.change(embedding.name, offset=case.manifest.nbytes)
        case.manifest = msgspec.structs.replace(case.manifest, nbytes=case.manifest.nbytes + 97 * 32 * 4)
    else:
        case.change("model.norm.weight", offset=end)
    case.refused("no room for 31 padding rows after 'model.embed_tokens.weight'")


def test_tensor_that_the_engine_has_no_place_for(case: Case) -> None:
    extra = TensorEntry(name="model.layers.0.self_attn.sinks", dtype="float32", shape=(4,), offset=case.manifest.nbytes)
    more = msgspec.structs.replace(extra, name="model.layers.1.self_attn.sinks", offset=case.manifest.nbytes + 256)
    case.manifest = msgspec.structs.replace(case.manifest, tensors=(*case.manifest.tensors, extra, more))
    case.refused("the engine has no place for 'model.layers.0.self_attn.sinks' and 1 more tensors")


def test_untied_set_and_tied_engine(case: Case) -> None:
    case.manifest = manifest_of(model_tensors(fused_model("llama", tie_word_embeddings=False)))
    case.refused("the engine has no place for 'lm_head.weight' and 0 more tensors")
