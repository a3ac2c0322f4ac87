"""The rollout service: leases of samples in, tokens into the cache, finished samples handed on the moment they end."""

from __future__ import annotations

import logging
from pathlib import Path

from common.cache_access import attach_cache, take_counts
from common.messages import FinishedSample, Generate, Generated, Lease, Manifest, Receipt, Result
from common.model import set_up_torch
from common.models import resolve_model
from common.replica import Assignment, LeaseFailed, Outbox, ReplicaError
from common.tokenizer import load_tokenizer
from common.weights.header import WeightsError, require_clean
from services.rollout.engines.interface import Engine, EngineError, Request
from services.rollout.engines.torch import TorchEngine

log = logging.getLogger("rollout")

WRITES = frozenset({"response_ids", "response_mask", "behaviour_logprobs"})


class RolloutService:
    """Implements ``common.replica.Service``."""

    def __init__(self, assignment: Assignment) -> None:
        config = assignment.config
        set_up_torch(config.rollout.threads)
        tokenizer = load_tokenizer(resolve_model(config.model.path))
        self.cache = attach_cache(assignment, tokenizer.fingerprint, WRITES)
        try:
            self.engine: Engine = TorchEngine(config, tokenizer.eos_ids, tokenizer.pad_id)
        except EngineError as error:
            raise ReplicaError(str(error)) from error
        self.manifest: Manifest | None = None

    def ready(self) -> Manifest | None:
        return None

    def apply_weights(self, manifest: Manifest) -> Receipt:
        receipt = self.engine.load_weights(manifest)
        if self.manifest is None:
            log.info("%s@%d: %d tensors by %s", manifest.name, manifest.version, receipt.tensors, receipt.transport)
        self.manifest = manifest
        return receipt

    def handle(self, lease: Lease, outbox: Outbox) -> Result:
        if not isinstance(lease.task, Generate):
            raise LeaseFailed("error", f"rollout cannot carry out {type(lease.task).__name__}")
        task = lease.task
        self._require_version(task.version)
        requests = [
            Request(index, item.sample, self.cache.prompt_ids(item.ref)) for index, item in enumerate(task.items)
        ]
        steps, tokens = self.engine.decode_steps, 0
        for responses in self.engine.generate(requests, task.sampling, lease.step):
            finished: list[FinishedSample] = []
            for response in responses:
                ref, length = task.items[response.index].ref, len(response.ids)
                self.cache.column("response_ids", ref)[:length] = response.ids
                self.cache.column("response_mask", ref)[:length] = 1
                self.cache.column("behaviour_logprobs", ref)[:length] = response.logprobs
                finished.append(
                    FinishedSample(
                        ref=ref,
                        length=length,
                        finish_reason=response.finish_reason,
                        version_low=task.version,
                        version_high=task.version,
                    )
                )
                tokens += length
            outbox.samples_finished(lease.work, finished)
        return Generated(samples=len(requests), tokens=tokens, decode_steps=self.engine.decode_steps - steps)

    def _require_version(self, version: int) -> None:
        """No token is drawn from torn or other weights than the lease names."""
        if self.manifest is None or self.manifest.version != version:
            found = "none" if self.manifest is None else self.manifest.version
            raise LeaseFailed("stale", f"the lease asks for policy version {version}, this replica has {found}")
        try:
            require_clean(Path(self.manifest.path), version)
        except WeightsError as error:
            raise LeaseFailed("stale", str(error)) from error

    def cache_counts(self) -> tuple[int, int]:
        return take_counts(self.cache)

    def close(self) -> None:
        self.cache.close()
