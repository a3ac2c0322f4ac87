"""The critic service: values into the cache, and updates towards the returns."""

from __future__ import annotations

import time

import torch

from common.batch import read_batch, write_columns
from common.cache_access import attach_cache, take_counts
from common.checkpoints.role import RoleState
from common.config_values import sleeps
from common.learner import Learner
from common.messages import (
    NO_STATE,
    Evaluate,
    Evaluated,
    Lease,
    Manifest,
    Receipt,
    RestoreState,
    Result,
    SaveState,
    StateRestored,
    UpdateCritic,
    Updated,
)
from common.model import pick_device, release_cached, set_up_torch
from common.models import resolve_model
from common.service import Assignment, LeaseFailed, Outbox
from common.tokenizer import load_tokenizer
from common.weights.layout import model_tensors
from services.critic.update import CriticUpdate
from services.critic.value_model import ValueModel

WRITES = frozenset({"values", "bootstrap_value"})


class CriticService:
    """Implements ``common.service.Service``."""

    def __init__(self, assignment: Assignment) -> None:
        config = self.config = assignment.config
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
        self.role_state = RoleState("critic", learner, self.device, config.timeouts.checkpoint)
        self.role_state.prepare(self._tensors())

    def ready(self) -> None:
        """The critic's weights are nobody else's."""

    def state(self) -> int:
        """The step whose state is held; ``NO_STATE`` if none is."""
        return self.role_state.step

    def handle(self, lease: Lease, outbox: Outbox) -> Result:
        match lease.task:
            case Evaluate() as task:
                return self.evaluate(task)
            case UpdateCritic() as task:
                return self.update_critic(lease, task)
            case SaveState() as task:
                return self.role_state.save(task, self._tensors(), outbox)
            case RestoreState() as task:
                return self.restore(task)
            case other:
                raise LeaseFailed("error", f"critic cannot carry out {type(other).__name__}")

    @torch.no_grad()
    def evaluate(self, task: Evaluate) -> Evaluated:
        """Writes the values of one micro-batch, and what each sample bootstraps from if the length limit cut it."""
        self.role_state.require("Evaluate")
        batch = read_batch(self.cache, task.refs, self.pad_id, self.device)
        values, bootstrap = self.model(batch)
        write_columns(self.cache, "values", batch, values)
        for ref, value in zip(task.refs, bootstrap.tolist(), strict=True):
            self.cache.column("bootstrap_value", ref)[0] = value
        return Evaluated(tokens=batch.tokens)

    def update_critic(self, lease: Lease, task: UpdateCritic) -> Updated:
        """Without samples nothing is learnt, and the state is that of the next step all the same."""
        self.role_state.require("UpdateCritic")
        self.role_state.step = NO_STATE
        metrics, tokens = self.update.run(task.refs, lease.step) if task.refs else ({}, 0)
        if self.makes_room:
            release_cached(self.device)
        self.role_state.step = lease.step
        return Updated(metrics=metrics, tokens=tokens)

    def restore(self, task: RestoreState) -> StateRestored:
        """Becomes what it was after ``task.step``."""
        started = time.monotonic()
        saved = self.role_state.open(task) if task.step else None
        self.role_state.step = NO_STATE
        if saved is None:
            self._load_first()
            self.role_state.begin_again()
        else:
            self.role_state.load_weights(saved, self._tensors())
            self.role_state.load_learner(saved)
        self.role_state.step = task.step
        return StateRestored(seconds=time.monotonic() - started)

    @torch.no_grad()
    def _load_first(self) -> None:
        first = model_tensors(ValueModel(self.config.model, torch.device("cpu")))
        for name, tensor in self._tensors().items():
            tensor.copy_(first[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Backbone and head."""
        return model_tensors(self.model)

    def apply_weights(self, manifest: Manifest) -> Receipt:
        raise LeaseFailed("error", "the critic does not run on the policy's weights")

    def cache_counts(self) -> tuple[int, int]:
        return take_counts(self.cache)

    def close(self) -> None:
        self.role_state.close()
        self.cache.close()
