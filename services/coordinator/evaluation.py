"""Accuracy on rows that training never sees, through the same services, slots and scorers as training."""

from __future__ import annotations

from common.config import Config
from common.config_values import evaluation_wave
from common.messages import Sampling
from common.token_cache import TokenCache
from services.coordinator.journal import Journal
from services.coordinator.prompts import PromptStream
from services.coordinator.sample import Sample, close_samples, open_samples
from services.coordinator.step import StepRunner


class Evaluator:
    """Runs the evaluation's rows through generation and scoring, as many at a time as the cache has room for."""

    def __init__(
        self, config: Config, cache: TokenCache, journal: Journal, prompts: PromptStream, runner: StepRunner
    ) -> None:
        self.config = config
        self.cache = cache
        self.journal = journal
        self.prompts = prompts
        self.runner = runner

    def due(self, step: int) -> bool:
        """Before the first step, after the last, and every ``eval.every`` steps between."""
        every = self.config.eval.every
        return self.prompts.rows > 0 and (step in (0, self.config.run.steps) or (every > 0 and step % every == 0))

    async def run(self, step: int) -> list[Sample]:
        """Returns the evaluated samples; their slots are free again. Raises RunFailed where the first time none could
        be scored."""
        self.runner.phase = "EVALUATION"
        self.prompts.seek(0, 0)
        evaluated: list[Sample] = []
        wave = 1
        while prompts := self.prompts.next_batch(self._wave_size(step, wave)):
            samples = open_samples(self.cache, self.journal, prompts, 1, step, wave, first=len(evaluated))
            await self.runner.collect(step, samples, evaluation_sampling(self.config))
            self.journal.closed(step, wave)
            close_samples(self.cache, samples)
            evaluated += samples
            wave += 1
        self.runner.unscored.check_evaluation(step, evaluated)
        return evaluated

    def _wave_size(self, step: int, wave: int) -> int:
        """As many as an earlier coordinator opened, or as there is room for beside the next step's samples."""
        opened = len(self.journal.recall(step, wave))
        return opened or max(1, min(evaluation_wave(self.config), self.cache.free_slots))


def evaluation_sampling(config: Config) -> Sampling:
    """How an evaluation draws tokens: as training does, but greedily or with the cuts that ``eval`` asks for."""
    rollout, how = config.rollout, config.eval
    return Sampling(
        temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens, greedy=how.greedy, top_k=how.top_k,
        top_p=how.top_p, seed=config.run.seed,
    )  # fmt: skip
