"""Weight sets that are refused: another model's, truncated, foreign, missing; and memory that is full."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from common.messages import Manifest
from common.weights.header import (
    HEADER_BYTES,
    WeightsError,
    require_clean,
)
from common.weights.shared import WeightReader, WeightWriter, model_parameters
from tests.unit.model_support import random_model
from tests.unit.weights_support import Pair


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        yield Path(directory, "weights", "policy")


def test_model_with_another_shape_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    with pytest.raises(WeightsError, match=r"tensor 'model.layers.0.mlp.gate_proj.weight' is .*\[48, 32\].*\[40, 32\]"):
        WeightReader(random_model("llama", intermediate_size=40), manifest)


def test_model_with_another_dtype_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    with pytest.raises(WeightsError, match=r"tensor 'model.embed_tokens.weight' is .*float32.*bfloat16"):
        WeightReader(random_model("llama").bfloat16(), manifest)


def test_model_with_more_layers_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    with pytest.raises(WeightsError, match=r"tensor 'model.layers.2.\S+' is None"):
        WeightReader(random_model("llama", num_hidden_layers=3), manifest)


def test_model_with_fewer_layers_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    with pytest.raises(WeightsError, match=r"tensors \['model.layers.1.\S+.*are not in this model"):
        WeightReader(random_model("llama", num_hidden_layers=1), manifest)


def test_a_refused_model_keeps_its_own_weights(path: Path) -> None:
    manifest = Pair(path).manifest
    model = random_model("llama", num_hidden_layers=3)
    before = {name: tensor.data_ptr() for name, tensor in model_parameters(model).items()}
    with pytest.raises(WeightsError):
        WeightReader(model, manifest)
    assert {name: tensor.data_ptr() for name, tensor in model_parameters(model).items()} == before


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, -1])
def test_truncated_file_is_refused(path: Path, size: int) -> None:
    manifest = Pair(path).manifest
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes()[:size])
    short = Manifest(
        name="policy", version=0, path=str(copy), inode=0, nbytes=manifest.nbytes, tensors=manifest.tensors
    )
    with pytest.raises(WeightsError, match=rf"copy: {copy.stat().st_size} bytes, expected"):
        WeightReader(random_model("llama"), short)


def test_foreign_file_is_refused(path: Path) -> None:
    pair = Pair(path)
    with path.open("r+b") as file:
        file.write(b"SOMETHIN")
    with pytest.raises(WeightsError, match=r"policy: magic b'SOMETHIN'"):
        WeightReader(random_model("llama"), pair.manifest)


def test_missing_file_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    path.unlink()
    for attempt in (lambda: WeightReader(random_model("llama"), manifest), lambda: require_clean(path, 0)):
        with pytest.raises(WeightsError, match="policy: there is no such weight set"):
            attempt()


def test_full_shared_memory_is_an_error_that_leaves_no_file(path: Path) -> None:
    space = os.statvfs("/dev/shm")
    too_many = (space.f_blocks * space.f_frsize + (1 << 20)) // 4

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1).expand(too_many))

    with pytest.raises(
        WeightsError, match=rf"policy: no room for {too_many * 4 / 2**20:.0f} MiB of weights .*shm_size"
    ):
        WeightWriter(path, "policy", Huge(), version=0)
    assert list(path.parent.iterdir()) == []


def test_a_new_writer_takes_a_new_file(path: Path) -> None:
    """Whoever maps the old one keeps it whole; one that was truncated would kill its reader with SIGBUS."""
    pair = Pair(path)
    again = random_model("llama")
    with torch.no_grad():
        again.lm_head.weight.neg_()
    manifest = WeightWriter(path, "policy", again, version=0).commit(0)
    assert manifest.inode != pair.manifest.inode
    assert torch.equal(pair.other.lm_head.weight, pair.values["lm_head.weight"])


def test_the_writers_file_is_private(path: Path) -> None:
    Pair(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
