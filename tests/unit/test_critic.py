"""The critic service by itself: first values, and learning a known value function."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import Config, CriticConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig
from common.messages import (
    Evaluate,
    Evaluated,
    FinishedSample,
    Lease,
    Logprobs,
    Manifest,
    Proof,
    SlotRef,
    UpdateCritic,
    Updated,
)
from common.models import resolve_model
from common.run_files import SharedDirectory
from common.service import Assignment, LeaseFailed
from common.token_cache import TokenCache
from common.tokenizer import load_tokenizer
from services.critic.service import CriticService
from tests.no_weights import NoWeights
from tests.unit.model_support import put_column, put_sample, random_ids, token_cache

SAMPLES = 12


class NoOutbox:
    """The critic reports nothing while it works."""

    def samples_finished(self, work: int, samples: list[FinishedSample]) -> None:
        raise AssertionError("the critic finishes no samples")

    def update_begun(self, version: int) -> None:
        raise AssertionError("the critic publishes no weights")

    def update_committed(self, work: int, manifest: Manifest) -> None:
        raise AssertionError("the critic publishes no weights")

    def state_saved(self, step: int, nbytes: int, seconds: float, error: str = "", digest: str = "") -> None:
        raise AssertionError("no state is saved here")

    def weights_proved(self, proof: Proof) -> None:
        raise AssertionError("the critic publishes no weights")


@pytest.fixture(autouse=True)
def deterministic_algorithms_off_again() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def cache() -> Iterator[TokenCache]:
    with token_cache(max_response=8, fingerprint=load_tokenizer(resolve_model("tiny")).fingerprint) as cache:
        yield cache


@pytest.fixture
def refs(cache: TokenCache) -> list[SlotRef]:
    """Responses of digits; the value of a state is decided by the last token before it and the prompt's first."""
    return [put_sample(cache, random_ids(i, 1 + i % 4), random_ids(40 + i, 1 + (3 * i) % 8)) for i in range(SAMPLES)]


def service(cache: TokenCache, **critic: object) -> CriticService:
    config = Config(
        run=RunConfig(name="demo", steps=100),
        model=ModelConfig(path="tiny"),
        rollout=RolloutConfig(max_new_tokens=8),
        critic=CriticConfig(device="cpu", **critic),  # type: ignore[arg-type]
    )
    return CriticService(
        Assignment(
            run="demo",
            role="critic",
            replica=0,
            config=config,
            shared=SharedDirectory(cache.path.parent),
            cache_path=str(cache.path),
            run_directory=str(Path(cache.path.parent, "run")),
            weights=NoWeights(),
        )
    )


def lease(task: Evaluate | UpdateCritic | Logprobs, step: int = 1) -> Lease:
    return Lease(epoch=1, work=1, step=step, phase="EVALUATE", deadline_s=10.0, task=task)


def targets(cache: TokenCache, ref: SlotRef) -> list[float]:
    """A value function of what the critic sees before each token: the parity of the token just before."""
    seen = [*cache.prompt_ids(ref).tolist(), *cache.response("response_ids", ref).tolist()]
    first = len(cache.prompt_ids(ref))
    return [float(seen[first + t - 1] % 2) for t in range(len(seen) - first)]


def test_first_values_are_zero(cache: TokenCache, refs: list[SlotRef]) -> None:
    critic = service(cache)
    for ref in refs:
        put_column(cache, "values", ref, [7.0] * 8)
        put_column(cache, "bootstrap_value", ref, [7.0])
    result = critic.handle(lease(Evaluate(refs=refs)), NoOutbox())
    assert result == Evaluated(
        tokens=sum(len(cache.prompt_ids(ref)) + cache.scalars(ref).response_length for ref in refs)
    )
    for ref in refs:
        length = cache.scalars(ref).response_length
        assert cache.column("values", ref).tolist() == [0.0] * length + [7.0] * (8 - length)
        assert cache.column("bootstrap_value", ref).tolist() == [0.0]
    critic.close()


