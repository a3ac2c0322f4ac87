"""The reward service as a replica runs it, over a real token cache and the tiny model's tokenizer."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.config import Config, ModelConfig, RewardConfig
from common.messages import (
    FinishedSample,
    Lease,
    Manifest,
    Proof,
    ScoreBatch,
    ScoreItem,
    Scores,
    SlotRef,
    UpdateCritic,
)
from common.models import resolve_model
from common.run_files import SharedDirectory
from common.service import Assignment, LeaseFailed, ReplicaError
from common.token_cache import Geometry, TokenCache, prompt_key
from common.tokenizer import load_tokenizer
from services.reward.service import RewardService
from tests.no_weights import NoWeights

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = ROOT / "tests" / "functions"
GOOD, BAD = FUNCTIONS / "well_behaved.py", FUNCTIONS / "misbehaving.py"
GONE_WITHIN_S = 5.0


class NoOutbox:
    """The reward service reports nothing while it works."""

    def samples_finished(self, work: int, samples: list[FinishedSample]) -> None:
        raise AssertionError("not the reward service's to report")

    def update_begun(self, version: int) -> None:
        raise AssertionError("not the reward service's to report")

    def update_committed(self, work: int, manifest: Manifest) -> None:
        raise AssertionError("not the reward service's to report")

    def state_saved(self, step: int, nbytes: int, seconds: float, error: str = "", digest: str = "") -> None:
        raise AssertionError("a reward service has no state")

    def weights_proved(self, proof: Proof) -> None:
        raise AssertionError("not the reward service's to report")


class Run:
    """A token cache with the tiny model's tokenizer, as the coordinator makes it, and services attached to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = load_tokenizer(resolve_model("tiny"))
        self.cache = TokenCache.create(
            directory / "tokens",
            run="rewards",
            fingerprint=self.tokenizer.fingerprint,
            geometry=Geometry(slots=8, max_prompt_tokens=16, max_response_tokens=16, prompts=8),
            writes=frozenset({"response_ids"}),
        )
        self.services: list[RewardService] = []

    def service(self, **reward: object) -> RewardService:
        config = Config(model=ModelConfig(path="tiny"), reward=msgspec.convert(reward, RewardConfig))
        service = RewardService(
            Assignment(
                run="rewards",
                role="reward",
                replica=0,
                config=config,
                shared=SharedDirectory(self.directory),
                cache_path=str(self.directory / "tokens"),
                run_directory=str(self.directory),
                weights=NoWeights(),
            )
        )
        self.services.append(service)
        service.ready()
        return service

    def item(self, prompt: str, response: str, truth: object, ends: bool = True, metadata: object = None) -> ScoreItem:
        key = prompt_key(prompt, "", self.tokenizer.fingerprint)
        self.cache.put_prompt(key, self.tokenizer.encode(prompt))
        ref = self.cache.allocate(key)
        ids = [*self.tokenizer.encode(response), *(sorted(self.tokenizer.eos_ids)[:1] if ends else [])]
        column = self.cache.column("response_ids", ref)
        column[:] = self.tokenizer.encode("9")[-1]  # what lies behind the response must not be read
        column[: len(ids)] = ids
        self.cache.set_scalars(ref, response_length=len(ids))
        truth_json, metadata_json = (msgspec.json.encode(value) for value in (truth, metadata))
        return ScoreItem(ref=ref, prompt=prompt, ground_truth=truth_json, metadata=metadata_json, source="sums")

    def close(self) -> None:
        for service in self.services:
            service.close()
        self.cache.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def lease(items: list[ScoreItem], deadline_s: float = 30.0) -> Lease:
    task = ScoreBatch(items=items)
    return Lease(epoch=1, work=1, step=1, phase="SCORE", deadline_s=deadline_s, task=task)


