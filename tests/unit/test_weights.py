"""Weights shared through a file: aliasing, states, receipts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import nn

from common.weights.header import (
    HEADER_BYTES,
    SetState,
    WeightsError,
    WeightState,
    manifest_digest,
    read_state,
    require_clean,
)
from common.weights.shared import ALIGNMENT, WeightReader, WeightWriter, make_receipt, model_parameters
from tests.unit.model_support import full_logits, random_model
from tests.unit.weights_support import Pair


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        yield Path(directory, "weights", "policy")


# ---------------------------------------------------------------- aliasing


def test_writer_keeps_its_values_and_the_reader_takes_them(path: Path) -> None:
    pair = Pair(path)
    theirs = model_parameters(pair.other)
    for name, tensor in model_parameters(pair.model).items():
        assert torch.equal(tensor, pair.values[name]), name
        assert torch.equal(theirs[name], pair.values[name]), name


def test_both_sides_are_views_of_the_file(path: Path) -> None:
    pair = Pair(path)
    data = np.memmap(path, np.uint8, "r")
    for entry in pair.manifest.tensors:
        assert entry.offset >= HEADER_BYTES
        assert entry.offset % ALIGNMENT == 0
        tensor = model_parameters(pair.other)[entry.name]
        assert tensor.data_ptr() - pair.reader.mapped.storage.data_ptr() == entry.offset
        assert data[entry.offset : entry.offset + tensor.nbytes].tobytes() == tensor.detach().numpy().tobytes()
    ends = [(entry.offset, entry.offset + pair.values[entry.name].nbytes) for entry in pair.manifest.tensors]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "tensors overlap"


def test_an_optimizer_step_is_seen_without_a_copy(path: Path) -> None:
    pair = Pair(path)
    addresses = {name: tensor.data_ptr() for name, tensor in model_parameters(pair.other).items()}
    manifest = pair.step(1)
    mine, theirs = model_parameters(pair.model), model_parameters(pair.other)
    for name, before in pair.values.items():
        assert not torch.equal(mine[name], before), f"{name} did not change: nothing is tested"
        assert torch.equal(theirs[name], mine[name]), name
        assert theirs[name].data_ptr() == addresses[name]
    assert pair.digest(manifest) == manifest_digest(manifest)
    assert manifest.inode == path.stat().st_ino
    assert manifest.nbytes == path.stat().st_size


def test_tied_embeddings_stay_one_tensor(path: Path) -> None:
    pair = Pair(path, "qwen3")
    names = [entry.name for entry in pair.manifest.tensors]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    pair.step(1)
    assert pair.other.lm_head.weight.data_ptr() == pair.other.model.embed_tokens.weight.data_ptr()
    assert torch.equal(full_logits(pair.other, [5], [6, 7]), full_logits(pair.model, [5], [6, 7]))


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
    manifest = WeightWriter(path, "mixed", mine, version=3).commit(3)
    assert [entry.name for entry in manifest.tensors] == ["narrow", "scalar", "counts"]
    reader = WeightReader(theirs, manifest)
    assert reader.apply(manifest) == (manifest_digest(manifest), 3)
    for name, tensor in model_parameters(mine).items():
        assert torch.equal(model_parameters(theirs)[name], tensor), name


def test_receipt(path: Path) -> None:
    pair = Pair(path)
    digest, count = pair.reader.apply(pair.manifest)
    receipt = make_receipt(pair.reader, digest, count, 1e-6, 2.0)
    assert receipt.transport == "alias"
    assert (receipt.inode, receipt.digest) == (pair.manifest.inode, manifest_digest(pair.manifest))
    assert receipt.tensors == len(pair.manifest.tensors) == len(pair.values)


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
    assert pair.reader.apply(manifest)[0] == manifest_digest(manifest)
    with pytest.raises(WeightsError, match=r"CLEAN\(1\), expected CLEAN\(0\)"):
        pair.reader.apply(pair.manifest)


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


def test_digest_names_the_version(path: Path) -> None:
    pair = Pair(path)
    first = manifest_digest(pair.manifest)
    pair.writer.begin(1)
    assert manifest_digest(pair.writer.commit(1)) != first


def test_digest_tells_two_exchanged_elements(path: Path) -> None:
    pair = Pair(path)
    weight = pair.other.model.layers[0].mlp.up_proj.weight.data
    assert pair.digest() == manifest_digest(pair.manifest)
    weight[0, 0], weight[3, 1] = weight[3, 1].clone(), weight[0, 0].clone()
    assert pair.digest() != manifest_digest(pair.manifest)


@pytest.mark.parametrize("bit", [0, 7, 30, 31])
def test_digest_tells_one_flipped_bit(path: Path, bit: int) -> None:
    pair = Pair(path)
    words = pair.other.model.norm.weight.data.view(torch.int32)
    flip = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    words[-1] ^= flip
    assert pair.digest() != manifest_digest(pair.manifest)
    words[-1] ^= flip
    assert pair.digest() == manifest_digest(pair.manifest)


def test_digest_tells_a_copy_of_equal_values(path: Path) -> None:
    """A parameter that is no view of the file any more would miss every later update."""
    pair = Pair(path)
    weight = pair.other.model.norm.weight
    weight.data = weight.data.clone()
    assert pair.digest() != manifest_digest(pair.manifest)


def test_digest_tells_two_exchanged_tensors_of_equal_values(path: Path) -> None:
    pair = Pair(path)
    first, second = (layer.input_layernorm.weight for layer in pair.other.model.layers)
    assert torch.equal(first, second)
    first.data, second.data = second.data, first.data
    assert pair.digest() != manifest_digest(pair.manifest)


def test_digest_tells_another_file_of_equal_content(path: Path) -> None:
    pair = Pair(path)
    copy = path.with_name("copy")
    shutil.copyfile(path, copy)
    os.replace(copy, path)
    reader = WeightReader(random_model("llama"), pair.manifest)
    digest, count = reader.apply(pair.manifest)
    assert digest != manifest_digest(pair.manifest)
    assert make_receipt(reader, digest, count, 0.0, 0.0).inode != pair.manifest.inode
