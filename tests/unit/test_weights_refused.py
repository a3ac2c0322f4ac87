"""Weight sets that are refused: another model's, truncated, foreign, missing; and memory that is full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from common.messages import Manifest
from common.weights.header import HEADER_BYTES, WeightsError, require_clean
from common.weights.layout import model_tensors
from common.weights.memory import map_file, map_set
from common.weights.reader import WeightReader, attach_model, choose_transport
from common.weights.writer import WeightWriter
from tests.unit.model_support import CPU, random_model
from tests.unit.weights_support import Pair


def attach(model: Any, manifest: Manifest) -> WeightReader:
    return attach_model(model, manifest, map_set(manifest, None))


def test_model_with_another_shape_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    with pytest.raises(WeightsError, match=r"tensor 'model.layers.0.mlp.gate_proj.weight' is .*\[48, 32\].*\[40, 32\]"):
        attach(random_model("llama", intermediate_size=40), manifest)


def test_model_with_another_dtype_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    with pytest.raises(WeightsError, match=r"tensor 'model.embed_tokens.weight' is .*float32.*bfloat16"):
        attach(random_model("llama").bfloat16(), manifest)


def test_model_with_more_layers_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    with pytest.raises(WeightsError, match=r"tensor 'model.layers.2.\S+' is None"):
        attach(random_model("llama", num_hidden_layers=3), manifest)


def test_model_with_fewer_layers_is_refused(path: Path) -> None:
    manifest = Pair(path).manifest
    with pytest.raises(WeightsError, match=r"tensors \['model.layers.1.\S+.*are not in this model"):
        attach(random_model("llama", num_hidden_layers=1), manifest)


def test_a_refused_model_keeps_its_own_weights(path: Path) -> None:
    manifest = Pair(path).manifest
    model = random_model("llama", num_hidden_layers=3)
    before = {name: tensor.data_ptr() for name, tensor in model_tensors(model).items()}
    with pytest.raises(WeightsError):
        attach(model, manifest)
    assert {name: tensor.data_ptr() for name, tensor in model_tensors(model).items()} == before


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, -1])
def test_truncated_file_is_refused(path: Path, size: int) -> None:
    manifest = Pair(path).manifest
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes()[:size])
    short = msgspec.structs.replace(manifest, path=str(copy), identity=f"inode-{copy.stat().st_ino}")
    with pytest.raises(WeightsError, match=rf"copy: {copy.stat().st_size} bytes, expected {manifest.nbytes}"):
        attach(random_model("llama"), short)


def test_foreign_file_is_refused(path: Path) -> None:
    pair = Pair(path)
    with path.open("r+b") as file:
        file.write(b"SOMETHIN")
    with pytest.raises(WeightsError, match=r"policy: magic b'SOMETHIN'"):
        attach(random_model("llama"), pair.manifest).apply(pair.manifest)


def test_missing_file_is_refused(path: Path) -> None:
    pair = Pair(path)
    path.unlink()
    for attempt in (lambda: pair.reader.apply(pair.manifest), lambda: require_clean(path, 0)):
        with pytest.raises(WeightsError, match="policy: there is no such weight set"):
            attempt()
    with pytest.raises((WeightsError, FileNotFoundError), match="policy"):
        attach(random_model("llama"), pair.manifest)


def test_set_on_a_gpu_without_a_handle_is_refused(path: Path) -> None:
    manifest = msgspec.structs.replace(Pair(path).manifest, gpu="GPU-1")
    with pytest.raises(WeightsError, match="policy lies on GPU GPU-1, but no handle came with it"):
        map_set(manifest, None)


@pytest.mark.parametrize("offset", [0, HEADER_BYTES - 4, HEADER_BYTES + 2, 1 << 40])
def test_tensor_outside_the_memory_is_refused(path: Path, offset: int) -> None:
    """In the header, at no multiple of its element's size, or behind the end: whoever maps it names the tensor."""
    pair = Pair(path)
    wrong = msgspec.structs.replace(pair.manifest.tensors[3], offset=offset)
    with pytest.raises(WeightsError, match=rf"tensor '{wrong.name}' lies at bytes {offset} to"):
        pair.reader.memory.view(wrong)


def test_alias_across_devices_is_refused_and_auto_copies_and_says_why(path: Path) -> None:
    memory = map_set(Pair(path).manifest, None)
    other = torch.device("cuda", 1)
    why = "the weights lie on cpu, the engine runs on cuda:1"
    with pytest.raises(WeightsError, match=rf"weights.transport = 'alias' is not possible: {why}"):
        choose_transport("alias", memory, other)
    assert choose_transport("auto", memory, other) == ("copy", why)
    assert choose_transport("auto", memory, CPU) == choose_transport("alias", memory, CPU) == ("alias", "")
    assert choose_transport("copy", memory, CPU) == ("copy", "weights.transport = 'copy'")


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


def test_the_writers_file_is_private(path: Path) -> None:
    pair = Pair(path)
    assert map_file(path, pair.manifest.nbytes).identity == pair.manifest.identity
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
