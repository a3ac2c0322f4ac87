"""One PPO update of the policy: epochs × mini-batches × micro-batches over the step's samples, in sample order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from common.aggregation import Normalizer
from common.batch import Batch, read_batch, read_columns, response_logits
from common.config import Config
from common.learner import Learner
from common.messages import SlotRef
from common.micro_batches import consecutive
from common.model import token_entropy, token_logprobs
from common.token_cache import TokenCache
from common.update_metrics import UpdateMetrics
from services.trainer.objective import (
    POLICY_LOSSES,
    Objective,
    PolicyBatch,
    PolicyLoss,
    PolicyOptions,
    Term,
    compose,
    kl_to_reference,
)  # fmt: skip


class PolicyUpdate:
    """Applies ``ppo`` and ``trainer`` of the config to a policy whose old logprobs and advantages lie in the cache."""

    def __init__(self, config: Config, model: nn.Module, learner: Learner, cache: TokenCache, pad_id: int) -> None:
        self.config = config
        self.model = model
        self.learner = learner
        self.cache = cache
        self.pad_id = pad_id
        self.device = next(model.parameters()).device
        ppo = config.ppo
        self.loss_function = POLICY_LOSSES[ppo.loss]
        self.options = PolicyOptions(
            clip_low=ppo.clip_low, clip_high=ppo.clip_high, dual_clip=ppo.dual_clip, aggregation=ppo.aggregation
        )

    def run(self, refs: Sequence[SlotRef], step: int, kl_coefficient: float) -> tuple[dict[str, float], int]:
        """Returns (metrics over the global batch, tokens computed on)."""
        metrics = UpdateMetrics()
        rate = self.learner.start_step(step)
        tokens = 0
        for _ in range(self.config.trainer.epochs):
            for mini_batch in consecutive(refs, self.config.trainer.mini_batch):
                tokens += self._mini_batch(mini_batch, kl_coefficient, metrics)
        return metrics.result() | {"learning_rate": rate}, tokens

    def _mini_batch(self, refs: Sequence[SlotRef], kl_coefficient: float, metrics: UpdateMetrics) -> int:
        batches = [
            read_batch(self.cache, part, self.pad_id, self.device)
            for part in consecutive(refs, self.config.trainer.micro_batch)
        ]
        normalizer = Normalizer.total((batch.response_mask for batch in batches), self.config.rollout.max_new_tokens)
        for batch in batches:
            policy, objective = self._losses(batch, kl_coefficient, normalizer)
            self.learner.accumulate(objective.loss)
            metrics.add(
                policy_loss=objective.policy_loss, clip_fraction=policy.clip_fraction, entropy=objective.entropy,
                dual_clip_fraction=policy.dual_clip_fraction, update_kl=policy.approx_kl, kl_loss=objective.kl,
            )  # fmt: skip
            metrics.keep_max(ratio_max=policy.ratio_max)
        step = self.learner.apply()
        metrics.add(grad_norm=step.norm if step.applied else 0.0, skipped_updates=float(not step.applied))
        metrics.end_mini_batch()
        return sum(batch.tokens for batch in batches)

    def _losses(self, batch: Batch, kl_coefficient: float, normalizer: Normalizer) -> tuple[PolicyLoss, Objective]:
        ppo, temperature = self.config.ppo, self.config.rollout.temperature
        logits = response_logits(self.model, batch)
        logprobs = token_logprobs(logits, batch.response_ids, temperature)
        with torch.set_grad_enabled(ppo.entropy != 0):
            entropy = token_entropy(logits, temperature)
        policy = self.loss_function(
            PolicyBatch(
                logprobs=logprobs, old_logprobs=read_columns(self.cache, "logprobs", batch),
                advantages=read_columns(self.cache, "advantages", batch), mask=batch.response_mask,
            ),
            self.options, normalizer,
        )  # fmt: skip
        kl = None
        if ppo.kl.placement == "loss":
            reference = read_columns(self.cache, "ref_logprobs", batch)
            kl = Term(kl_to_reference(logprobs, reference, batch.response_mask, ppo.kl.estimator), kl_coefficient)
        objective = compose(
            policy, batch.response_mask, ppo.aggregation, normalizer, entropy=Term(entropy, ppo.entropy), kl=kl
        )
        return policy, objective
