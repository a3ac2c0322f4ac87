"""Weights that an earlier writer left on a CPU: taken over where they are, and made right by ``restore``."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from common.messages import NO_STATE
from common.weights.header import HEADER_BYTES, SetState, WeightsError, WeightState, read_state, write_state
from common.weights.layout import model_tensors
from common.weights.writer import WeightWriter
from tests.unit.model_support import random_model
from tests.unit.weights_support import Pair, fused_model, set_path


def copies(pair: Pair) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model_tensors(pair.model).items()}


def other_model() -> torch.nn.Module:
    """Of the same architecture, all of whose values differ."""
    model = fused_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_().add_(1)
    return model


def again(path: Path, model: torch.nn.Module | None = None) -> WeightWriter:
    """A later process's writer of the same set."""
    return WeightWriter(path, "policy", other_model() if model is None else model, version=0)


def writes(writer: WeightWriter) -> int:
    """How often torch has written to the shared memory through this writer."""
    return writer.memory.buffer._version  # pyright: ignore[reportPrivateUsage]


# ---------------------------------------------------------------- taking over


def test_a_later_writer_takes_the_file_over(path: Path) -> None:
    """The same inode, so that an engine of the first one sees what the second one writes."""
    pair = Pair(path)
    pair.step(4)
    values = copies(pair)
    model = other_model()
    writer = again(path, model)
    assert not writer.created
    assert writer.version == 4
    assert writer.memory.identity == pair.manifest.identity
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, values[name]), name
    pair.model, pair.writer = model, writer
    manifest = pair.step(5)
    assert pair.problem(manifest) == ""
    theirs = model_tensors(pair.other)
    assert not torch.equal(theirs["lm_head.weight"], values["lm_head.weight"])
    assert torch.equal(theirs["lm_head.weight"], model_tensors(model)["lm_head.weight"])


def test_new_memory_says_that_it_is_new(path: Path) -> None:
    assert Pair(path).writer.created


def test_a_file_of_another_model_is_an_error_and_stays_as_it_is(path: Path) -> None:
    pair = Pair(path)
    before = path.read_bytes()
    with pytest.raises(WeightsError, match=rf"policy: {len(before)} bytes, expected \d+: .*another model's weights"):
        again(path, random_model("llama", num_hidden_layers=3))
    assert path.read_bytes() == before
    assert pair.problem() == ""


def test_a_foreign_file_is_an_error(path: Path) -> None:
    Pair(path)
    with path.open("r+b") as file:
        file.write(b"SOMETHIN")
    with pytest.raises(WeightsError, match=r"policy: magic b'SOMETHIN'"):
        again(path)


@pytest.mark.parametrize("allocated", [False, True])
def test_a_file_whose_writer_died_before_it_wrote_is_new(path: Path, allocated: bool) -> None:
    with set_path() as elsewhere:
        size = Pair(elsewhere).manifest.nbytes
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    if allocated:
        os.truncate(path, size)
    model = other_model()
    values = {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}
    writer = again(path, model)
    assert writer.created
    assert writer.version == 0
    assert read_state(path) == SetState(WeightState.CLEAN, 0)
    assert all(torch.equal(writer.views[name], value) for name, value in values.items())


# ---------------------------------------------------------------- torn


def test_a_torn_set_is_neither_written_nor_committed_nor_proved(path: Path) -> None:
    pair = Pair(path)
    pair.write(1)
    writer = again(path)
    assert writer.version == NO_STATE
    for refused in (lambda: writer.begin(2), lambda: writer.commit(1), lambda: writer.commit(NO_STATE), writer.prove):
        with pytest.raises(WeightsError, match=r"policy: its last writer died in the middle of an update"):
            refused()
    assert read_state(path) == SetState(WeightState.WRITING, 1), "refusing must not make it look whole"


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_torn_set_is_restored(path: Path, version: int) -> None:
    pair = Pair(path)
    values = copies(pair)
    pair.write(1)
    assert not torch.equal(pair.writer.views["lm_head.weight"], values["lm_head.weight"]), "nothing is torn"
    pair.model = other_model()
    pair.writer = again(path, pair.model)
    assert pair.writer.restore(version, values) is False
    assert pair.writer.version == version
    assert read_state(path) == SetState(WeightState.CLEAN, version)
    manifest = pair.writer.commit(version, pair.manifest.canary_ids)
    pair.proof = pair.prove()
    assert pair.problem(manifest) == ""
    assert all(torch.equal(tensor, values[name]) for name, tensor in model_tensors(pair.other).items())
    assert pair.problem(pair.step(version + 1)) == ""


# ---------------------------------------------------------------- restore


def test_what_is_right_already_is_not_touched(path: Path) -> None:
    pair = Pair(path)
    pair.step(3)
    values = copies(pair)
    before = path.read_bytes()
    writer = again(path)
    count = writes(writer)
    assert writer.restore(3, values) is True
    assert writes(writer) == count
    assert path.read_bytes() == before
    assert writer.version == 3
    assert writer.restore(4, values) is False
    assert writes(writer) > count, "what is counted here are no writes"


def test_one_other_bit_is_not_kept(path: Path) -> None:
    """A zero of the other sign is equal, and not the same bits; a NaN is the same as itself."""
    pair = Pair(path)
    with torch.no_grad():
        pair.model.model.norm.weight[0], pair.model.model.norm.weight[1] = 0.0, torch.nan
    values = copies(pair)
    assert pair.writer.restore(0, values) is True
    values["model.norm.weight"][0] = -0.0
    assert torch.equal(values["model.norm.weight"][2:], pair.writer.views["model.norm.weight"][2:])
    assert pair.writer.restore(0, values) is False
    assert torch.signbit(pair.writer.views["model.norm.weight"][0])


def test_the_right_weights_under_another_version_are_not_kept(path: Path) -> None:
    pair = Pair(path)
    pair.step(3)
    values = copies(pair)
    assert pair.writer.restore(2, values) is False
    assert read_state(path) == SetState(WeightState.CLEAN, 2)
    assert pair.writer.version == 2, "a version may go back"
    assert pair.problem(pair.step(3)) == ""


def test_an_update_that_failed_is_restored_by_the_same_writer(path: Path) -> None:
    pair = Pair(path)
    values = copies(pair)
    pair.write(1)
    assert pair.writer.restore(0, values) is False
    assert all(torch.equal(tensor, values[name]) for name, tensor in model_tensors(pair.model).items())
    assert pair.problem(pair.step(1)) == ""


def test_weights_of_a_set_that_only_looks_clean_are_compared(path: Path) -> None:
    pair = Pair(path)
    values = copies(pair)
    pair.write(1)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), HEADER_BYTES) as head:
        write_state(head, WeightState.CLEAN, 0)
    writer = again(path)
    assert writer.version == 0
    assert writer.restore(0, values) is False
    assert torch.equal(writer.views["lm_head.weight"], values["lm_head.weight"])


def test_tensors_of_another_model_are_refused_and_change_nothing(path: Path) -> None:
    pair = Pair(path)
    values, before = copies(pair), path.read_bytes()
    norm = values.pop("model.norm.weight")
    with pytest.raises(WeightsError, match=r"policy: tensors \['model.norm.weight'\] are in the set or in what is"):
        pair.writer.restore(0, values)
    for wrong in (norm[1:], norm.bfloat16()):
        with pytest.raises(WeightsError, match=r"policy: 'model.norm.weight' to be restored is .*expected .*float32"):
            pair.writer.restore(0, values | {"model.norm.weight": wrong})
    assert path.read_bytes() == before
    assert pair.problem() == ""
