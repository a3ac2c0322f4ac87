"""What ``quartet up`` shows of metrics.jsonl: every line once, also when the coordinator cuts off what is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.records import StepMetrics, append_line
from common.run_files import RunDirectory, SharedDirectory
from tools.display import Feed


@pytest.fixture
def files(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def feed(files: RunDirectory) -> Feed:
    return Feed(SharedDirectory(files.path / "shared"), files)


def write(files: RunDirectory, *steps: int, reward: float = 0.5) -> None:
    for step in steps:
        append_line(files.metrics, StepMetrics(step, {"reward": reward}, {"step_s": 1.0}))


def cut(files: RunDirectory, lines: int) -> None:
    kept = files.metrics.read_bytes().splitlines(keepends=True)[:lines]
    with files.metrics.open("r+b") as file:
        file.truncate(sum(map(len, kept)))


def shown(feed: Feed) -> list[int]:
    return [step.step for step in feed.poll([]).new]


def test_every_line_once(feed: Feed, files: RunDirectory) -> None:
    assert shown(feed) == []
    write(files, 1, 2)
    assert shown(feed) == [1, 2]
    assert shown(feed) == []
    write(files, 3)
    assert shown(feed) == [3]


def test_a_line_that_is_being_written_waits_for_its_end(feed: Feed, files: RunDirectory) -> None:
    write(files, 1, 2)
    whole = files.metrics.read_bytes()
    files.metrics.write_bytes(whole[:-5])
    assert shown(feed) == [1]
    files.metrics.write_bytes(whole)
    assert shown(feed) == [2]


def test_what_a_resumed_run_has_written_before_is_not_shown(feed: Feed, files: RunDirectory) -> None:
    write(files, 1, 2)
    feed.skip()
    write(files, 3)
    view = feed.poll([])
    assert [step.step for step in view.new] == [3]


@pytest.mark.parametrize("seen_between", [True, False])
@pytest.mark.parametrize("again", [(3,), (3, 4), (3, 4, 5)])
def test_steps_that_are_repeated_are_shown_again(
    feed: Feed, files: RunDirectory, again: tuple[int, ...], seen_between: bool
) -> None:
    """Whether the file is shorter, as long or longer by the time it is looked at."""
    write(files, 1, 2, 3, 4)
    assert shown(feed) == [1, 2, 3, 4]
    cut(files, 2)
    if seen_between:
        assert shown(feed) == []
    write(files, *again, reward=0.25)
    assert shown(feed) == list(again)
    write(files, 9)
    assert shown(feed) == [9]


def test_a_file_that_begins_anew_is_shown_from_its_beginning(feed: Feed, files: RunDirectory) -> None:
    write(files, 1, 2)
    assert shown(feed) == [1, 2]
    cut(files, 0)
    assert shown(feed) == []
    write(files, 1, reward=0.75)
    assert shown(feed) == [1]
