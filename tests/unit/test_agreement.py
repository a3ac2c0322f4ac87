"""Trainer and engine: what their difference is, when it is told, and when it ends the run; and who sleeps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec import Raw

from common import config_values
from common.config import Config, CriticConfig, ModelConfig, PPOConfig, RolloutConfig, TrainerConfig
from common.config_checks import check_config
from common.config_loading import ConfigError, load_config
from common.config_values import difference_bounds, gpu_present, sleeps
from common.messages import FinishedSample, Score
from common.token_cache import TokenCache
from services.coordinator.agreement import WARN_EVERY, Agreement, judge, worst_sample
from services.coordinator.batch_advantages import BatchStatistics, write_advantages
from services.coordinator.failures import RunFailed
from services.coordinator.prompts import Prompt
from services.coordinator.row import Row
from services.coordinator.sample import Sample
from tests.unit.model_support import put_column, put_sample, token_cache


@pytest.fixture
def cache() -> Iterator[TokenCache]:
    with token_cache(max_response=6) as cache:
        yield cache


def put(cache: TokenCache, index: int, trainer: Sequence[float], engine: Sequence[float], *masked: int) -> Sample:
    """A finished sample with the logprobs of both; ``masked`` are places that do not count."""
    ref = put_sample(cache, [3, 4], list(range(5, 5 + len(trainer))))
    for place in masked:
        cache.column("response_mask", ref)[place] = 0
    put_column(cache, "logprobs", ref, trainer)
    put_column(cache, "behaviour_logprobs", ref, engine)
    row = Row(prompt="", ground_truth=Raw(b"null"), metadata=Raw(b"null"), source="", origin="rows.jsonl:1")
    return Sample(
        index=index,
        group=index,
        prompt=Prompt(index=0, text="", key=b"", length=2, ids=None, row=row),
        ref=ref,
        finished=FinishedSample(ref=ref, length=len(trainer), finish_reason="stop", version_low=1, version_high=1),
        score=Score(ref=ref, reward=0.0, accuracy=0.0),
    )


def statistics(cache: TokenCache, samples: Sequence[Sample]) -> BatchStatistics:
    ppo = PPOConfig(whiten=False, kl=PPOConfig().kl)
    return write_advantages(cache, samples, ppo, 0.0)


def bounded(warn: float, stop: float) -> Agreement:
    return Agreement(Config(rollout=RolloutConfig(warn_difference=warn, stop_difference=stop)))


# ---------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (0.0, "agree"), (0.1, "agree"), (0.1000001, "warn"), (0.5, "warn"), (0.5000001, "stop"), (math.inf, "stop"),
        (math.nan, "stop"),
    ],
)  # fmt: skip
def test_a_difference_is_judged_by_two_bounds(difference: float, verdict: str) -> None:
    assert judge(difference, 0.1, 0.5) == verdict


def test_no_number_stops_whatever_the_bounds() -> None:
    assert judge(math.nan, math.inf, math.inf) == "stop"


@pytest.mark.parametrize(
    ("dtype", "warn", "stop", "expected"),
    [
        ("float32", 0.0, 0.0, (1e-3, 1e-2)),
        ("bfloat16", 0.0, 0.0, (0.05, 0.5)),
        ("bfloat16", 0.2, 0.0, (0.2, 2.0)),
        ("float32", 0.0, 0.5, (1e-3, 0.5)),
        ("float32", 0.1, 0.2, (0.1, 0.2)),
    ],
)
def test_bounds_follow_from_the_dtype(dtype: Any, warn: float, stop: float, expected: tuple[float, float]) -> None:
    rollout = RolloutConfig(warn_difference=warn, stop_difference=stop)
    assert difference_bounds(Config(model=ModelConfig(dtype=dtype), rollout=rollout)) == pytest.approx(expected)


def test_a_run_cannot_end_before_it_warns() -> None:
    overrides = ["rollout.warn_difference=0.2", "rollout.stop_difference=0.1"]
    with pytest.raises(ConfigError, match=r"rollout.stop_difference: expected 0 or at least .* = 0.2, .* found 0.1"):
        check_config(load_config("tiny", overrides))
    check_config(load_config("tiny", [overrides[0], "rollout.stop_difference=0.2"]))
    check_config(load_config("tiny", [overrides[0]]))


@pytest.mark.parametrize(("dtype", "warn"), [("float32", "0.001"), ("bfloat16", "0.05")])
def test_a_bound_below_the_warning_that_follows_from_the_dtype_is_refused(dtype: str, warn: str) -> None:
    """Also where only the second bound is given."""
    overrides = [f"model.dtype={dtype}", "rollout.stop_difference=0.0001"]
    expected = rf"at least rollout.warn_difference = {warn} \(0 with model.dtype = '{dtype}'\), .* found 0.0001"
    with pytest.raises(ConfigError, match=expected):
        check_config(load_config("tiny", overrides))
    check_config(load_config("tiny", [overrides[0], f"rollout.stop_difference={warn}"]))


# ---------------------------------------------------------------- the figures


def test_kl_of_engine_and_trainer_is_k3_over_masked_tokens(cache: TokenCache) -> None:
    samples = [put(cache, 0, [-1.0, -2.0], [-1.5, -2.0]), put(cache, 1, [-1.0, 7.0, -1.0], [-1.0, -7.0, -0.75], 1)]
    expected = (math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 4
    assert statistics(cache, samples).engine_kl == pytest.approx(expected, abs=1e-7)


def test_the_worst_sample_is_the_one_with_the_largest_mean(cache: TokenCache) -> None:
    samples = [
        put(cache, 0, [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.75]),
        put(cache, 1, [-1.0, 9.0], [-1.5, -9.0], 1),
        put(cache, 2, [-1.0], [-1.25]),
        put(cache, 3, [-1.0], [99.0], 0),
    ]
    worst, difference = worst_sample(cache, samples)
    assert (worst.index, difference) == (1, 0.5)
    broken = put(cache, 4, [math.nan, -1.0], [-1.0, -1.0])
    worst, difference = worst_sample(cache, [*samples, broken])
    assert worst is broken
    assert math.isnan(difference)


# ---------------------------------------------------------------- what follows


def test_too_large_a_difference_ends_the_run_and_says_where(cache: TokenCache) -> None:
    samples = [put(cache, 10, [-1.0, -1.0], [-1.0, -1.0]), put(cache, 11, [-1.0, -2.0], [-2.0, -2.0])]
    with pytest.raises(RunFailed) as caught:
        bounded(0.01, 0.2).check(7, statistics(cache, samples), cache, samples)
    assert str(caught.value).startswith(
        "step 7: the logprobs of engine and trainer differ by 0.25 nats in the mean over 4 tokens, at most 1; allowed "
        f"0.2 (rollout.stop_difference). Worst: sample 11 in slot {samples[1].ref.slot}, 0.5 in the mean."
    )
    for word in ("rollout.temperature", "model.dtype", "model.attention", "weights"):
        assert word in str(caught.value)


def test_a_logprob_that_is_no_number_ends_the_run(cache: TokenCache) -> None:
    samples = [put(cache, 0, [-1.0], [-1.0]), put(cache, 1, [-1.0], [math.nan])]
    with pytest.raises(RunFailed, match=r"differ by nan nats .* Worst: sample 1 in slot"):
        bounded(1e6, 1e7).check(1, statistics(cache, samples), cache, samples)


def test_a_warning_names_both_bounds_and_does_not_come_every_step(
    cache: TokenCache, caplog: pytest.LogCaptureFixture
) -> None:
    agreement, odd = bounded(0.1, 5.0), [put(cache, 0, [-1.0, -1.0], [-1.0, -1.5])]
    fine = [put(cache, 1, [-1.0], [-1.0625])]
    with caplog.at_level(logging.WARNING):
        agreement.check(1, statistics(cache, fine), cache, fine)
        assert caplog.messages == []
        for step in range(2, 3 + WARN_EVERY):
            agreement.check(step, statistics(cache, odd), cache, odd)
    first, second = caplog.messages
    assert first.startswith("step 2: the logprobs of engine and trainer differ by 0.25 nats in the mean over 2 tokens,")
    assert "at most 0.5; expected at most 0.1 (rollout.warn_difference), the run ends above 5 " in first
    assert "check that both use rollout.temperature" in first
    assert second.startswith(f"step {2 + WARN_EVERY}: ")


def test_a_step_without_samples_has_nothing_to_judge(cache: TokenCache) -> None:
    bounded(1e-9, 1e-9).check(1, statistics(cache, []), cache, [])


# ---------------------------------------------------------------- who sleeps


def sharing(rollout: str, trainer: str, critic: str = "cpu", **more: Any) -> Config:
    plain: dict[str, Any] = {"engine": "vllm", "device": rollout}
    return Config(
        rollout=RolloutConfig(**(plain | more)),
        trainer=TrainerConfig(device=trainer),
        critic=CriticConfig(device=critic),
    )


@pytest.mark.parametrize(
    ("rollout", "trainer", "critic", "with_gpu", "without"),
    [
        ("auto", "auto", "auto", True, False),
        ("auto", "cuda", "cpu", True, False),
        ("cuda", "cuda:0", "cpu", True, True),
        ("cuda:0", "auto", "cpu", True, False),
        ("cuda:1", "auto", "cuda", False, False),
        ("cuda:1", "cuda:0", "cuda:1", True, True),
        ("cpu", "cpu", "cpu", False, False),
        ("cpu", "auto", "auto", False, False),
        ("auto", "cpu", "cpu", False, False),
        ("GPU-1", "GPU-1", "cpu", True, True),
        ("GPU-1", "GPU-2", "cpu", False, False),
    ],
)
def test_an_engine_sleeps_where_it_shares_a_gpu(
    rollout: str, trainer: str, critic: str, with_gpu: bool, without: bool
) -> None:
    config = sharing(rollout, trainer, critic)
    assert (sleeps(config, True), sleeps(config, False)) == (with_gpu, without)


def test_what_is_asked_for_is_not_decided() -> None:
    assert sleeps(sharing("cpu", "cpu", sleep="always", engine="torch"), False)
    assert not sleeps(sharing("cuda", "cuda", sleep="never"), True)


def test_only_vllm_gives_its_cache_back_and_an_absent_critic_shares_nothing() -> None:
    assert not sleeps(sharing("cuda", "cuda", engine="torch"), True)
    config = sharing("cuda:1", "cuda:0", "cuda:1")
    without = Config(
        rollout=config.rollout, trainer=config.trainer, critic=config.critic, ppo=PPOConfig(advantage="rloo")
    )
    assert not sleeps(without, True)


def test_a_gpu_is_seen_by_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(config_values, "_GPU_DRIVER", str(tmp_path / "nvidiactl"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = sharing("auto", "auto")
    assert (gpu_present(), sleeps(config)) == (False, False)
    (tmp_path / "nvidiactl").touch()
    assert (gpu_present(), sleeps(config)) == (True, True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (gpu_present(), sleeps(config)) == (False, False)
