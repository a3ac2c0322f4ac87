"""A short soak, and that a soak would see what it looks for."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.models import resolve_model
from common.processes import register
from common.run_files import RunDirectory
from common.tokenizer import load_tokenizer
from tests.process.whole_runs import WaitUntil
from tests.unit.model_support import put_column, put_sample, token_cache
from tools.clean import clean
from tools.soak import SAMPLES_PER_STEP, Soak, SoakFailed
from tools.soak_checks import Memory, check_cache, check_records, check_slots, is_stopped

pytestmark = pytest.mark.timeout(280)
ENDS_WITHIN_S = 240.0


@dataclass(frozen=True)
class Soaked:
    """What a soak printed and left."""

    folder: Path
    facts: dict[str, Any]

    @property
    def files(self) -> RunDirectory:
        (run,) = (self.folder / "runs").iterdir()
        return RunDirectory(run)


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Soaked:
    folder = tmp_path_factory.mktemp("soak")
    command = [sys.executable, "-m", "tools.soak", "--minutes", "0.75", "--every", "6", "--seed", "1"]
    ended = subprocess.run(
        [*command, "--keep", str(folder)], capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}{(folder / 'up.log').read_text()}"
    return Soaked(folder, json.loads(ended.stdout))


def test_nothing_is_lost_or_doubled_whoever_is_killed(soaked: Soaked) -> None:
    facts = soaked.facts
    assert facts["problems"] == []
    assert facts["kills"] >= 2
    assert facts["cache_checks"] == facts["kills"] + 2
    assert facts["deaths_seen"] + facts["coordinators"] - 1 >= facts["kills"]
    assert facts["steps"] >= 2 * facts["kills"]
    assert facts["samples"] == SAMPLES_PER_STEP * facts["steps"]
    for nothing in ("lost_samples", "doubled_samples", "masked_samples", "leaked_slots"):
        assert facts[nothing] == 0


def copy_of(soaked: Soaked, folder: Path) -> RunDirectory:
    shutil.copytree(soaked.files.path, folder / "run")
    return RunDirectory(folder / "run")


def test_a_doubled_sample_is_seen(soaked: Soaked, tmp_path: Path) -> None:
    files = copy_of(soaked, tmp_path)
    first, *others = files.samples.read_bytes().splitlines(keepends=True)
    files.samples.write_bytes(b"".join((first, first, *others)))
    facts, wrong = check_records(files, SAMPLES_PER_STEP)
    assert facts["doubled_samples"] == 1
    assert wrong[0].startswith("samples.jsonl: step 1 has samples [0, 0, 1, ")


def test_a_damaged_line_is_seen(soaked: Soaked, tmp_path: Path) -> None:
    files = copy_of(soaked, tmp_path)
    whole = files.metrics.read_bytes()
    files.metrics.write_bytes(whole[:100] + whole[120:])
    assert "metrics.jsonl is damaged: " in check_records(files, SAMPLES_PER_STEP)[1][0]


def test_a_lost_sample_and_a_lost_step_are_seen(soaked: Soaked, tmp_path: Path) -> None:
    files = copy_of(soaked, tmp_path)
    ledger = sqlite3.connect(files.ledger)
    ledger.execute("UPDATE samples SET state = 'open' WHERE step = 2 AND wave = 0 AND sample = 3")
    ledger.commit()
    ledger.close()
    _, *later = files.metrics.read_bytes().splitlines(keepends=True)
    files.metrics.write_bytes(b"".join(line for line in later if not line.startswith(b'{"step":1,')))
    facts, wrong = check_records(files, SAMPLES_PER_STEP)
    assert facts["lost_samples"] == 1
    assert any(line.startswith("metrics.jsonl tells of ") for line in wrong)
    assert "step 2: 16 samples in the ledger, 15 of them scored or masked, expected 16" in wrong


def test_a_slot_that_is_never_given_back_is_seen(soaked: Soaked, tmp_path: Path) -> None:
    again = shutil.copyfile(soaked.folder / "tokens-1", tmp_path / "tokens-again")
    facts, wrong = check_slots([soaked.folder / "tokens-1", again], soaked.files.path.name)
    assert facts["leaked_slots"] == facts["leased_slots"][0] > 0
    assert len(wrong) == 1


def test_damage_of_the_token_cache_is_seen_if_it_lasts() -> None:
    fingerprint = load_tokenizer(resolve_model("tiny")).fingerprint
    with token_cache(fingerprint=fingerprint) as cache:
        ref, other = put_sample(cache, [5, 6], [7, 8]), put_sample(cache, [5, 7], [7, 8])
        assert check_cache(cache.path, "demo", nullcontext) == []
        put_column(cache, "values", ref, [0.5, math.nan])
        put_column(cache, "response_mask", other, [1, 7])
        looks: list[int] = []

        @contextmanager
        def mended_after_a_look() -> Generator[None]:
            yield
            looks.append(len(looks))
            put_column(cache, "response_mask", other, [1, 1])

        (found,) = check_cache(cache.path, "demo", mended_after_a_look)
        assert found == f"{cache.path}: slot {ref.slot}: values[1] is nan, expected a finite number"
        assert len(looks) == 3
        assert check_cache(cache.path, "another run", nullcontext)[0].startswith(f"{cache.path}: ")


def test_a_soak_looks_at_the_cache_only_while_its_writer_stands_still(tmp_path: Path, wait_until: WaitUntil) -> None:
    """Here the coordinator is a process that counts in a file; it counts on when the look is over."""
    run = Soak(tmp_path, 1)
    counted = tmp_path / "counted"
    counting = f"n = 0\nwhile True: n += 1; open({str(counted)!r}, 'w').write(str(n).zfill(12))"
    with pytest.raises(SoakFailed, match="no coordinator lives in step 0"), run.still():
        pytest.fail("there is none to stop")
    coordinator = subprocess.Popen([sys.executable, "-c", counting])
    try:
        run.shared.path.mkdir()
        register(run.shared.processes, "coordinator", 0, coordinator.pid)
        wait_until(lambda: counted.exists() and counted.stat().st_size == 12, "it counts")
        with run.still():
            before = counted.read_text()
            assert is_stopped(coordinator.pid)
            assert counted.read_text() == before
        assert not is_stopped(coordinator.pid)
        wait_until(lambda: counted.read_text() not in ("", before), "it counts on")
    finally:
        coordinator.kill()
        coordinator.wait()
        clean(run.name)


def test_memory_that_grows_is_seen_in_processes_of_one_age_alone() -> None:
    memory = Memory()
    for second in range(900):
        age = float(second % 100)
        memory.seen.append(("reward", float(second), age, 100 + int(age)))
        memory.seen.append(("critic", float(second), age, 100 + second // 100))
    facts, wrong = memory.growth(900.0)
    assert facts["reward"]["growth"] == 0.0
    assert facts["critic"]["growth"] == pytest.approx(3 / 105, abs=1e-4)
    assert wrong == []
    memory.seen.append(("critic", 899.0, 15.0, 130))
    assert len(memory.growth(900.0)[1]) == 1
