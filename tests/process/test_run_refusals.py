"""Runs that cannot start, or cannot go on: one clear line that says what is wrong, an exit code, and nothing left."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.models import resolve_model
from tests.process.whole_runs import FUNCTIONS, Ended, WholeRun, finish

Row = dict[str, object]
CHAT = [{"role": "user", "content": "1+1="}]
GOOD: Row = {"prompt": "1+1=", "ground_truth": "2"}
FILES: dict[str, list[Row]] = {
    "second.jsonl": [GOOD, {"prompt": "2+2="}],
    "empty.jsonl": [],
    "truthless.jsonl": [{"prompt": "2+2="}],
    "long.jsonl": [{"prompt": "111111+222222=", "ground_truth": "333333"}],
    "chat.jsonl": [{"prompt": CHAT, "reward_model": {"ground_truth": "2"}, "data_source": "sums"}],
    "good.jsonl": [GOOD],
}


def write_files(folder: Path) -> None:
    for name, rows in FILES.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    mute = folder / "mute"
    shutil.copytree(resolve_model("tiny"), mute, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))


def assert_one_clear_line(run: WholeRun, ended: Ended, code: int, words: str) -> None:
    """The reason stands in one line of standard error; there is no traceback, and nothing is left."""
    assert ended.code == code, ended.err
    assert len([line for line in ended.err.splitlines() if re.search(words, line)]) == 1, ended.err
    assert "Traceback" not in ended.err
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ['prompts.train=["second.jsonl"]', "prompts.missing_ground_truth=error"],
            r"the run cannot start: second\.jsonl:2: no ground truth in field 'reward_model\.ground_truth'",
        ),
        (['prompts.train=["empty.jsonl"]'], r"the run cannot start: empty\.jsonl: the file is empty"),
        (
            ['prompts.train=["truthless.jsonl"]'],
            r"prompts\.train: no usable row in truthless\.jsonl: 1 without ground truth \(truthless\.jsonl:1\)",
        ),
        (
            ['prompts.train=["long.jsonl"]'],
            r"the run cannot start: prompts\.max_tokens: 8, but all 1 usable train rows are longer; the shortest has",
        ),
        (
            ['eval.data=["long.jsonl"]'],
            r"the run cannot start: prompts\.max_tokens: 8, but all 1 usable eval rows are longer; the shortest has",
        ),
        (
            ['prompts.train=["chat.jsonl"]', "prompts.chat_template=auto"],
            r"the run cannot start: chat\.jsonl:1: the prompt is a list of chat messages, but the tokenizer has no",
        ),
        (["prompts.chat_template=always"], r"prompts\.chat_template: 'always', but the tokenizer of model\.path"),
        (["model.path=mute"], r"the run cannot start: .*/mute: no tokenizer\.json there\. If the directory"),
    ],
    ids=[
        "row without ground truth", "empty file", "no usable row", "all prompts too long",
        "all held-out prompts too long", "chat without a template", "template asked for and absent",
        "no tokenizer",
    ],
)  # fmt: skip
def test_a_run_that_cannot_start_says_why(run: WholeRun, overrides: list[str], words: str) -> None:
    write_files(run.folder)
    ended = run.complete(*overrides)
    assert_one_clear_line(run, ended, 1, words)
    assert re.match(r"error: coordinator-0 \(process \d+\) exited with code 1\. ", ended.err)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.topk=3", r"^quartet up: rollout\.topk: no such key\. Did you mean rollout\.top_k\?"),
        ("reward.function=absent.py:score", r"^quartet up: reward\.function: no such file: absent\.py"),
        ('prompts.train=["absent.jsonl"]', r"^quartet up: prompts\.train\[0\]: no such file: absent\.jsonl"),
        ("rollout.top_k=3", r"^quartet up: rollout\.top_k: expected 0, found 3"),
        ("model.path=./absent", r"^quartet up: model: model\.path: '\./absent' is no embedded model \(tiny\)"),
        ("cache.slots=100000000", r"^quartet up: /dev/shm: \d+ MiB free .* token cache \d+ MiB.* smaller cache\.slots"),
    ],
    ids=["unknown key", "no reward file", "no prompt file", "refused value", "no model", "cache too large"],
)
def test_a_wrong_config_starts_nothing(run: WholeRun, override: str, words: str) -> None:
    ended = run.complete(override)
    assert_one_clear_line(run, ended, 2, words)
    assert ended.err.count("\n") == 1
    assert not run.files.path.exists()


def test_a_reward_function_that_cannot_be_loaded_ends_the_start(run: WholeRun) -> None:
    ended = run.complete(f"reward.function={FUNCTIONS / 'broken_import.py'}:score")
    words = r"reward\.function: importing .*broken_import\.py raised OSError: the answer key is not mounted"
    assert ended.code == 1
    assert re.match(r"error: reward-0 \(process \d+\) exited with code 2\. ", ended.err)
    assert re.search(words, ended.err)
    run.assert_nothing_left()


def test_a_run_that_cannot_go_on_names_the_coordinator_and_its_reason(run: WholeRun) -> None:
    """The replicas that it told to stop have ended before it, and are not to blame."""
    rows = [GOOD] * 16 + FILES["chat.jsonl"]
    (run.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = run.complete('prompts.train=["rows.jsonl"]', "prompts.shuffle=false", "eval.rows=0")
    words = r"the run failed in step 1, phase UPDATE: rows\.jsonl:17: the prompt is a list of chat messages"
    assert_one_clear_line(run, ended, 1, words)
    assert re.match(r"error: coordinator-0 \(process \d+\) exited with code 1\. ", ended.err)
    assert not run.summary().finished


# ---------------------------------------------------------------- a full /dev/shm

MOUNT = """
mount -t tmpfs -o size={size} tmpfs /dev/shm && {{ {before}
"$@"; code=$?; rm -f /dev/shm/filler; ls -A /dev/shm >left; exit $code; }}
"""


def small_memory(size: str, before: str = "") -> list[str]:
    """A command prefix under which /dev/shm has this size: in a mount namespace, as root or as root of its own."""
    for unshare in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        tried = subprocess.run(
            [*unshare, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False
        )
        if tried.returncode == 0:
            return [*unshare, "sh", "-c", MOUNT.format(size=size, before=before), "sh"]
    pytest.fail("this test needs unshare and mount, as root or with user namespaces")


def test_a_small_shared_memory_starts_nothing(run: WholeRun) -> None:
    ended = run.complete(prefix=small_memory("64k"))
    assert_one_clear_line(run, ended, 2, r"^quartet up: /dev/shm: 0 MiB free .* change: QUARTET_SHM in \.env")
    assert (run.folder / "left").read_text() == ""


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("", r"tokens: the token cache needs .* KiB, but .* KiB are free in /dev/shm.* lower cache\.slots"),
        ("head -c 1m /dev/zero >/dev/shm/filler 2>full;", r"cannot start: .*No space left on device: .*lock"),
    ],
    ids=["no room for tokens", "no room at all"],
)
def test_a_coordinator_for_which_there_is_no_memory_says_so(run: WholeRun, before: str, words: str) -> None:
    """Somebody took it after it had been looked at."""
    config = run.folder / "config.toml"
    config.write_text(run.quartet("config", "tiny", "--set", f"run.name={run.name}").out)
    module = (sys.executable, "-m", "services.coordinator", "--config", str(config))
    require_a_reason(run, finish(run.command(*small_memory("64k", before), *module)), words)


def test_a_trainer_for_which_there_is_no_memory_ends_the_run_with_the_reason(run: WholeRun) -> None:
    """A reward function takes it while the trainer loads its model."""
    fills = f"reward.function={FUNCTIONS / 'fills_memory.py'}:score"
    words = r"/weights/policy: no room for \d+ MiB of weights \(No space left on device\): enlarge /dev/shm"
    require_a_reason(run, run.complete(fills, prefix=small_memory("8m")), words)
    assert os.listdir(run.files.logs)


def require_a_reason(run: WholeRun, ended: Ended, words: str) -> None:
    assert ended.code == 1, ended.err
    assert re.search(words, ended.err), ended.err
    assert "Traceback" not in ended.err
    assert "SIGBUS" not in ended.err
    assert (run.folder / "left").read_text() == ""
    run.assert_nothing_left()
