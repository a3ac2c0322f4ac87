"""The critic service: values into the cache, and updates towards the returns."""

from __future__ import annotations

import torch

from common.batch import read_batch, write_columns
from common.cache_access import attach_cache, take_counts
from common.config_values import sleeps
from common.learner import Learner
from common.messages import Evaluate, Evaluated, Lease, Manifest, Receipt, Result, UpdateCritic, Updated
from common.model import pick_device, release_cached, set_up_torch
from common.models import resolve_model
from common.replica import Assignment, LeaseFailed, Outbox
from common.tokenizer import load_tokenizer
from services.critic.update import CriticUpdate
from services.critic.value_model import ValueModel

WRITES = frozenset({"values", "bootstrap_value"})


class CriticService:
    """Implements ``common.replica.Service``."""

    def __init__(self, assignment: Assignment) -> None:
        config = assignment.config
        set_up_torch(config.critic.threads)
        torch.manual_seed(config.run.seed)
        tokenizer = load_tokenizer(resolve_model(config.model.path))
        self.pad_id = tokenizer.pad_id
        self.cache = attach_cache(assignment, tokenizer.fingerprint, WRITES)
        self.device = pick_device(config.critic.device)
        self.makes_room = sleeps(config)
        self.model = ValueModel(config.model, self.device)
        learner = Learner(self.model, config.critic.optimizer, config.run.steps)
        self.update = CriticUpdate(config, self.model, learner, self.cache, self.pad_id)

    def ready(self) -> None:
        """The critic's weights are nobody else's."""

    def handle(self, lease: Lease, outbox: Outbox) -> Result:
        match lease.task:
            case Evaluate() as task:
                return self.evaluate(task)
            case UpdateCritic(refs=refs):
                metrics, tokens = self.update.run(refs, lease.step)
                if self.makes_room:
                    release_cached(self.device)
                return Updated(metrics=metrics, tokens=tokens)
            case other:
                raise LeaseFailed("error", f"critic cannot carry out {type(other).__name__}")

    @torch.no_grad()
    def evaluate(self, task: Evaluate) -> Evaluated:
        """Writes the values of one micro-batch, and what each sample bootstraps from if the length limit cut it."""
        batch = read_batch(self.cache, task.refs, self.pad_id, self.device)
        values, bootstrap = self.model(batch)
        write_columns(self.cache, "values", batch, values)
        for ref, value in zip(task.refs, bootstrap.tolist(), strict=True):
            self.cache.column("bootstrap_value", ref)[0] = value
        return Evaluated(tokens=batch.tokens)

    def apply_weights(self, manifest: Manifest) -> Receipt:
        raise LeaseFailed("error", "the critic does not run on the policy's weights")

    def cache_counts(self) -> tuple[int, int]:
        return take_counts(self.cache)

    def close(self) -> None:
        self.cache.close()
