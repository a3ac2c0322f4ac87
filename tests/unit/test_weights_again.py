"""A writer that attaches to memory which an earlier one left, and models built for memory that is there already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.weights.header import SetState, WeightsError, WeightState, read_state
from common.weights.layout import model_tensors
from common.weights.memory import WeightMemory, create_file, map_file
from common.weights.placeholders import EmptyOnMeta, replace_parameters
from common.weights.writer import Allocate, WeightWriter
from tests.unit.model_support import full_logits
from tests.unit.weights_support import FUSED_FAMILIES, Pair, fused_model, set_path


def left_at(path: Path) -> Allocate:
    """Memory that an earlier writer left."""

    def allocate(nbytes: int) -> tuple[WeightMemory, bool]:
        return map_file(path, nbytes), False

    return allocate


def zeroed(family: str, **changes: Any) -> Any:
    model = fused_model(family, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


# ---------------------------------------------------------------- a later writer


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_a_later_writer_takes_over_what_was_committed(path: Path, family: str, meta: bool) -> None:
    pair = Pair(path, family)
    manifest = pair.step(3)
    values = {name: tensor.detach().clone() for name, tensor in model_tensors(pair.model).items()}
    logits = full_logits(pair.model, [5, 6], [7, 8])
    if meta:
        with EmptyOnMeta():
            model = fused_model(family)
        assert any(parameter.is_meta for parameter in model.parameters()), "nothing is tested"
    else:
        model = zeroed(family)
    writer = WeightWriter(path, "policy", model, version=0, allocate=left_at(path))
    assert writer.version == 3
    assert writer.commit(3, manifest.canary_ids) == manifest
    assert writer.prove(pair.proof.canary_logprobs) == pair.proof
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, values[name]), name
        assert writer.memory.offset(tensor) >= 0, f"{name} lies outside of the memory"
        assert isinstance(tensor, nn.Parameter)
        assert tensor.requires_grad
    assert torch.equal(full_logits(model, [5, 6], [7, 8]), logits)


def test_a_later_writer_goes_on_and_the_reader_of_the_first_sees_it(path: Path) -> None:
    pair = Pair(path, "qwen3")
    pair.step(1)
    pair.model = zeroed("qwen3")
    pair.writer = WeightWriter(path, "policy", pair.model, version=0, allocate=left_at(path))
    manifest = pair.step(2)
    assert read_state(path) == SetState(WeightState.CLEAN, 2)
    assert pair.problem(manifest) == ""
    mine, theirs = model_tensors(pair.model), model_tensors(pair.other)
    assert all(torch.equal(theirs[name], mine[name]) for name in mine)
    assert not torch.equal(mine["model.embed_tokens.weight"], pair.values["model.embed_tokens.weight"])


def test_memory_of_another_model_is_refused(path: Path) -> None:
    Pair(path)
    with pytest.raises(WeightsError, match=r"policy: \d+ bytes, expected \d+: truncated, or another model's weights"):
        WeightWriter(path, "policy", zeroed("llama", num_hidden_layers=3), version=0, allocate=left_at(path))


def test_new_memory_that_others_allocate_keeps_the_models_values(path: Path) -> None:
    model = fused_model("qwen2")
    values = {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}
    writer = WeightWriter(path, "policy", model, 5, allocate=lambda nbytes: (create_file(path, nbytes), True))
    assert read_state(path) == SetState(WeightState.CLEAN, 5)
    assert writer.version == 5
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, values[name]), name
        assert writer.memory.offset(tensor) == next(e.offset for e in writer.entries if e.name == name)


# ---------------------------------------------------------------- placeholders


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_only_what_is_allocated_is_left_out(family: str) -> None:
    """Matrices are on the meta device; rotary tables, which no weight set holds, are computed as ever."""
    plain = fused_model(family)
    with EmptyOnMeta():
        model = fused_model(family)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert matrices
    assert all(parameter.is_meta for parameter in matrices)
    tables = dict(plain.named_buffers())
    assert any("rotary" in name for name in tables)
    for name, buffer in model.named_buffers():
        assert not buffer.is_meta, name
        assert torch.equal(buffer, tables[name]), name


def test_what_names_its_device_is_allocated_there() -> None:
    with EmptyOnMeta():
        assert torch.empty(3, device="cpu").device.type == "cpu"
        assert torch.empty(3).is_meta
        assert not torch.zeros(3).is_meta
        assert not torch.arange(3).is_meta
    assert not torch.empty(3).is_meta


@pytest.mark.parametrize("trainable", [True, False])
def test_tied_parameters_stay_one_object(trainable: bool) -> None:
    with EmptyOnMeta():
        model = fused_model("qwen3")
    tensors = {id(parameter): torch.full(parameter.shape, 0.5) for parameter in model.parameters()}
    expected = {name: tensors[id(parameter)] for name, parameter in model.named_parameters()}
    replace_parameters(model.requires_grad_(trainable), tensors)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = dict(model.named_parameters())
    assert set(found) == set(expected)
    for name, parameter in found.items():
        assert parameter.data_ptr() == expected[name].data_ptr(), name
        assert parameter.requires_grad is trainable


def test_a_parameter_under_two_names_of_one_module_is_replaced_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Parameter(torch.zeros(2))

    model = Twice()
    replace_parameters(model, {id(model.first): torch.ones(2)})
    assert model.first is model.second
    assert model.first.tolist() == [1, 1]


def test_parameters_that_are_not_named_are_left_alone() -> None:
    model = fused_model("llama")
    norm, head = model.model.norm.weight, model.lm_head.weight
    replace_parameters(model, {id(head): torch.zeros(head.shape)})
    assert model.model.norm.weight is norm
    assert model.lm_head.weight is not head


def test_a_model_that_no_longer_trains_what_is_shared_proves_nothing() -> None:
    with set_path() as path:
        model = fused_model("llama")
        writer = WeightWriter(path, "policy", model, version=0)
        writer.commit(0)
        writer.prove()
        layer = model.model.layers[1].mlp.up_proj
        layer.weight.data = layer.weight.detach().clone()
        with pytest.raises(WeightsError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is no longer the shared one"):
            writer.prove()
