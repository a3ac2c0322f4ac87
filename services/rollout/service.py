"""The rollout service: leases of samples in, tokens into the cache, finished samples handed on the moment they end."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

from common.cache_access import attach_cache, take_counts
from common.messages import FinishedSample, Generate, Generated, Lease, Manifest, Receipt, Result, Sleep, Slept
from common.models import resolve_model
from common.service import Assignment, LeaseFailed, Outbox, ReplicaError
from common.tokenizer import load_tokenizer
from common.weights.header import WeightsError, require_clean
from services.rollout.engines.choice import build_engine
from services.rollout.engines.interface import EngineDead, EngineError, Request, Response

log = logging.getLogger("rollout")

WRITES = frozenset({"response_ids", "response_mask", "behaviour_logprobs"})


class RolloutService:
    """Implements ``common.service.Service``."""

    def __init__(self, assignment: Assignment) -> None:
        tokenizer = load_tokenizer(resolve_model(assignment.config.model.path))
        self.cache = attach_cache(assignment, tokenizer.fingerprint, WRITES)
        self.manifest: Manifest | None = None
        self.asleep = False
        self.slept = Slept(used_before_bytes=0, used_after_bytes=0)
        try:
            self.engine = build_engine(assignment, tokenizer)
        except (EngineError, EngineDead) as error:
            raise ReplicaError(str(error)) from error

    def ready(self) -> None:
        return None

    def apply_weights(self, manifest: Manifest) -> Receipt:
        first, self.manifest = self.manifest is None, None  # until it is proved nothing is generated
        try:
            receipt = self.engine.apply_weights(manifest)
        except EngineDead as error:
            raise ReplicaError(str(error)) from error
        except WeightsError as error:  # the trainer has begun the next version, which this replica will be told of
            raise LeaseFailed("stale", str(error)) from error
        if first:
            tensors = len(receipt.checksums)
            log.info("%s@%d: %d tensors by %s", manifest.name, manifest.version, tensors, receipt.transport)
        self.manifest, self.asleep = manifest, False
        return receipt

    def state(self) -> int:
        return 0

    def handle(self, lease: Lease, outbox: Outbox) -> Result:
        try:
            match lease.task:
                case Generate() as task:
                    return self.generate(lease, task, outbox)
                case Sleep():
                    return self.sleep()
                case other:
                    raise LeaseFailed("error", f"rollout cannot carry out {type(other).__name__}")
        except EngineDead as error:
            raise ReplicaError(str(error)) from error

    def sleep(self) -> Slept:
        """Falls asleep once: a coordinator that takes over in an update says it again."""
        if not self.asleep:
            self.asleep = True
            self.slept = self.engine.sleep()
        return self.slept

    def generate(self, lease: Lease, task: Generate, outbox: Outbox) -> Generated:
        self._require_version(task.version)
        requests = [
            Request(index, item.sample, self.cache.prompt_ids(item.ref)) for index, item in enumerate(task.items)
        ]
        tokens = 0
        with closing(self.engine.generate(requests, task.sampling, lease.step)) as batches:
            for responses in batches:
                self._require_version(task.version)  # samples that an update overtook are not handed on
                finished = [self._write(task, response) for response in responses]
                tokens += sum(sample.length for sample in finished)
                outbox.samples_finished(lease.work, finished)
        return Generated(samples=len(requests), tokens=tokens)

    def _write(self, task: Generate, response: Response) -> FinishedSample:
        ref, length = task.items[response.index].ref, len(response.ids)
        self.cache.column("response_ids", ref)[:length] = response.ids
        self.cache.column("response_mask", ref)[:length] = 1
        self.cache.column("behaviour_logprobs", ref)[:length] = response.logprobs
        return FinishedSample(
            ref=ref, length=length, finish_reason=response.finish_reason, version_low=task.version,
            version_high=task.version,
        )  # fmt: skip

    def _require_version(self, version: int) -> None:
        """No token is drawn from torn or other weights than the lease names."""
        if self.asleep:
            raise LeaseFailed("stale", f"the lease asks for policy version {version}, this replica sleeps")
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
        self.engine.close()
        self.cache.close()
