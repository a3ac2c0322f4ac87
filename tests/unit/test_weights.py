"""Weights shared through a file: aliasing, states, receipts."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from common.weights.header import HEADER_BYTES, SetState, WeightsError, WeightState, read_state, require_clean
from common.weights.layout import model_tensors
from common.weights.memory import map_set
from common.weights.reader import Wanted, attach_model
from common.weights.receipts import problem
from common.weights.writer import WeightWriter
from tests.unit.model_support import full_logits, random_model
from tests.unit.weights_support import Pair, entry_end

# ---------------------------------------------------------------- aliasing


def test_writer_keeps_its_values_and_the_reader_takes_them(path: Path) -> None:
    pair = Pair(path)
    theirs = model_tensors(pair.other)
    for name, tensor in model_tensors(pair.model).items():
        assert torch.equal(tensor, pair.values[name]), name
        assert torch.equal(theirs[name], pair.values[name]), name


def test_both_sides_are_views_of_the_file(path: Path) -> None:
    pair = Pair(path)
    data = np.memmap(path, np.uint8, "r")
    assert len(data) == pair.manifest.nbytes
    for model, memory in ((pair.model, pair.writer.memory), (pair.other, pair.reader.memory)):
        for entry in pair.manifest.tensors:
            assert entry.offset >= HEADER_BYTES
            tensor = model_tensors(model)[entry.name]
            assert tensor.data_ptr() - memory.buffer.data_ptr() == entry.offset == memory.offset(tensor)
            assert data[entry.offset : entry_end(entry)].tobytes() == tensor.detach().numpy().tobytes()
    ends = [(entry.offset, entry_end(entry)) for entry in pair.manifest.tensors]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "tensors overlap"


def test_an_optimizer_step_is_seen_without_a_copy(path: Path) -> None:
    pair = Pair(path)
    addresses = {name: tensor.data_ptr() for name, tensor in model_tensors(pair.other).items()}
    manifest = pair.step(1)
    mine, theirs = model_tensors(pair.model), model_tensors(pair.other)
    for name, before in pair.values.items():
        assert not torch.equal(mine[name], before), f"{name} did not change: nothing is tested"
        assert torch.equal(theirs[name], mine[name]), name
        assert theirs[name].data_ptr() == addresses[name]
    receipt = pair.receipt(manifest)
    assert problem(manifest, pair.proof, receipt) == ""
    assert receipt.copied_bytes == 0
    assert manifest.identity == f"inode-{path.stat().st_ino}"
    assert manifest.nbytes == path.stat().st_size


def test_tied_embeddings_stay_one_tensor(path: Path) -> None:
    pair = Pair(path, "qwen3")
    names = [entry.name for entry in pair.manifest.tensors]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    manifest = pair.step(1)
    assert pair.other.lm_head.weight.data_ptr() == pair.other.model.embed_tokens.weight.data_ptr()
    assert torch.equal(full_logits(pair.other, [5], [6, 7]), full_logits(pair.model, [5], [6, 7]))
    assert pair.problem(manifest) == ""


def test_every_kind_of_tensor_is_shared(path: Path) -> None:
    """Persistent buffers, scalars, half precision, lengths that are no multiple of the alignment."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Parameter(torch.randn(3, 5).bfloat16())
            self.scalar = nn.Parameter(torch.tensor(2.5))
            self.register_buffer("counts", torch.arange(7))
            self.register_buffer("scratch", torch.zeros(4), persistent=False)

    mine, theirs = Mixed(), Mixed()
    writer = WeightWriter(path, "mixed", mine, version=3)
    manifest = writer.commit(3)
    assert [entry.name for entry in manifest.tensors] == ["narrow", "scalar", "counts"]
    reader = attach_model(theirs, manifest, map_set(manifest, None))
    receipt = reader.receipt(manifest, reader.apply(manifest), ())
    assert problem(manifest, writer.prove(), receipt) == ""
    assert len(receipt.checksums) == 3
    for name, tensor in model_tensors(mine).items():
        assert torch.equal(model_tensors(theirs)[name], tensor), name


def test_receipt(path: Path) -> None:
    pair = Pair(path)
    receipt = pair.receipt()
    assert (receipt.transport, receipt.identity, receipt.copied_bytes) == ("alias", pair.manifest.identity, 0)
    assert receipt.offsets == tuple(entry.offset for entry in pair.manifest.tensors)
    assert receipt.checksums == pair.proof.checksums
    assert len(receipt.offsets) == len(receipt.checksums) == len(pair.values)
    assert len(set(receipt.checksums)) > 10, "most tensors differ"
    assert receipt.canary_logprobs == pytest.approx(pair.proof.canary_logprobs, abs=1e-6)
    assert (receipt.unchecked, receipt.stale_tokens) == ((), 0)
    assert receipt.held > 0


# ---------------------------------------------------------------- states and versions


def test_state_follows_the_update(path: Path) -> None:
    pair = Pair(path)
    assert read_state(path) == SetState(WeightState.CLEAN, 0)
    pair.writer.begin(1)
    assert read_state(path) == SetState(WeightState.WRITING, 1)
    for version in (0, 1):
        with pytest.raises(WeightsError, match=rf"WRITING\(1\), expected CLEAN\({version}\)"):
            require_clean(path, version)
    with pytest.raises(WeightsError, match=r"WRITING\(1\), expected CLEAN\(0\)"):
        pair.reader.apply(pair.manifest)
    manifest = pair.writer.commit(1)
    assert read_state(path) == SetState(WeightState.CLEAN, 1)
    assert pair.reader.receipt(manifest, pair.reader.apply(manifest), ()).checksums == pair.writer.prove().checksums
    with pytest.raises(WeightsError, match=r"CLEAN\(1\), expected CLEAN\(0\)"):
        pair.reader.apply(pair.manifest)