def test_it_learns_a_known_value_function(cache: TokenCache, refs: list[SlotRef]) -> None:
    """The wrong position, state, mask or target would leave the error at the variance of the targets, a quarter."""
    critic = service(
        cache, micro_batch=5, value_clip=0.0, optimizer=OptimizerConfig(learning_rate=2e-3, max_grad_norm=1.0)
    )
    for ref in refs:
        put_column(cache, "returns", ref, targets(cache, ref))
    errors: list[float] = []
    for step in range(1, 41):
        result = critic.handle(lease(UpdateCritic(refs=refs), step), NoOutbox())
        assert isinstance(result, Updated)
        errors.append(result.metrics["squared_error"])
    assert errors[0] == pytest.approx(np.mean(np.concatenate([targets(cache, ref) for ref in refs])), abs=1e-6)
    assert errors[-1] < 0.02
    critic.handle(lease(Evaluate(refs=refs)), NoOutbox())
    for ref in refs:
        assert cache.response("values", ref) == pytest.approx(np.array(targets(cache, ref)), abs=0.4)
    critic.close()


def test_what_is_outside_the_mask_teaches_nothing(cache: TokenCache, refs: list[SlotRef]) -> None:
    critic = service(cache, value_clip=0.0, optimizer=OptimizerConfig(learning_rate=1e-3))
    for ref in refs:
        put_column(cache, "returns", ref, [math.nan] * 8)
        cache.column("response_mask", ref)[:] = 0
    before = [parameter.detach().clone() for parameter in critic.model.parameters()]
    result = critic.handle(lease(UpdateCritic(refs=refs)), NoOutbox())
    assert isinstance(result, Updated)
    assert result.metrics["value_loss"] == 0.0
    assert all(torch.equal(old, new) for old, new in zip(before, critic.model.parameters(), strict=True))
    critic.close()


def test_value_clip_is_around_the_values_in_the_cache(cache: TokenCache, refs: list[SlotRef]) -> None:
    """Predictions and returns of 0, old values of 1: the clipped prediction 0.8 is the worse one and counts."""
    critic = service(cache, value_clip=0.2)
    for ref in refs:
        put_column(cache, "values", ref, [1.0] * 8)
        put_column(cache, "returns", ref, [0.0] * 8)
    result = critic.handle(lease(UpdateCritic(refs=refs)), NoOutbox())
    assert isinstance(result, Updated)
    assert result.metrics["value_loss"] == pytest.approx(0.5 * 0.8**2, abs=1e-6)
    assert result.metrics["clip_fraction"] == pytest.approx(1.0)
    critic.close()


def test_bootstrap_value_is_of_the_state_after_the_last_token(cache: TokenCache, refs: list[SlotRef]) -> None:
    """What a sample that goes on has as its value before the next token."""
    critic = service(cache)
    torch.nn.init.normal_(critic.model.head.weight, generator=torch.Generator().manual_seed(3))
    longer = put_sample(cache, [5, 6], [7, 8, 9, 10])
    for length in (1, 2, 3):
        shorter = put_sample(cache, [5, 6], [7, 8, 9][:length])
        critic.handle(lease(Evaluate(refs=[shorter, longer])), NoOutbox())
        assert float(cache.column("bootstrap_value", shorter)[0]) == pytest.approx(
            float(cache.column("values", longer)[length]), abs=1e-5
        )
    critic.close()


def test_the_same_seed_gives_the_same_critic(cache: TokenCache, refs: list[SlotRef]) -> None:
    for ref in refs:
        put_column(cache, "returns", ref, targets(cache, ref))
    found: list[bytes] = []
    for _ in range(2):
        critic = service(cache, micro_batch=5, value_clip=0.0, optimizer=OptimizerConfig(learning_rate=1e-3))
        for step in (1, 2):
            critic.handle(lease(UpdateCritic(refs=refs), step), NoOutbox())
        critic.handle(lease(Evaluate(refs=refs)), NoOutbox())
        found.append(b"".join(cache.response("values", ref).tobytes() for ref in refs))
        critic.close()
    assert found[0] == found[1]


def test_other_tasks_are_refused(cache: TokenCache, refs: list[SlotRef]) -> None:
    critic = service(cache)
    with pytest.raises(LeaseFailed, match="critic cannot carry out Logprobs"):
        critic.handle(lease(Logprobs(refs=refs, reference=True)), NoOutbox())
    critic.close()
