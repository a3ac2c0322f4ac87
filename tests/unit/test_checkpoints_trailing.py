"""Digests that are made while a file grows are those of the whole file; what they cannot vouch for is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.serialization import get_crc32_options

from common.checkpoints.files import PIECE_BYTES, CheckpointError, file_digest, seal, verify
from common.checkpoints.reader import StateReader
from common.checkpoints.trailing import TrailingFiles
from common.checkpoints.writer import write_state

THIRD = PIECE_BYTES // 3


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 5])
def test_pieces_are_digested_as_soon_as_they_are_whole(tmp_path: Path, size: int) -> None:
    data = torch.arange(-(-size // 8)).numpy().tobytes()[:size]
    with TrailingFiles() as files:
        with files.create_stream(tmp_path / "x.distcp", "wb") as stream:
            for start in range(0, size, THIRD):
                stream.write(data[start : start + THIRD])
        begun = files.begun["x.distcp"]
        assert sorted(begun) == [start * PIECE_BYTES for start in range(size // PIECE_BYTES)]
        trailing = file_digest(tmp_path / "x.distcp", begun)
        sealed = seal(tmp_path, files.begun)
    assert (tmp_path / "x.distcp").read_bytes() == data
    assert trailing == file_digest(tmp_path / "x.distcp")
    assert verify(tmp_path, sealed.digest)["x.distcp"].nbytes == size


def test_a_state_of_several_pieces_is_read_back_and_its_last_byte_counts(tmp_path: Path) -> None:
    tensors = {f"parameter.{i}": torch.randn(1024, 1024, 6) for i in range(6)}
    written = write_state(tmp_path / "trainer", tensors, {"step": 1})
    assert written.nbytes > 2 * PIECE_BYTES
    found = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    StateReader(tmp_path / "trainer", written.digest).load(found)
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    assert get_crc32_options(), "what else this process saves has its own sums, as ever"
    (file,) = (tmp_path / "trainer").glob("*.distcp")
    for place in (0, PIECE_BYTES, file.stat().st_size - 1):
        flip(file, place)
        with pytest.raises(CheckpointError, match=r"\.distcp: digest .*: its content was altered"):
            StateReader(tmp_path / "trainer", written.digest)
        flip(file, place)
    StateReader(tmp_path / "trainer", written.digest)


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), place)


def test_a_file_that_is_not_written_in_order_is_refused(tmp_path: Path) -> None:
    """Its pieces were digested before they were final."""

    def write(files: TrailingFiles) -> None:
        with files.create_stream(tmp_path / "x.distcp", "wb") as stream:
            stream.write(b"a" * 9)
            stream.seek(0)
            stream.write(b"b")

    with TrailingFiles() as files, pytest.raises(OSError, match=r"x\.distcp: written at byte 0, expected the end, 9"):
        write(files)
