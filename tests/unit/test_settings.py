"""Settings out of the environment, and how the coordinator is prepared from them under docker compose."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import uuid
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from common.config_loading import ConfigError, load_config
from common.config_values import devices, uses_gpu
from common.log_lines import FORMAT, LogLines, set_up_logging
from common.records import Summary
from common.run_files import RunDirectory, SharedDirectory
from tools.coordinate import coordinate, note_start
from tools.resume import CannotStart
from tools.settings import settings


def test_two_underscores_are_a_dot() -> None:
    found = settings(
        {"QUARTET_ROLLOUT__VLLM__KV_CACHE_MIB": "64", "QUARTET_RUN": "mine", "QUARTET_LOG": "json", "HOME": "/",
         "QUARTET_EVAL__EVERY": ""}
    )  # fmt: skip
    assert found == ["rollout.vllm.kv_cache_mib=64", "run.name=mine"]
    assert load_config("tiny", found).rollout.vllm.kv_cache_mib == 64


@pytest.fixture
def place(tmp_path: Path) -> Generator[dict[str, str]]:
    """The environment of a run that no other test has."""
    name = f"compose-{uuid.uuid4().hex[:8]}"
    yield {"QUARTET_RUN": name, "QUARTET_RUN__DIRECTORY": str(tmp_path / "runs")}
    note_start(SharedDirectory.of_run(name)).unlink(missing_ok=True)


def files(place: dict[str, str]) -> RunDirectory:
    return RunDirectory(Path(place["QUARTET_RUN__DIRECTORY"]) / place["QUARTET_RUN"])


def test_the_first_start_writes_the_config(place: dict[str, str]) -> None:
    command = coordinate("tiny", [], place | {"QUARTET_RUN__STEPS": "7"})
    assert command[:4] == [sys.executable, "-P", "-m", "services.coordinator"]
    config = load_config(command[command.index("--config") + 1])
    assert (config.run.steps, config.run.name, config.bus.group_access) == (7, place["QUARTET_RUN"], True)


def test_the_coordinator_sees_no_gpu_and_is_told_where_the_others_compute(place: dict[str, str]) -> None:
    place |= {"QUARTET_DEVICE": "cuda", "QUARTET_CRITIC__DEVICE": "cuda:1"}
    command = coordinate("tiny", [], place)
    config = load_config(command[command.index("--config") + 1])
    assert devices(config) == {"rollout": "cuda", "trainer": "cuda", "critic": "cuda:1"}
    assert uses_gpu(config)


def test_a_wrong_setting_is_named(place: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temprature: no such key"):
        coordinate("tiny", [], place | {"QUARTET_ROLLOUT__TEMPRATURE": "1"})
    assert not files(place).path.exists()


def test_a_run_that_ended_is_not_started_again_by_a_restart_policy(place: dict[str, str]) -> None:
    coordinate("tiny", [], place)
    with pytest.raises(CannotStart, match="the run has ended"):
        coordinate("tiny", [], place)


def test_an_unfinished_run_goes_on_and_another_config_is_refused(place: dict[str, str]) -> None:
    coordinate("tiny", [], place)
    note_start(SharedDirectory.of_run(place["QUARTET_RUN"])).unlink()  # docker compose up has a new /dev/shm
    with pytest.raises(CannotStart, match=r"rollout\.temperature: was 1\.0, now 0\.5"):
        coordinate("tiny", ["rollout.temperature=0.5"], place)
    assert coordinate("tiny", [], place)


def test_a_finished_run_is_refused(place: dict[str, str]) -> None:
    coordinate("tiny", [], place)
    note_start(SharedDirectory.of_run(place["QUARTET_RUN"])).unlink()
    summary = Summary(
        run=place["QUARTET_RUN"], finished=True, steps=1, samples=1, masked_samples=0, accuracy_first=None,
        accuracy_last=None, reward_first=None, reward_last=None, wall_s=1.0, phase_s={}, coordinator_overhead_ratio=0.0,
        cache_hit_ratio=0.0, config_digest="", epoch=1,
    )  # fmt: skip
    files(place).summary.write_bytes(msgspec.json.encode(summary))
    with pytest.raises(CannotStart, match="is finished"):
        coordinate("tiny", [], place)


def test_a_folder_of_another_user_is_named_with_its_owner(place: dict[str, str]) -> None:
    runs = Path(place["QUARTET_RUN__DIRECTORY"])
    runs.write_text("no folder")
    with pytest.raises(CannotStart, match=f"belongs to user {os.geteuid()}.*set QUARTET_UID={os.geteuid()}"):
        coordinate("tiny", [], place)


def test_the_group_may_read_the_token_cache_and_nothing_else(tmp_path: Path) -> None:
    shared = SharedDirectory(tmp_path / "quartet-x")
    shared.path.mkdir(mode=0o700)
    for path in (shared.tokens, shared.socket, shared.lock):
        path.touch(mode=0o600)
    shared.open_to_group()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in shared.path.iterdir()}
    assert modes == {shared.tokens.name: 0o640, shared.socket.name: 0o660, shared.lock.name: 0o600}
    assert stat.S_IMODE(shared.path.stat().st_mode) == 0o710


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("reward", logging.WARNING, "file", 1, text, (), None)


def test_a_line_says_where_it_comes_from() -> None:
    made = LogLines("reward", -1, as_json=False)
    assert made.format(record("late")).endswith(" reward-? WARNING late")
    made.replica = 3
    assert made.format(record("late")).endswith(" reward-3 WARNING late")
    assert LogLines("coordinator", None, as_json=False).format(record("x")).endswith(" coordinator WARNING x")


def test_as_json_every_field_is_there() -> None:
    made = LogLines("reward", 3, as_json=True)
    made.step, made.phase = 7, "SCORE"
    line = json.loads(made.format(record("two\nlines")))
    del line["time"]
    assert line == {
        "service": "reward", "replica": 3, "level": "WARNING", "step": 7, "phase": "SCORE", "logger": "reward",
        "message": "two\nlines",
    }  # fmt: skip
    assert "\n" not in made.format(record("two\nlines"))


def test_a_wrong_log_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORMAT, "xml")
    with pytest.raises(ValueError, match="QUARTET_LOG=xml: expected one of text, json"):
        set_up_logging("reward", 0, "info")
