"""Saved states on disk: what is read is what was written, or an error that says which file is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from common.checkpoints.files import PIECE_BYTES, CheckpointError, file_digest
from common.checkpoints.reader import METADATA, StateReader
from common.checkpoints.writer import write_state
from tests.unit.state_support import bits, empty_like, same_bits, some_tensors

SHARD = "__0_0.distcp"
FILES = (SHARD, METADATA, "counters.json", "checksums.json")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target = tmp_path / "step-3" / "trainer"
    write_state(target, some_tensors(), {"step": 3})
    return target


# ---------------------------------------------------------------- there and back


def test_what_is_read_is_what_was_written(saved: Path) -> None:
    tensors = some_tensors()
    state = StateReader(saved)
    assert state.counters == {"step": 3}
    found = empty_like(tensors)
    state.load(found)
    same_bits(bits(found), bits(tensors))
    assert sorted(os.listdir(saved)) == sorted(FILES)
    assert os.listdir(saved.parent) == ["trainer"]


def test_the_digest_of_a_save_names_this_very_state(tmp_path: Path) -> None:
    first, second = (write_state(tmp_path / f"{i}", some_tensors(i), {"step": 3}) for i in range(2))
    assert first.digest != second.digest
    assert first.nbytes == sum(file.stat().st_size for file in (tmp_path / "0").iterdir())
    StateReader(tmp_path / "0", first.digest)
    with pytest.raises(CheckpointError, match=rf"0/checksums.json: digest {first.digest}, expected {second.digest}"):
        StateReader(tmp_path / "0", second.digest)


def test_no_name_of_this_machine_is_in_a_state(saved: Path) -> None:
    for name in FILES:
        assert str(saved.parent).encode() not in (saved / name).read_bytes(), name


def test_a_part_can_be_read_and_the_rest_is_left_alone(saved: Path) -> None:
    found = empty_like(some_tensors())
    StateReader(saved).load({"parameter.a.weight": found["parameter.a.weight"]})
    assert torch.equal(found["parameter.a.weight"], some_tensors()["parameter.a.weight"])
    assert not found["parameter.b.weight"].any()


def test_reading_fills_the_tensors_that_are_there(saved: Path) -> None:
    """Views of shared memory stay views: what lies around them is not touched."""
    memory = torch.full((17 * 33 + 20,), 7.0)
    view = torch.nn.Parameter(memory[10:-10].view(17, 33))
    StateReader(saved).load({"parameter.a.weight": view})
    assert torch.equal(memory[10:-10].view(17, 33), some_tensors()["parameter.a.weight"])
    assert memory[:10].eq(7).all()
    assert memory[-10:].eq(7).all()


def test_a_later_save_replaces_the_earlier_one(saved: Path) -> None:
    write_state(saved, some_tensors(1), {"step": 4})
    state = StateReader(saved)
    found = empty_like(some_tensors())
    state.load(found)
    same_bits(bits(found), bits(some_tensors(1)))
    assert state.counters == {"step": 4}
    assert os.listdir(saved.parent) == ["trainer"]


def test_what_dead_processes_left_unfinished_is_removed(tmp_path: Path) -> None:
    for name in (".trainer.77", ".trainer.78.earlier", ".critic.77"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").touch()
    write_state(tmp_path / "trainer", some_tensors(), {})
    assert sorted(os.listdir(tmp_path)) == [".critic.77", "trainer"]


def test_the_digest_of_a_file_of_several_pieces_sees_each_byte(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2 * PIECE_BYTES + 5)
    digests = {file_digest(path)}
    for place in (0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 4):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        digests.add(file_digest(path))
    assert len(digests) == 5


# ---------------------------------------------------------------- altered


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.003, 0.1, 0.5, 0.9, 0.997, 1.0])
def test_an_altered_byte_is_an_error_that_names_the_file(saved: Path, name: str, place: float) -> None:
    content = bytearray((saved / name).read_bytes())
    content[int(place * (len(content) - 1))] ^= 0x15
    (saved / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{saved}/.*(digest|cannot be read|missing)"):
        StateReader(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_longer_or_missing_file_is_an_error(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    sizes = rf"{name}: \d+ bytes, expected {len(content)}" if name != "checksums.json" else f"{name}"
    for changed in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
        (saved / name).write_bytes(changed)
        with pytest.raises(CheckpointError, match=sizes):
            StateReader(saved)
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}(:| cannot be read| is missing)"):
        StateReader(saved)


@pytest.mark.parametrize(
    ("key", "tensor", "problem"),
    [
        ("parameter.c", torch.zeros(3), "no tensor 'parameter.c' was saved"),
        ("parameter.a.weight", torch.zeros(33, 17), r"'parameter.a.weight' is \[17, 33\] of .*expected \[33, 17\]"),
        ("parameter.b.weight", torch.zeros(40, 9), r"'parameter.b.weight' is .*bfloat16, expected .*float32"),
    ],
)
def test_another_models_tensors_are_refused_before_any_is_written(
    saved: Path, key: str, tensor: torch.Tensor, problem: str
) -> None:
    right = torch.zeros(17, 33)
    targets = {"parameter.a.weight": right} | {key: tensor}
    with pytest.raises(CheckpointError, match=rf"step-3/trainer: {problem}"):
        StateReader(saved).load(targets)
    assert not right.any()
