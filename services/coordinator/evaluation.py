"""Accuracy on rows that training never sees, through the same services, slots and scorers as training."""

from __future__ import annotations

from common.config import Config
from common.messages import Sampling
from common.token_cache import TokenCache
from services.coordinator.prompts import PromptStream
from services.coordinator.sample import Sample, close_samples, open_samples
from services.coordinator.step import StepRunner


class Evaluator:
    """Runs the evaluation's rows through generation and scoring, as many at a time as the cache has slots."""

    def __init__(self, config: Config, cache: TokenCache, prompts: PromptStream, runner: StepRunner) -> None:
        self.config = config
        self.cache = cache
        self.prompts = prompts
        self.runner = runner

    def due(self, step: int) -> bool:
        """Before the first step, after the last, and every ``eval.every`` steps between."""
        every = self.config.eval.every
        return self.prompts.rows > 0 and (step in (0, self.config.run.steps) or (every > 0 and step % every == 0))

    async def run(self, step: int) -> list[Sample]:
        """Returns the evaluated samples; their slots are free again."""
        self.runner.phase = "EVALUATION"
        self.prompts.seek(0, 0)
        evaluated: list[Sample] = []
        while prompts := self.prompts.next_batch(max(1, self.cache.free_slots)):
            samples = open_samples(self.cache, prompts, 1, step)
            for offset, sample in enumerate(samples):
                sample.index = sample.group = len(evaluated) + offset
            collection = self.runner.collection(step, samples)
            await collection.collect(evaluation_sampling(self.config), self.runner.publisher.version)
            close_samples(self.cache, samples)
            evaluated += samples
        return evaluated


def evaluation_sampling(config: Config) -> Sampling:
    """How an evaluation draws tokens: as training does, but greedily or with the cuts that ``eval`` asks for."""
    rollout, how = config.rollout, config.eval
    return Sampling(
        temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens, greedy=how.greedy, top_k=how.top_k,
        top_p=how.top_p, seed=config.run.seed,
    )  # fmt: skip
