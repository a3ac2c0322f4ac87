"""One update of the critic: epochs × mini-batches × micro-batches over the step's samples, in sample order."""

from __future__ import annotations

from collections.abc import Sequence

from common.aggregation import Normalizer
from common.batch import read_batch, read_columns
from common.config import Config
from common.learner import Learner
from common.messages import SlotRef
from common.micro_batches import consecutive
from common.token_cache import TokenCache
from common.update_metrics import UpdateMetrics
from services.critic.objective import value_loss
from services.critic.value_model import ValueModel


class CriticUpdate:
    """Fits the value model to the returns that lie in the cache."""

    def __init__(self, config: Config, model: ValueModel, learner: Learner, cache: TokenCache, pad_id: int) -> None:
        self.config = config
        self.model = model
        self.learner = learner
        self.cache = cache
        self.pad_id = pad_id
        self.device = next(model.parameters()).device

    def run(self, refs: Sequence[SlotRef], step: int) -> tuple[dict[str, float], int]:
        """Returns (metrics over the global batch, tokens computed on)."""
        metrics = UpdateMetrics()
        rate = self.learner.start_step(step)
        tokens = 0
        for _ in range(self.config.critic.epochs):
            for mini_batch in consecutive(refs, self.config.critic.mini_batch):
                tokens += self._mini_batch(mini_batch, metrics)
        return metrics.result() | {"learning_rate": rate}, tokens

    def _mini_batch(self, refs: Sequence[SlotRef], metrics: UpdateMetrics) -> int:
        critic = self.config.critic
        batches = [
            read_batch(self.cache, part, self.pad_id, self.device) for part in consecutive(refs, critic.micro_batch)
        ]
        normalizer = Normalizer.total((batch.response_mask for batch in batches), self.config.rollout.max_new_tokens)
        for batch in batches:
            values, _ = self.model(batch)
            loss = value_loss(
                values, read_columns(self.cache, "values", batch), read_columns(self.cache, "returns", batch),
                batch.response_mask, clip_range=critic.value_clip, aggregation=critic.aggregation,
                normalizer=normalizer,
            )  # fmt: skip
            self.learner.accumulate(loss.loss)
            metrics.add(
                value_loss=loss.loss.detach(), clip_fraction=loss.clip_fraction, squared_error=loss.squared_error
            )
        step = self.learner.apply()
        metrics.add(grad_norm=step.norm if step.applied else 0.0, skipped_updates=float(not step.applied))
        metrics.end_mini_batch()
        return sum(batch.tokens for batch in batches)