def test_no_receipt_of_a_version_that_an_update_overtook(path: Path) -> None:
    pair = Pair(path)
    applied = pair.reader.apply(pair.manifest)
    pair.writer.begin(1)
    with pytest.raises(WeightsError, match=r"WRITING\(1\), expected CLEAN\(0\)"):
        pair.reader.receipt(pair.manifest, applied, ())


def test_no_proof_in_the_middle_of_an_update(path: Path) -> None:
    pair = Pair(path)
    pair.writer.begin(1)
    with pytest.raises(WeightsError, match="policy: version 1 is being written and cannot be proved yet"):
        pair.writer.prove()
    pair.writer.commit(1)
    assert pair.writer.prove().version == 1


def test_versions_only_rise(path: Path) -> None:
    writer = Pair(path).writer
    writer.begin(4)
    writer.commit(4)
    for version in (4, 3):
        with pytest.raises(WeightsError, match=f"update to version {version} asked for, but version 4 is committed"):
            writer.begin(version)
    assert read_state(path) == SetState(WeightState.CLEAN, 4)


def test_commit_is_of_the_version_begun(path: Path) -> None:
    writer = Pair(path).writer
    with pytest.raises(WeightsError, match="commit of version 1, expected 0"):
        writer.commit(1)
    writer.begin(1)
    for version in (0, 2):
        with pytest.raises(WeightsError, match=f"commit of version {version}, expected 1"):
            writer.commit(version)
    assert read_state(path) == SetState(WeightState.WRITING, 1)
    assert writer.commit(1).version == 1


def test_an_update_that_failed_can_be_begun_again(path: Path) -> None:
    writer = Pair(path).writer
    writer.begin(1)
    writer.begin(1)
    assert writer.commit(1).version == 1


# ---------------------------------------------------------------- receipts


def test_a_proof_of_another_version_proves_nothing(path: Path) -> None:
    pair = Pair(path)
    first = pair.proof
    manifest = pair.step(1)
    assert problem(manifest, first, pair.receipt(manifest)) == "the writer's proof is of version 0, expected 1"
    assert problem(manifest, pair.proof, pair.receipt(manifest)) == ""


@pytest.mark.parametrize("transport", ["copy", "alias"])
def test_a_tensor_is_left_to_the_canary_only_where_it_was_copied(path: Path, transport: Wanted) -> None:
    pair = Pair(path, transport=transport)
    place = 5
    sums = tuple(0 if i == place else value for i, value in enumerate(pair.proof.checksums))
    receipt = msgspec.structs.replace(pair.receipt(), checksums=sums, unchecked=(place,))
    told = f"its tensor {pair.manifest.tensors[place].name} has checksum 0"
    found = problem(pair.manifest, pair.proof, receipt)
    assert found.startswith(told) if transport == "alias" else found == ""
    other = msgspec.structs.replace(receipt, unchecked=(place + 1,))
    assert problem(pair.manifest, pair.proof, other).startswith(told)
    silent = msgspec.structs.replace(receipt, canary_logprobs=tuple(value - 1 for value in receipt.canary_logprobs))
    assert problem(pair.manifest, pair.proof, silent) != "", "the canary proves it, and nothing else does"


def test_receipt_tells_two_exchanged_elements(path: Path) -> None:
    pair = Pair(path)
    weight = pair.other.model.layers[0].mlp.up_proj.weight.data
    assert pair.problem() == ""
    weight[0, 0], weight[3, 1] = weight[3, 1].clone(), weight[0, 0].clone()
    assert "its tensor model.layers.0.mlp.up_proj.weight has checksum" in pair.problem()


@pytest.mark.parametrize("bit", [0, 7, 30, 31])
def test_receipt_tells_one_flipped_bit(path: Path, bit: int) -> None:
    pair = Pair(path)
    words = pair.other.model.norm.weight.data.view(torch.int32)
    flip = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    words[-1] ^= flip
    assert "its tensor model.norm.weight has checksum" in pair.problem()
    words[-1] ^= flip
    assert pair.problem() == ""


def test_receipt_tells_a_copy_of_equal_values(path: Path) -> None:
    """A parameter that is no view of the file any more would miss every later update."""
    pair = Pair(path)
    weight = pair.other.model.norm.weight
    weight.data = weight.data.clone()
    assert "its tensor model.norm.weight is a copy of its own (transport alias)" in pair.problem()


def test_receipt_tells_two_exchanged_tensors_of_equal_values(path: Path) -> None:
    pair = Pair(path)
    first, second = (layer.input_layernorm.weight for layer in pair.other.model.layers)
    assert torch.equal(first, second)
    offsets = {entry.name: entry.offset for entry in pair.manifest.tensors}
    first.data, second.data = second.data, first.data
    found = pair.problem()
    assert (
        f"its tensor model.layers.0.input_layernorm.weight lies at offset {pair.reader.memory.offset(first)}" in found
    )
    assert f"expected offset {offsets['model.layers.0.input_layernorm.weight']}" in found


def test_another_file_of_equal_content_is_told(path: Path) -> None:
    pair = Pair(path)
    copy = path.with_name("copy")
    shutil.copyfile(path, copy)
    os.replace(copy, path)
    with pytest.raises(WeightsError, match=rf"mapped memory inode-{path.stat().st_ino}, expected inode-"):
        attach_model(random_model("llama"), pair.manifest, map_set(pair.manifest, None))
