"""Saving in the background: one at a time, what is copied is what is written, and failures are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.checkpoints.files import CheckpointError
from common.checkpoints.reader import StateReader
from common.checkpoints.saver import StateSaver
from common.checkpoints.staging import Staging
from common.checkpoints.writer import Written
from tests.unit.state_support import bits, empty_like, same_bits, small_files, some_tensors

LIMIT_S = 30.0


class Ends:
    """Keeps how saves ended; holds up the thread that tells it, as a slow disk would, until it is let go."""

    def __init__(self, hold: bool = False) -> None:
        self.ends: list[Written | CheckpointError] = []
        self.go = threading.Event()
        if not hold:
            self.go.set()

    def __call__(self, end: Written | CheckpointError) -> None:
        assert self.go.wait(LIMIT_S)
        self.ends.append(end)


def test_the_copy_is_written_whatever_happens_to_the_tensors(tmp_path: Path) -> None:
    tensors, ends, saver = some_tensors(), Ends(), StateSaver(LIMIT_S)
    expected = bits(tensors)
    stall = saver.save(tmp_path / "trainer", tensors, {"step": 1}, ends)
    for tensor in tensors.values():
        tensor.zero_()
    assert saver.wait(LIMIT_S)
    assert 0 < stall < LIMIT_S
    (end,) = ends.ends
    assert isinstance(end, Written)
    found = empty_like(some_tensors())
    StateReader(tmp_path / "trainer", end.digest).load(found)
    same_bits(bits(found), expected)


def test_copies_are_memory_of_their_own() -> None:
    memory = torch.arange(12.0)
    tensors = {"all": memory, "part": memory[3:7].view(2, 2), "turned": memory.view(3, 4).T}
    copies = Staging().copy(tensors)
    memory.zero_()
    assert copies["part"].tolist() == [[3, 4], [5, 6]]
    assert torch.equal(copies["turned"], torch.arange(12.0).view(3, 4).T)
    assert copies["all"].tolist() == list(range(12))


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    first, second, saver = Ends(hold=True), Ends(), StateSaver(LIMIT_S)
    saver.save(tmp_path / "1", some_tensors(1), {}, first)
    later = threading.Thread(target=saver.save, args=(tmp_path / "2", some_tensors(2), {}, second))
    later.start()
    assert saver.wait(0.2) is False
    assert not (tmp_path / "2").exists()
    assert second.ends == []
    first.go.set()
    later.join(LIMIT_S)
    assert saver.wait(LIMIT_S)
    assert [len(ends.ends) for ends in (first, second)] == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_save_that_does_not_end_is_named_by_the_next(tmp_path: Path) -> None:
    ends, saver = Ends(hold=True), StateSaver(wait_s=0.05)
    saver.save(tmp_path / "1", some_tensors(), {}, ends)
    with pytest.raises(CheckpointError, match=rf"2: the saving of {tmp_path}/1 has not ended within 0 s"):
        saver.save(tmp_path / "2", some_tensors(), {}, ends)
    ends.go.set()
    assert saver.wait(LIMIT_S)


def test_close_gives_up_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends, saver = Ends(hold=True), StateSaver(LIMIT_S)
    saver.save(tmp_path / "1", some_tensors(), {}, ends)
    saver.close(0.05)
    assert f"the saving of {tmp_path}/1 is given up" in caplog.text
    ends.go.set()
    saver.close(LIMIT_S)
    assert len(ends.ends) == 1


def test_a_failed_write_is_told_and_leaves_the_earlier_state(tmp_path: Path) -> None:
    """As on a full disk: of what cannot be written nothing is left, and what was whole stays whole."""
    large = {"parameter.a": torch.randn(100_000)}
    saver, before, failed = StateSaver(LIMIT_S), Ends(), Ends()
    saver.save(tmp_path / "trainer", some_tensors(), {"step": 1}, before)
    assert saver.wait(LIMIT_S)
    with small_files():
        saver.save(tmp_path / "trainer", large, {"step": 2}, failed)
        assert saver.wait(LIMIT_S)
    (end,) = failed.ends
    assert isinstance(end, CheckpointError)
    assert str(end).startswith(f"{tmp_path}/trainer: the state cannot be saved: ")
    assert os.listdir(tmp_path) == ["trainer"]
    assert StateReader(tmp_path / "trainer").counters == {"step": 1}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saver, ends = StateSaver(LIMIT_S), Ends()
    saver.save(tmp_path / "file" / "trainer", some_tensors(), {}, ends)
    assert saver.wait(LIMIT_S)
    (end,) = ends.ends
    assert isinstance(end, CheckpointError)
    assert "file/trainer: the state cannot be saved: " in str(end)


def test_a_large_state_takes_little_more_than_its_tensors(tmp_path: Path) -> None:
    """Parameters and moments of a model of a million parameters."""
    shapes = [(512, 256), (256, 256), (256,), (1024, 256), (256, 1024)] * 2
    tensors = {
        f"{kind}.{i}": torch.randn(shape)
        for i, shape in enumerate(shapes)
        for kind in ("parameter", "exp_avg", "exp_avg_sq")
    }
    tensors |= {f"step.{i}": torch.tensor(1.0) for i in range(len(shapes))}
    saver, ends = StateSaver(LIMIT_S), Ends()
    saver.save(tmp_path / "trainer", tensors, {"step": 1}, ends)
    assert saver.wait(LIMIT_S)
    (end,) = ends.ends
    assert isinstance(end, Written)
    content = sum(tensor.nbytes for tensor in tensors.values())
    assert content > 12e6
    assert end.nbytes <= 1.005 * content


WRITES_FOR_EVER = """
import sys, torch
from pathlib import Path
from common.checkpoints.writer import write_state
for step in range(1, 100_000):
    tensors = {"parameter.a": torch.full((300_000,), step)}
    write_state(Path(sys.argv[1], f"step-{step}", "trainer"), tensors, {"step": step})
"""


@pytest.mark.parametrize("after", range(4))
def test_a_process_killed_while_it_writes_leaves_whole_states_or_none(
    tmp_path: Path, after: int, wait_until: Callable[..., None]
) -> None:
    """Killed when the directory of a later step has just appeared, or a file in it: it is in the middle of that one."""
    unfinished = tmp_path / f"step-{2 + after}"
    wanted = ["", ".trainer.*", ".trainer.*/*.distcp", ".trainer.*/.metadata*"][after]
    with subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path)]) as process:
        try:
            reached = (lambda: any(unfinished.glob(wanted))) if wanted else unfinished.exists
            wait_until(lambda: reached() or unfinished.with_name(f"step-{3 + after}").exists(), "a later step")
        finally:
            process.send_signal(signal.SIGKILL)
    whole = 0
    for directory in tmp_path.iterdir():
        target, step = directory / "trainer", int(directory.name.removeprefix("step-"))
        if not target.exists():
            with pytest.raises(CheckpointError, match="there is no whole saved state here"):
                StateReader(target)
            continue
        found = {"parameter.a": torch.zeros(300_000, dtype=torch.int64)}
        StateReader(target).load(found)
        assert found["parameter.a"].eq(step).all()
        whole += 1
    assert whole >= 1
