"""Updates of policy and critic: however a batch is cut into micro-batches, the result is the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.batch import Batch, read_batch, response_logits, write_columns
from common.config import (
    Aggregation,
    Config,
    CriticConfig,
    KLConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from common.learner import Learner
from common.messages import SlotRef
from common.micro_batches import consecutive
from common.model import load_causal_lm, token_logprobs
from common.token_cache import TokenCache
from common.update_metrics import UpdateMetrics
from services.critic.update import CriticUpdate
from services.critic.value_model import ValueModel
from services.trainer.update import PolicyUpdate
from tests.unit.model_support import CPU, PAD, put_column, put_sample, random_ids, token_cache

BIG_EPS = 1.0
"""With this eps and gradients far below it, AdamW's first step is the learning rate times the gradient itself: a wrong
factor of the gradient shows, which the usual eps would hide."""


def optimizer(**fields: Any) -> OptimizerConfig:
    plain: dict[str, Any] = {"learning_rate": 1.0, "max_grad_norm": 0.0}
    return OptimizerConfig(**(plain | fields))


def test_consecutive_pieces() -> None:
    assert [list(part) for part in consecutive(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [list(part) for part in consecutive(range(7), 0)] == [list(range(7))]
    assert [list(part) for part in consecutive(range(2), 9)] == [[0, 1]]
    assert list(consecutive([], 0)) == list(consecutive([], 3)) == []


@pytest.fixture
def samples() -> Iterator[tuple[TokenCache, list[SlotRef]]]:
    """Eleven samples of uneven lengths with all that an update reads; one has a gap, one is masked out entirely."""
    generator = np.random.default_rng(0)
    with token_cache() as cache:
        refs: list[SlotRef] = []
        for i in range(11):
            length = 1 + (5 * i) % 12
            refs.append(put_sample(cache, random_ids(i, 1 + (3 * i) % 9), random_ids(90 + i, length)))
            for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns"):
                scale = 0.3 if name != "advantages" else 1.0
                offset = -3.0 if "logprobs" in name else 0.0
                put_column(cache, name, refs[-1], offset + scale * generator.standard_normal(length))
        cache.column("response_mask", refs[4])[2:5] = 0
        cache.column("response_mask", refs[6])[:] = 0
        yield cache, refs


def policy_update(cache: TokenCache, refs: Sequence[SlotRef], config: Config) -> tuple[nn.Module, dict[str, float]]:
    model = load_causal_lm(config.model, CPU)
    update = PolicyUpdate(config, model, Learner(model, config.trainer.optimizer, 1), cache, PAD)
    return model, update.run(refs, 1, 0.1)[0]


def critic_update(cache: TokenCache, refs: Sequence[SlotRef], config: Config) -> tuple[nn.Module, dict[str, float]]:
    model = ValueModel(config.model, CPU)
    nn.init.constant_(model.head.weight, 0.02)  # with a head of zeros the backbone would get no gradient
    update = CriticUpdate(config, model, Learner(model, config.critic.optimizer, 1), cache, PAD)
    return model, update.run(refs, 1)[0]


Update = Callable[[TokenCache, Sequence[SlotRef], Config], tuple[nn.Module, dict[str, float]]]


@pytest.mark.parametrize("update", [policy_update, critic_update])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_do_not_change_the_update(
    samples: tuple[TokenCache, list[SlotRef]], update: Update, aggregation: Aggregation
) -> None:
    def run(micro_batch: int) -> tuple[torch.Tensor, dict[str, float]]:
        config = Config(
            model=ModelConfig(path="tiny"),
            rollout=RolloutConfig(max_new_tokens=12),
            ppo=PPOConfig(aggregation=aggregation, entropy=0.01, kl=KLConfig(placement="loss", estimator="k3")),
            trainer=TrainerConfig(micro_batch=micro_batch, optimizer=optimizer(eps=BIG_EPS)),
            critic=CriticConfig(micro_batch=micro_batch, aggregation=aggregation, optimizer=optimizer(eps=BIG_EPS)),
        )
        model, metrics = update(*samples, config)
        return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()]), metrics

    start = update(samples[0], [], Config(model=ModelConfig(path="tiny")))[0]
    before = torch.cat([parameter.detach().flatten().double() for parameter in start.parameters()])
    whole, metrics = run(11)
    step = (whole - before).norm()
    assert step > 1e-3, "nothing was learnt: nothing is tested"
    for micro_batch in (1, 3, 7):
        parameters, same = run(micro_batch)
        assert float((parameters - whole).norm() / whole.norm()) < 1e-6
        assert float((parameters - whole).norm() / step) < 1e-4
        assert same == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_mini_batches_are_steps_of_their_own(samples: tuple[TokenCache, list[SlotRef]]) -> None:
    """Two epochs of three mini-batches are six optimizer steps, and metrics are means over them."""
    cache, refs = samples
    found: list[dict[str, float]] = []
    for epochs in (1, 2):
        config = Config(
            model=ModelConfig(path="tiny"),
            rollout=RolloutConfig(max_new_tokens=12),
            trainer=TrainerConfig(micro_batch=2, mini_batch=4, epochs=epochs, optimizer=optimizer(learning_rate=1e-30)),
        )
        model = load_causal_lm(config.model, CPU)
        learner = Learner(model, config.trainer.optimizer, 1)
        metrics, tokens = PolicyUpdate(config, model, learner, cache, PAD).run(refs, 1, 0.0)
        assert {int(state["step"]) for state in learner.optimizer.state.values()} == {3 * epochs}
        assert tokens == epochs * sum(len(cache.prompt_ids(ref)) + cache.scalars(ref).response_length for ref in refs)
        assert metrics["learning_rate"] == 1e-30
        found.append(metrics)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[0]["grad_norm"] > 0
    assert found[0]["entropy"] > 0
    assert found[0]["skipped_updates"] == 0


def test_update_metrics_add_within_and_average_over_mini_batches() -> None:
    metrics = UpdateMetrics()
    for shares in ((1.0, 2.0), (5.0,)):
        for share in shares:
            metrics.add(loss=torch.tensor(share))
            metrics.keep_max(ratio_max=share)
        metrics.end_mini_batch()
    assert metrics.result() == {"loss": 4.0, "ratio_max": 5.0}
    assert UpdateMetrics().result() == {}


def test_skipped_updates_are_counted_in_the_metrics(samples: tuple[TokenCache, list[SlotRef]]) -> None:
    cache, refs = samples
    cache.column("advantages", refs[0])[0] = math.nan
    config = Config(
        model=ModelConfig(path="tiny"), trainer=TrainerConfig(mini_batch=6), rollout=RolloutConfig(max_new_tokens=12)
    )
    _, metrics = policy_update(cache, refs, config)
    assert metrics["skipped_updates"] == 0.5


def test_good_responses_become_likelier_and_bad_ones_less_likely() -> None:
    config = Config(
        model=ModelConfig(path="tiny"),
        rollout=RolloutConfig(max_new_tokens=12, temperature=0.8),
        trainer=TrainerConfig(optimizer=optimizer(learning_rate=1e-4, max_grad_norm=1.0)),
    )
    model = load_causal_lm(config.model, CPU)

    def logprobs(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return token_logprobs(response_logits(model, batch), batch.response_ids, 0.8)

    with token_cache() as cache:
        refs = [put_sample(cache, random_ids(i, 5), random_ids(40 + i, 6)) for i in range(4)]
        batch = read_batch(cache, refs, PAD, CPU)
        before = logprobs(batch)
        write_columns(cache, "logprobs", batch, before)
        advantages = torch.tensor([1.0, -1.0, 1.0, -1.0]).unsqueeze(1)
        write_columns(cache, "advantages", batch, advantages.expand(4, 6))
        update = PolicyUpdate(config, model, Learner(model, config.trainer.optimizer, 1), cache, PAD)
        metrics, _ = update.run(refs, 1, 0.0)
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4), (
            "the temperature is not the one of the old logprobs"
        )
        change = (logprobs(batch) - before).sum(1)
    assert (change * advantages[:, 0]).min() > 0.0
