"""Saved states: when one is whole, which are kept, and which are not believed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest

from common.config import CheckpointConfig, Config
from common.config_values import Snapshots, snapshots
from services.coordinator.ledger import RecordSizes
from services.coordinator.states import StateError, read_state
from tests.unit.saved_states import ROLES, on_disk, part, record, save, states


@pytest.mark.parametrize("order", [("trainer", "critic", ""), ("critic", "", "trainer"), ("", "trainer", "critic")])
def test_a_state_is_whole_when_all_parts_and_the_steps_record_are_there(tmp_path: Path, order: tuple[str, ...]) -> None:
    found = states(tmp_path)
    for what in order:
        assert (found.whole, found.newest(9), list(tmp_path.glob("*/state.json"))) == ({}, 0, [])
        if what == "trainer" or what == "critic":
            part(found, what, 3)
        else:
            found.reached(record(3))
    assert found.newest(9) == 3
    written = read_state(tmp_path / "step-3")
    assert (written.run, written.record, written.epoch) == ("demo", record(3), 1)
    assert written.parts == {"trainer": "trainer 3", "critic": "critic 3"}


def test_without_a_critic_the_trainers_part_is_all(tmp_path: Path) -> None:
    found = states(tmp_path, roles=("trainer",))
    part(found, "trainer", 1)
    found.reached(record(1))
    assert found.newest(9) == 1


def test_the_next_coordinator_finds_whole_states_and_parts(tmp_path: Path) -> None:
    earlier = states(tmp_path)
    save(earlier, 1, 2)
    part(earlier, "trainer", 3)
    later = states(tmp_path)
    assert (sorted(later.whole), later.distrusted) == ([1, 2], {})
    assert (later.newest(9), later.newest(1), later.newest(0)) == (2, 1, 0)
    assert (later.digest("critic", 2), later.digest("critic", 3)) == ("critic 2", "")
    assert [later.has(role, 3) for role in ROLES] == [True, False]
    assert [later.has(role, 0) for role in ROLES] == [True, True], "the run's beginning needs no file"
    part(later, "critic", 3)
    later.reached(record(3))
    assert later.newest(9) == 3


def test_a_state_without_state_json_does_not_exist(tmp_path: Path) -> None:
    save(states(tmp_path), 1)
    (tmp_path / "step-1" / "state.json").unlink()
    assert states(tmp_path).newest(9) == 0


def test_a_state_of_which_a_part_is_gone_does_not_exist(tmp_path: Path) -> None:
    save(states(tmp_path), 1, 2)
    (tmp_path / "step-2" / "critic").rmdir()
    assert states(tmp_path).newest(9) == 1


# ---------------------------------------------------------------- which are kept


def test_the_newest_are_kept(tmp_path: Path) -> None:
    found = states(tmp_path, keep=2)
    save(found, 1, 2, 3, 4)
    assert sorted(found.whole) == on_disk(found) == [3, 4]


def test_those_of_every_so_many_steps_are_kept_too(tmp_path: Path) -> None:
    found = states(tmp_path, keep=1, every=3)
    save(found, *range(1, 9))
    assert sorted(found.whole) == on_disk(found) == [3, 6, 8]


def test_that_of_the_best_evaluation_is_kept_too(tmp_path: Path) -> None:
    found = states(tmp_path, keep=1)
    for step, accuracy in ((1, 0.2), (2, 0.7), (3, 0.7), (4, None), (5, 0.6)):
        save(found, step)
        found.evaluated(step, accuracy)
    assert sorted(found.whole) == on_disk(found) == [2, 5]
    assert read_state(tmp_path / "step-2").accuracy == 0.7
    later = states(tmp_path, keep=1)
    save(later, 6)
    later.evaluated(6, 0.65)
    assert on_disk(later) == [2, 6], "the best is known from before"
    later.evaluated(6, 0.8)
    assert on_disk(later) == [6]


def test_an_evaluation_that_is_there_before_its_state_is_whole(tmp_path: Path) -> None:
    found = states(tmp_path, keep=1)
    found.reached(record(1))
    found.evaluated(1, 0.5)
    for role in ROLES:
        part(found, role, 1)
    assert read_state(tmp_path / "step-1").accuracy == 0.5
    save(found, 2, 3)
    assert on_disk(found) == [1, 3]


def test_without_best_an_evaluation_keeps_nothing(tmp_path: Path) -> None:
    found = states(tmp_path, keep=1, best=False)
    save(found, 1)
    found.evaluated(1, 0.9)
    save(found, 2)
    assert on_disk(found) == [2]


def test_parts_of_older_states_that_never_became_whole_go(tmp_path: Path) -> None:
    found = states(tmp_path, keep=1)
    part(found, "trainer", 1)
    save(found, 2)
    part(found, "trainer", 3)
    assert on_disk(found) == [2, 3], "what is newer may still become whole"


@pytest.mark.parametrize(
    ("every", "kept", "due"), [(1, 0, [1, 2, 3, 4, 5, 6, 7]), (3, 0, [3, 6, 7]), (10, 2, [2, 4, 6, 7]), (10, 0, [7])]
)
@pytest.mark.parametrize(("may_skip", "writing"), [(False, False), (False, True), (True, False)])
def test_which_steps_are_saved(every: int, kept: int, due: list[int], may_skip: bool, writing: bool) -> None:
    found = Snapshots(every, may_skip, kept)
    assert [step for step in range(1, 8) if found.due(step, step == 7, writing)] == due


@pytest.mark.parametrize(("kept", "due"), [(0, [7]), (3, [3, 6, 7])])
def test_what_is_never_skipped_while_an_earlier_state_is_written(kept: int, due: list[int]) -> None:
    found = Snapshots(1, may_skip=True, kept_every=kept)
    assert [step for step in range(1, 8) if found.due(step, step == 7, writing=True)] == due


def test_only_the_automatic_choice_may_skip() -> None:
    """The embedded model is a small one."""
    for config, wanted in (
        (CheckpointConfig(), Snapshots(1, may_skip=True)),
        (CheckpointConfig(snapshot_every=1), Snapshots(1, may_skip=False)),
        (CheckpointConfig(snapshot_every=7, every=3), Snapshots(7, may_skip=False, kept_every=3)),
    ):
        assert snapshots(Config(checkpoint=config)) == wanted


# ---------------------------------------------------------------- going back


def test_tries_to_restore_a_state_are_counted_until_the_run_gets_on(tmp_path: Path) -> None:
    found = states(tmp_path)
    save(found, 1, 2)
    for count in (1, 2):
        found.not_in_time(2)
        assert (found.late[2], found.late[1], found.newest(9), found.distrusted) == (count, 0, 2, {})
    found.reached(record(3))
    assert found.late[2] == 0


def test_later_states_are_forgotten_when_the_run_goes_back(tmp_path: Path) -> None:
    found = states(tmp_path, keep=5)
    save(found, 1, 2, 3, 4)
    found.evaluated(2, 0.3)
    found.evaluated(4, 0.9)
    part(found, "trainer", 5)
    found.forget_after(2)
    assert sorted(found.whole) == on_disk(found) == [1, 2]
    assert [found.has(role, 5) for role in ROLES] == [False, False]
    save(found, 3)
    found.evaluated(3, 0.4)
    assert read_state(tmp_path / "step-3").accuracy == 0.4, "better than what is left"


def test_a_step_that_is_repeated_is_saved_with_its_new_record(tmp_path: Path) -> None:
    """Places in the record files differ, since the lines hold timings."""
    found = states(tmp_path)
    save(found, 1, 2)
    found.forget_after(1)
    for role in ROLES:
        part(found, role, 2)
    assert found.newest(9) == 1, "the step is not done again yet"
    again = msgspec.structs.replace(record(2), sizes=RecordSizes(metrics=77, samples=78))
    found.reached(again)
    assert read_state(tmp_path / "step-2").record == again


def test_a_state_that_could_not_be_restored_is_not_taken_again_and_its_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = states(tmp_path)
    save(found, 1, 2)
    with caplog.at_level(logging.ERROR):
        found.distrust(2, "critic: a checksum is wrong")
    assert caplog.messages == ["the state after step 2 is not used: critic: a checksum is wrong"]
    assert (found.newest(9), found.distrusted) == (1, {2: "critic: a checksum is wrong"})
    found.reached(record(2))
    assert (found.newest(9), on_disk(found)) == (1, [1, 2])


def test_a_distrusted_state_keeps_its_files_when_the_run_goes_back_before_it(tmp_path: Path) -> None:
    found = states(tmp_path)
    save(found, 1, 2)
    found.distrust(2, "critic: a checksum is wrong")
    left = sorted(path.relative_to(tmp_path / "step-2") for path in (tmp_path / "step-2").rglob("*"))
    found.forget_after(1)
    aside = tmp_path / "distrusted-step-2"
    assert left == sorted(path.relative_to(aside) for path in aside.rglob("*"))
    assert left, "there were files to keep"
    assert on_disk(found) == [1]
    save(found, 2)
    assert found.newest(9) == 2, "the step may be done and saved again"


# ---------------------------------------------------------------- what is not believed


@pytest.mark.parametrize("damage", ["cut", "byte", "empty", "other", "unknown"])
def test_a_damaged_state_is_told_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    save(states(tmp_path), 1, 2)
    file = tmp_path / "step-2" / "state.json"
    content = file.read_bytes()
    spoiled = {
        "cut": content[: len(content) // 2], "byte": content.replace(b'"step"', b'"stap"'), "empty": b"",
        "other": b"[1]", "unknown": b'{"x": 1, ' + content[1:],
    }  # fmt: skip
    file.write_bytes(spoiled[damage])
    with pytest.raises(StateError, match=rf"{file}: cannot be read: .*delete {tmp_path / 'step-2'}"):
        read_state(tmp_path / "step-2")
    with caplog.at_level(logging.ERROR):
        found = states(tmp_path)
    assert (sorted(found.whole), list(found.distrusted)) == ([1], [2])
    assert f"the state after step 2 is not used: {file}: cannot be read" in caplog.text
    assert on_disk(found) == [1, 2]


def test_a_state_of_another_run_or_step_is_told_and_not_used(tmp_path: Path) -> None:
    save(states(tmp_path, run="another"), 1)
    found = states(tmp_path)
    assert found.newest(9) == 0
    assert "step-1/state.json is of run 'another', step 1; expected run 'demo', step 1" in found.distrusted[1]
    file = tmp_path / "step-1" / "state.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"run": "demo"}))
    (tmp_path / "step-1").rename(tmp_path / "step-7")
    renamed = states(tmp_path)
    assert "expected run 'demo', step 7: was the directory copied or renamed?" in renamed.distrusted[7]


def test_other_directories_are_let_alone(tmp_path: Path) -> None:
    for name in ("final", "step-one", "step-3.partial"):
        (tmp_path / name).mkdir()
    found = states(tmp_path, keep=1)
    save(found, 4, 5)
    found.forget_after(0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "step-3.partial", "step-one"]
