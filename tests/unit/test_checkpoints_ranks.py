"""A state that several ranks saved is loaded by another number of them, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.checkpoints.files import COUNTERS, verify
from tests.unit.checkpoint_rank import load, save
from tests.unit.state_support import bits, same_bits

LIMIT_S = 90


def two_ranks(what: str, folder: Path, dtype: str) -> None:
    """Runs both to their end; their warnings are errors."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.unit.checkpoint_rank", what, str(rank), "2", folder, dtype],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    for rank, process in enumerate(ranks):
        assert process.returncode == 0, f"rank {rank}: {said[rank]}"


def said_whole(folder: Path) -> dict[str, torch.Tensor]:
    """The ranks' state, every tensor put together by themselves."""
    return torch.load(folder / "whole.pt", weights_only=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_two_ranks_saved_is_loaded_by_one(tmp_path: Path, dtype: str) -> None:
    two_ranks("save", tmp_path, dtype)
    target = tmp_path / "step-3" / "trainer"
    files = verify(target)
    shards = [name for name in files if name.endswith(".distcp")]
    assert len(shards) == 2
    assert all(files[name].nbytes > 1000 for name in shards), "both ranks have written their part"
    assert COUNTERS in files
    assert os.listdir(target.parent) == ["trainer"]
    same_bits(bits(load(target, getattr(torch, dtype), sharded=False)), bits(said_whole(tmp_path)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_one_process_saved_is_loaded_by_two_ranks(tmp_path: Path, dtype: str) -> None:
    saved = save(tmp_path / "step-3" / "trainer", getattr(torch, dtype), sharded=False)
    assert any(key.startswith("exp_avg_sq.") for key in saved)
    two_ranks("load", tmp_path, dtype)
    same_bits(bits(said_whole(tmp_path)), bits(saved))


def test_ranks_that_cannot_write_end_with_an_error(tmp_path: Path) -> None:
    """The first rank makes the directory; the other one must not wait for it in vain."""
    (tmp_path / "step-3").touch()
    with pytest.raises(AssertionError, match=r"rank 0: [\s\S]*trainer: the state cannot be saved: "):
        two_ranks("save", tmp_path, "float32")
