"""How an evaluation draws its tokens."""

from __future__ import annotations

from common.config import Config, EvalConfig, RolloutConfig, RunConfig
from common.messages import Sampling
from services.coordinator.evaluation import evaluation_sampling


def test_evaluation_is_greedy_unless_told_otherwise() -> None:
    config = Config(run=RunConfig(seed=5), rollout=RolloutConfig(temperature=0.7, max_new_tokens=9))
    assert evaluation_sampling(config) == Sampling(temperature=0.7, max_new_tokens=9, greedy=True, seed=5)


def test_the_cuts_of_eval_reach_the_engine() -> None:
    config = Config(eval=EvalConfig(greedy=False, top_k=7, top_p=0.9))
    assert evaluation_sampling(config) == Sampling(
        temperature=1.0, max_new_tokens=16, greedy=False, top_k=7, top_p=0.9, seed=1
    )
