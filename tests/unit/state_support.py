"""Trainer and critic services by themselves, whose states are saved and restored: samples, leases, what is reported."""

from __future__ import annotations

import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import (
    Config,
    CriticConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from common.messages import FinishedSample, Lease, Manifest, Proof, RestoreState, Result, SaveState, SlotRef, Task
from common.models import resolve_model
from common.run_files import SharedDirectory
from common.service import Assignment, LeaseFailed, Service
from common.token_cache import TokenCache
from common.tokenizer import load_tokenizer
from services.critic.service import CriticService
from services.trainer.service import TrainerService
from tests.no_weights import NoWeights
from tests.unit.model_support import put_column, put_sample, random_ids, token_cache

MAX_NEW = 8
SAVE_LIMIT_S = 30.0


class Reports:
    """Implements ``common.service.Outbox``: keeps what a service tells."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.committed: list[Manifest] = []
        self.proofs: list[Proof] = []
        self.saved: list[tuple[int, int, float, str]] = []
        self._told = threading.Condition()

    def samples_finished(self, work: int, samples: list[FinishedSample]) -> None:
        raise AssertionError("neither trainer nor critic finishes samples")

    def update_begun(self, version: int) -> None:
        self.begun.append(version)

    def update_committed(self, work: int, manifest: Manifest) -> None:
        self.committed.append(manifest)

    def weights_proved(self, proof: Proof) -> None:
        self.proofs.append(proof)

    def state_saved(self, step: int, nbytes: int, seconds: float, error: str = "", digest: str = "") -> None:
        with self._told:
            self.saved.append((step, nbytes, seconds, error))
            self._told.notify_all()

    def wait_saved(self, count: int = 1) -> tuple[int, int, float, str]:
        """The last report of a save, when there have been so many."""
        with self._told:
            if not self._told.wait_for(lambda: len(self.saved) >= count, SAVE_LIMIT_S):
                pytest.fail(f"{count} saves expected, {self.saved} reported")
            return self.saved[-1]


class Run:
    """A run's cache and directories, in which services come and go."""

    def __init__(self, cache: TokenCache, folder: Path, config: Config) -> None:
        self.cache = cache
        self.config = config
        self.checkpoints = folder / "checkpoints"
        self.reports = Reports()
        self.refs = [put_sample(cache, random_ids(i, 2 + i), random_ids(40 + i, 3 + i % 4)) for i in range(4)]
        self._work = 0

    def assignment(self, role: Any, config: Config | None = None) -> Assignment:
        return Assignment(
            run="demo", role=role, replica=0, config=config or self.config, weights=NoWeights(),
            shared=SharedDirectory(self.cache.path.parent), cache_path=str(self.cache.path),
            run_directory=str(self.checkpoints.parent),
        )  # fmt: skip

    def trainer(self, config: Config | None = None) -> TrainerService:
        return TrainerService(self.assignment("trainer", config))

    def critic(self, config: Config | None = None) -> CriticService:
        return CriticService(self.assignment("critic", config))

    def fill(self, step: int) -> list[SlotRef]:
        """What an update of this step reads: the same for everyone, another for each step."""
        generator = np.random.default_rng(step)
        for ref in self.refs:
            length = self.cache.scalars(ref).response_length
            for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns"):
                offset = -3.0 if "logprobs" in name else 0.0
                put_column(self.cache, name, ref, offset + generator.standard_normal(length))
        return self.refs

    def give(self, service: Service, step: int, task: Task) -> Result:
        self._work += 1
        lease = Lease(epoch=1, work=self._work, step=step, phase="UPDATE", deadline_s=60.0, task=task)
        return service.handle(lease, self.reports)

    def path(self, step: int) -> str:
        return str(self.checkpoints / f"step-{step}")

    def save(self, service: Service, step: int) -> None:
        """Saves and waits until that is on disk."""
        count = len(self.reports.saved)
        self.give(service, step, SaveState(step=step, path=self.path(step)))
        saved, nbytes, _, error = self.reports.wait_saved(count + 1)
        assert (saved, error) == (step, "")
        assert nbytes > 0

    def restore(self, service: Service, step: int) -> Any:
        return self.give(service, step, RestoreState(step=step, path=self.path(step)))

    def refused(self, service: Service, step: int, task: Task, match: str, kind: str = "error") -> None:
        with pytest.raises(LeaseFailed, match=match) as failed:
            self.give(service, step, task)
        assert failed.value.kind == kind


def config(dtype: Any = "float32", rank: int = 0, **ppo: Any) -> Config:
    """Rates so high that every update changes every weight, also in bfloat16."""
    optimizer = OptimizerConfig(learning_rate=3e-3, weight_decay=0.01, schedule="linear", warmup_steps=2)
    return Config(
        run=RunConfig(name="demo", steps=8, seed=5),
        model=ModelConfig(path="tiny", dtype=dtype, lora=LoRAConfig(rank=rank)),
        rollout=RolloutConfig(max_new_tokens=MAX_NEW),
        ppo=PPOConfig(**ppo),
        trainer=TrainerConfig(device="cpu", micro_batch=3, mini_batch=2, optimizer=optimizer),
        critic=CriticConfig(device="cpu", micro_batch=3, mini_batch=2, optimizer=optimizer),
    )


@contextmanager
def run_of(folder: Path, settings: Config) -> Generator[Run]:
    fingerprint = load_tokenizer(resolve_model("tiny")).fingerprint
    try:
        with token_cache(max_response=MAX_NEW, fingerprint=fingerprint) as cache:
            yield Run(cache, folder, settings)
    finally:
        torch.use_deterministic_algorithms(False)


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Values that compare bit for bit, by name."""
    return {
        name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def same_bits(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


@contextmanager
def small_files() -> Generator[None]:
    """Within, no file of this process can grow beyond 64 KiB: writing ends as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "parameter.a.weight": torch.randn(17, 33, generator=generator),
        "parameter.b.weight": torch.randn(40, 9, generator=generator).bfloat16(),
        "parameter.b.bias": torch.tensor([torch.nan, -0.0, torch.inf]),
        "step.a.weight": torch.tensor(3.0),
        "rng.cpu": torch.get_rng_state(),
    }


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
