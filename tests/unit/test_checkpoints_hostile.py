"""States whose checksums fit and whose content is meant to do harm: nothing is run, and no other file is read."""

from __future__ import annotations

import copy
import copyreg
import io
import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,  # pyright: ignore[reportPrivateUsage]
    BytesStorageMetadata,
    Metadata,
)

from common.checkpoints.files import CHECKSUMS, CheckpointError, seal
from common.checkpoints.reader import METADATA, StateReader, read_metadata
from common.checkpoints.writer import write_state
from tests.unit.state_support import some_tensors

SHARD = "__0_0.distcp"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target = tmp_path / "step-3" / "trainer"
    write_state(target, some_tensors(), {"step": 3})
    return target


def put(saved: Path, name: str, content: bytes) -> None:
    """Changes a file and makes checksums that fit, as somebody could who may write to the directory."""
    (saved / name).write_bytes(content)
    (saved / CHECKSUMS).unlink()
    seal(saved)


def metadata_of(saved: Path) -> Metadata:
    return read_metadata(saved / METADATA, {SHARD})


class Command:
    """Unpickled by anybody else, it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.proof,)


@pytest.mark.parametrize("inside", [False, True])
def test_metadata_that_would_run_a_command_are_refused(saved: Path, tmp_path: Path, inside: bool) -> None:
    proof = tmp_path / "ran"
    content: Any = Command(proof)
    if inside:
        content = metadata_of(saved)
        content.planner_data = Command(proof)
    put(saved, METADATA, pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: .* has no business in the metadata"):
        StateReader(saved)
    assert not proof.exists()
    # The control: what was refused does run where it is unpickled; it makes a file in a folder of this test alone.
    pickle.loads((saved / METADATA).read_bytes())  # noqa: S301
    assert proof.exists(), "the command does nothing, so nothing is tested"


@pytest.mark.parametrize(
    "function",
    [eval, setattr, print, torch.load, torch.serialization.load, torch.tensor, dict.fromkeys, bytearray],
)
def test_no_function_is_found(saved: Path, function: Any) -> None:
    put(saved, METADATA, pickle.dumps(function))
    with pytest.raises(CheckpointError, match="has no business in the metadata of tensors"):
        StateReader(saved)


class Got:
    """Pickled as a look-up by ``getattr``."""

    def __init__(self, *what: object) -> None:
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.what


def by_getattr(member: Enum) -> tuple[Any, ...]:
    return getattr, (type(member), member.name)


def test_metadata_of_an_early_python_3_11_are_read(saved: Path) -> None:
    """It pickles members of enumerations by ``getattr``."""
    expected = metadata_of(saved)
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = {**copyreg.dispatch_table, _MEM_FORMAT_ENCODING: by_getattr}
    pickler.dump(expected)
    assert b"getattr" in stream.getvalue(), "nothing is tested"
    put(saved, METADATA, stream.getvalue())
    assert metadata_of(saved) == expected
    StateReader(saved)


@pytest.mark.parametrize(
    "what",
    [(_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro"), (_MEM_FORMAT_ENCODING, ()),
     (torch.Size, "__new__"), ("text", "format")],
)  # fmt: skip
def test_nothing_else_is_got_by_getattr(saved: Path, what: tuple[object, ...]) -> None:
    def change(content: Metadata) -> None:
        content.planner_data = Got(*what)

    changed(saved, change)
    with pytest.raises(CheckpointError, match=r"getattr of .* has no business in the metadata of tensors"):
        StateReader(saved)


def changed(saved: Path, change: Callable[[Metadata], None]) -> None:
    content = copy.deepcopy(metadata_of(saved))
    change(content)
    put(saved, METADATA, pickle.dumps(content))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (BytesStorageMetadata(), "BytesStorageMetadata has no business in the metadata"),
        (torch.Size([3]), "'parameter.a.weight' is Size, expected a tensor"),
    ],
)
def test_a_value_that_torch_would_unpickle_is_refused(saved: Path, value: Any, problem: str) -> None:
    """Torch's own reader would read what is no tensor by ``torch.load(weights_only=False)``; ours never gets there."""

    def change(content: Metadata) -> None:
        content.state_dict_metadata["parameter.a.weight"] = value

    changed(saved, change)
    with pytest.raises(CheckpointError, match=problem):
        StateReader(saved)


@pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "secret", ""])
def test_files_without_a_checksum_are_not_read(saved: Path, place: str) -> None:
    def change(content: Metadata) -> None:
        next(iter(content.storage_data.values())).relative_path = place

    changed(saved, change)
    with pytest.raises(CheckpointError, match=f"lies in '{place}', which has no checksum"):
        StateReader(saved)


def test_a_tensor_of_which_a_part_is_missing_is_refused(saved: Path) -> None:
    def change(content: Metadata) -> None:
        del content.state_dict_metadata["parameter.a.weight"].chunks[0]  # type: ignore[union-attr]

    changed(saved, change)
    with pytest.raises(CheckpointError, match=r"0 elements of 'parameter.a.weight' were saved, expected 561"):
        StateReader(saved)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", b"\x80\x04]q.", pickle.dumps({"a": 1}), b"\xff" * 100, b"cos\nsystem\n."]
)
def test_what_are_no_metadata_are_refused(saved: Path, content: bytes) -> None:
    put(saved, METADATA, content)
    with pytest.raises(CheckpointError, match=r"step-3/trainer/\.metadata"):
        StateReader(saved)


def test_a_tensor_file_that_holds_other_objects_is_refused(saved: Path, tmp_path: Path) -> None:
    """Tensors are read with ``weights_only``."""
    proof = tmp_path / "ran"
    shard = tmp_path / "shard"
    torch.save(Command(proof), shard)
    content = shard.read_bytes()

    def change(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, len(content)

    changed(saved, change)
    put(saved, SHARD, content)
    with pytest.raises(CheckpointError, match="step-3/trainer cannot be read: UnpicklingError"):
        StateReader(saved).load({"step.a.weight": torch.tensor(0.0)})
    assert not proof.exists()


def test_a_checksum_of_a_file_elsewhere_is_refused(saved: Path) -> None:
    (saved.parent / "secret").write_bytes(b"secret")
    (saved / CHECKSUMS).unlink()
    os.link(saved.parent / "secret", saved / "secret")
    seal(saved)
    text = (saved / CHECKSUMS).read_text().replace('"secret"', '"../secret"')
    (saved / CHECKSUMS).write_text(text)
    with pytest.raises(CheckpointError, match=r"checksums.json: digest .* this file was altered"):
        StateReader(saved)