def test_service_scores_what_lies_in_the_cache(run: Run) -> None:
    service = run.service(functions=[{"function": "exact_match"}, {"function": "digits", "weight": 0.5}])
    items = [
        run.item("17-16=", "1", "1"),
        run.item("88-60=", "38", "28", ends=False),
        run.item("1+1=", "", "2"),
        run.item("2+2=", "4", None),
    ]
    result = service.handle(lease(items), NoOutbox())
    assert isinstance(result, Scores)
    assert [score.ref for score in result.scores] == [item.ref for item in items]
    numbers = [(score.reward, score.accuracy) for score in result.scores]
    assert numbers == [(1.5, 1.0), (0.25, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert [bool(score.error) for score in result.scores] == [False, False, False, True]
    slot = items[3].ref.slot
    assert result.scores[3].error.endswith(f"(slot {slot}, prompt '2+2=', response '4')")
    assert "exact_match raised ValueError" in result.scores[3].error
    assert "digits raised ValueError" in result.scores[3].error


def test_service_hands_on_the_whole_row(run: Run) -> None:
    item = run.item("3+4=", "7", {"n": [7, None]}, metadata={"level": 2})
    for function in ("sees", "compute_score"):
        result = run.service(function=f"{GOOD}:{function}").handle(lease([item]), NoOutbox())
        assert [(score.reward, score.error) for score in result.scores] == [(1.0, "")]


def test_service_refuses_what_it_cannot_do(run: Run) -> None:
    service = run.service(function="exact_match")
    item = run.item("17-16=", "1", "1")
    run.cache.free(item.ref)
    with pytest.raises(LeaseFailed) as stale:
        service.handle(lease([item]), NoOutbox())
    assert stale.value.kind == "stale"
    assert f"slot {item.ref.slot}" in str(stale.value)
    other = Lease(epoch=1, work=2, step=1, phase="UPDATE", deadline_s=1, task=UpdateCritic(refs=[SlotRef(0, 1)]))
    with pytest.raises(LeaseFailed, match="leased a UpdateCritic"):
        service.handle(other, NoOutbox())
    with pytest.raises(LeaseFailed, match="no policy"):
        service.apply_weights(Manifest(name="policy", version=3, path="", identity="", gpu="", nbytes=0, tensors=()))


def test_service_does_not_start_without_its_function(run: Run) -> None:
    with pytest.raises(ReplicaError, match=r"^reward\.function: no such file: .*/absent\.py"):
        run.service(function=str(run.directory / "absent.py") + ":score")


def test_service_says_in_its_log_what_was_not_scored(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    service = run.service(function=f"{BAD}:none_at_all")
    with caplog.at_level(logging.WARNING, logger="reward"):
        service.handle(lease([run.item("17-16=", "1", "1")]), NoOutbox())
    assert "1 of 1 samples not scored; misbehaving.py:none_at_all returned None" in caplog.text


IN_A_PROCESS = """
import os, sys
from pathlib import Path
from tests.process.test_reward_service import NoOutbox, Run, lease
run = Run(Path(sys.argv[1]))
service = run.service(function="exact_match")
score = service.handle(lease([run.item("17-16=", "1", "1")]), NoOutbox()).scores[0]
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
hanging = run.service(function="tests/functions/misbehaving.py:score", timeout_s=60.0)
print(score.reward, heavy, flush=True)
hanging.handle(lease([run.item("1+1=", "announce", "2")], deadline_s=60.0), NoOutbox())
"""


@pytest.fixture
def service_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_PROCESS, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def test_a_hanging_child_dies_with_a_killed_service(service_process: subprocess.Popen[str]) -> None:
    assert service_process.stderr is not None
    announced = next(line for line in service_process.stderr if line.startswith("hanging "))
    pidfd = os.pidfd_open(int(announced.split()[1]))
    assert not select.select([pidfd], [], [], 0)[0]
    service_process.kill()
    with open(pidfd):
        assert select.select([pidfd], [], [], GONE_WITHIN_S)[0], "the child lives on"


def test_a_service_that_scores_has_loaded_neither_torch_nor_transformers(
    service_process: subprocess.Popen[str],
) -> None:
    assert service_process.stdout is not None
    assert service_process.stdout.readline() == "1.0 []\n"


def test_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.reward", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "usage: python -m services.reward" in done.stdout
    assert "--replica" in done.stdout
