"""Settings out of the environment, and how the coordinator is prepared from them under docker compose."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from common.config_loading import ConfigError, load_config
from common.config_values import devices, uses_gpu
from common.log_lines import FORMAT, LogLines, set_up_logging
from common.records import Summary
from common.run_files import STOPPED, RunDirectory, SharedDirectory
from tests.conftest import ROOT
from tools.coordinate import HasEnded, coordinate, keep_to_itself
from tools.resume import CannotStart
from tools.settings import settings

HOLD = """
import sys
from pathlib import Path
from common.run_files import RunDirectory
from tools.coordinate import keep_to_itself
keep_to_itself(RunDirectory(Path(sys.argv[1])))
print("held", flush=True)
sys.stdin.read()
"""
PREPARE = """
import os
import sys
from pathlib import Path
from common.run_files import RunDirectory
from tools.coordinate import CannotStart, prepare
os.setgroups([])
os.setgid(1)
os.setuid(1)
try:
    prepare(RunDirectory(Path(sys.argv[1])))
except CannotStart as refused:
    print(refused)
"""


def test_two_underscores_are_a_dot() -> None:
    found = settings(
        {"QUARTET_ROLLOUT__VLLM__KV_CACHE_MIB": "64", "QUARTET_RUN": "mine", "QUARTET_LOG": "json", "HOME": "/",
         "QUARTET_EVAL__EVERY": ""}
    )  # fmt: skip
    assert found == {
        "rollout.vllm.kv_cache_mib=64": "QUARTET_ROLLOUT__VLLM__KV_CACHE_MIB=64", "run.name=mine": "QUARTET_RUN=mine"
    }  # fmt: skip
    assert load_config("tiny", list(found)).rollout.vllm.kv_cache_mib == 64


@pytest.fixture
def place(tmp_path: Path) -> Generator[dict[str, str]]:
    """The environment of a run that no other test has."""
    name = f"compose-{uuid.uuid4().hex[:8]}"
    yield {"QUARTET_RUN": name, "QUARTET_RUN__DIRECTORY": str(tmp_path / "runs")}
    SharedDirectory.of_run(name).note.unlink(missing_ok=True)


def files(place: dict[str, str]) -> RunDirectory:
    return RunDirectory(Path(place["QUARTET_RUN__DIRECTORY"]) / place["QUARTET_RUN"])


def test_the_first_start_writes_the_config(place: dict[str, str]) -> None:
    command = coordinate("tiny", [], place | {"QUARTET_RUN__STEPS": "7"}).command
    assert command[:4] == [sys.executable, "-P", "-m", "services.coordinator"]
    config = load_config(command[command.index("--config") + 1])
    assert (config.run.steps, config.run.name, config.bus.group_access) == (7, place["QUARTET_RUN"], True)


def test_the_coordinator_sees_no_gpu_and_is_told_where_the_others_compute(place: dict[str, str]) -> None:
    place |= {"QUARTET_DEVICE": "cuda", "QUARTET_CRITIC__DEVICE": "cuda:1"}
    command = coordinate("tiny", [], place).command
    config = load_config(command[command.index("--config") + 1])
    assert devices(config) == {"rollout": "cuda", "trainer": "cuda", "critic": "cuda:1"}
    assert uses_gpu(config)


def test_a_wrong_setting_is_named(place: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.temprature: no such key.*\(set by QUARTET_ROLLOUT__TEMPRATURE=1\)"
    ):
        coordinate("tiny", [], place | {"QUARTET_ROLLOUT__TEMPRATURE": "1"})
    assert not files(place).path.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("QUARTET_ROLLOUT_TEMPERATURE", "two underscores.*: QUARTET_ROLLOUT__TEMPERATURE"),
        ("QUARTET_SHN", "Did you mean QUARTET_SHM"),
        ("QUARTET_X", "no such setting"),
        ("QUARTET_RUN__NAME", "the run's name is QUARTET_RUN"),
    ],
)
def test_a_name_that_means_nothing_is_told(place: dict[str, str], name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .*{words}"):
        coordinate("tiny", [], place | {name: "1"})


def test_every_setting_of_the_compose_files_is_known() -> None:
    texts = [(ROOT / name).read_text() for name in ("compose.yaml", "compose.cpu.yaml", ".env.example")]
    named = {name for text in texts for name in re.findall(r"QUARTET_[A-Z_]+", text)}
    assert len(named) > 8
    settings(dict.fromkeys(named, "1"))


@pytest.mark.parametrize("reason", [STOPPED, "the run failed: no memory"])
def test_a_run_that_ended_is_not_started_again_by_a_restart_policy(place: dict[str, str], reason: str) -> None:
    shared = SharedDirectory.of_run(place["QUARTET_RUN"])
    shared.leave_note(reason)
    with pytest.raises(HasEnded, match=reason):
        coordinate("tiny", [], place)


def test_another_container_is_a_start_that_somebody_wants(place: dict[str, str]) -> None:
    """`docker compose up` made it anew, with new settings say, and /dev/shm is that of before."""
    shared = SharedDirectory.of_run(place["QUARTET_RUN"])
    shared.note.write_text(f"another-container\n{STOPPED}")
    coordinate("tiny", [], place)
    assert not shared.note.exists(), "replicas would take the run for ended"


def test_what_a_coordinator_that_was_killed_at_the_end_left_is_taken_away(place: dict[str, str]) -> None:
    """Else replicas that docker starts again would wait for it."""
    shared = SharedDirectory.of_run(place["QUARTET_RUN"])
    coordinate("tiny", [], place)
    finish_run(place)
    shared.leave_note()
    shared.path.mkdir(mode=0o700)
    shared.tokens.touch()
    with pytest.raises(HasEnded, match="the run is finished"):
        coordinate("tiny", [], place)
    assert not shared.path.exists()
    assert shared.has_ended()
    with pytest.raises(HasEnded, match="the run is finished"):
        coordinate("tiny", [], place)


def test_an_unfinished_run_goes_on_and_another_config_is_refused(place: dict[str, str]) -> None:
    coordinate("tiny", [], place)
    with sqlite3.connect(files(place).ledger) as ledger:
        ledger.execute("CREATE TABLE steps (step INTEGER)")
        ledger.execute("INSERT INTO steps VALUES (1)")
    ledger.close()
    with pytest.raises(CannotStart, match=r"rollout\.temperature: was 1\.0, now 0\.5"):
        coordinate("tiny", ["rollout.temperature=0.5"], place)
    assert coordinate("tiny", [], place)


@pytest.mark.parametrize("table", ["", "CREATE TABLE steps (step INTEGER)"])
def test_before_the_first_step_another_config_may_take_its_place(place: dict[str, str], table: str) -> None:
    coordinate("tiny", [], place)
    with sqlite3.connect(files(place).ledger) as ledger:
        ledger.execute(table)
    ledger.close()
    coordinate("tiny", ["rollout.temperature=0.5"], place)
    assert load_config(str(files(place).config)).rollout.temperature == 0.5
    assert not files(place).ledger.exists()
    assert (files(place).path / "attempt-1" / "ledger.sqlite").exists()
    with sqlite3.connect(files(place).ledger) as ledger:
        ledger.execute("CREATE TABLE other (x)")
    ledger.close()
    coordinate("tiny", ["rollout.temperature=0.5"], place)
    assert files(place).ledger.exists(), "the same config goes on"


def test_a_start_that_failed_pins_no_config(place: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"model\.path: '/none/such'"):
        coordinate("tiny", ["model.path=/none/such"], place)
    assert not files(place).config.exists()
    coordinate("tiny", ["run.steps=3"], place)
    coordinate("tiny", ["run.steps=7"], place)
    assert load_config(str(files(place).config)).run.steps == 7


def test_a_run_directory_has_one_coordinator(place: dict[str, str]) -> None:
    """Whoever has another /dev/shm sees no lock in it."""
    prepared = coordinate("tiny", [], place)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(prepared.files.path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CannotStart, match="is used by another coordinator"):
            keep_to_itself(prepared.files)
        holder.communicate(b"", timeout=30)
    keep_to_itself(prepared.files)


def test_a_finished_run_is_refused(place: dict[str, str]) -> None:
    coordinate("tiny", [], place)
    finish_run(place)
    with pytest.raises(CannotStart, match="is finished"):
        coordinate("tiny", [], place)


def finish_run(place: dict[str, str]) -> None:
    summary = Summary(
        run=place["QUARTET_RUN"], finished=True, steps=1, samples=1, masked_samples=0, accuracy_first=None,
        accuracy_last=None, reward_first=None, reward_last=None, wall_s=1.0, phase_s={}, coordinator_overhead_ratio=0.0,
        cache_hit_ratio=0.0, config_digest="", epoch=1,
    )  # fmt: skip
    files(place).summary.write_bytes(msgspec.json.encode(summary))


def test_a_folder_that_cannot_be_made_is_named(place: dict[str, str]) -> None:
    Path(place["QUARTET_RUN__DIRECTORY"]).write_text("no folder")
    with pytest.raises(CannotStart, match="cannot be made: Not a directory"):
        coordinate("tiny", [], place)


@pytest.mark.parametrize(("owner", "advice"), [(4242, "QUARTET_UID=4242"), (0, "sudo chown -R 1:1 /.*runs$")])
def test_a_folder_of_another_user_is_named_with_its_owner(owner: int, advice: str) -> None:
    """Rights mean nothing to root, so another user tries."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        runs = Path(folder, "runs")
        runs.mkdir()
        os.chown(runs, owner, owner)
        tried = subprocess.run(
            [sys.executable, "-c", PREPARE, str(runs / "mine")], cwd=ROOT, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert re.search(f"belongs to user {owner}, the services run as user 1: .*{advice}", tried.stdout.strip()), tried


def test_the_group_may_read_the_token_cache_and_nothing_else(tmp_path: Path) -> None:
    shared = SharedDirectory(tmp_path / "quartet-x")
    shared.path.mkdir(mode=0o700)
    for path in (shared.tokens, shared.socket, shared.lock, shared.secret_file):
        path.touch(mode=0o600)
    shared.open_to_group()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in shared.path.iterdir()}
    assert modes == {
        shared.tokens.name: 0o640,
        shared.socket.name: 0o660,
        shared.lock.name: 0o600,
        shared.secret_file.name: 0o600,
    }
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
