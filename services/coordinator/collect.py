"""Generating and scoring a set of samples: the part that training steps and evaluations have in common.

    samples -> leases, one per rollout replica -> tokens in slots -> finished samples -> leases to free reward replicas

A sample is scored as soon as it is finished, while others are still being generated. What goes wrong costs a retry and at
worst the sample, which is then masked out and counted; it never becomes a reward of 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from common.config import Config
from common.messages import FinishedSample, Generate, GenerateItem, Sampling, Score, ScoreBatch, ScoreItem, Scores
from common.token_cache import TokenCache
from services.coordinator.dispatch import Dispatcher, LeaseLost
from services.coordinator.sample import Sample

log = logging.getLogger("collect")

GENERATE_ATTEMPTS = 3


class Collection:
    """One set of samples of one step (0 is the evaluation before the first)."""

    def __init__(
        self, config: Config, cache: TokenCache, dispatcher: Dispatcher, replicas: Callable[[], int], step: int,
        samples: Sequence[Sample],
    ) -> None:  # fmt: skip
        self.config = config
        self.cache = cache
        self.dispatcher = dispatcher
        self.replicas = replicas
        self.step = step
        self.samples = samples
        self.finished: asyncio.Queue[Sample] = asyncio.Queue()
        self.retries = 0

    async def collect(self, sampling: Sampling, version: int) -> None:
        """Returns when every sample is generated and scored, or masked out."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.generate(sampling, version))
            group.create_task(self.score())

    # ------------------------------------------------------------ generation

    async def generate(self, sampling: Sampling, version: int) -> None:
        missing = list(self.samples)
        for attempt in range(GENERATE_ATTEMPTS):
            if attempt:
                self.retries += len(missing)
                log.warning("step %d: %d samples are handed out again (try %d)", self.step, len(missing), attempt + 1)
            shares = split(missing, self.replicas())
            problems = await asyncio.gather(*(self._generate_share(share, sampling, version) for share in shares))
            missing = [sample for sample in missing if not sample.generated.is_set()]
            if not missing:
                return
        for sample in missing:
            sample.mask(f"not generated after {GENERATE_ATTEMPTS} tries: {'; '.join(filter(None, problems))}")
            self.finished.put_nowait(sample)

    async def _generate_share(self, share: Sequence[Sample], sampling: Sampling, version: int) -> str:
        """Generates one replica's share. Returns what went wrong, and then the unfinished samples have fresh slots."""
        by_slot = {sample.ref.slot: sample for sample in share}
        items = [GenerateItem(ref=sample.ref, sample=sample.index) for sample in share]
        task = Generate(items=items, sampling=sampling, version=version)
        deadline = self.config.timeouts.generate
        try:
            await self.dispatcher.submit(
                "rollout", "GENERATE", self.step, task, deadline, lambda finished: self._note(finished, by_slot)
            )
        except LeaseLost as lost:
            if lost.kind == "nobody":
                raise
            self._renew_slots([sample for sample in share if not sample.generated.is_set()], lost)
            return str(lost)
        return ""

    def _note(self, finished: Sequence[FinishedSample], by_slot: dict[int, Sample]) -> None:
        for item in finished:
            sample = by_slot[item.ref.slot]
            sample.finished = item
            self.cache.set_scalars(
                sample.ref, response_length=item.length, finish_reason=item.finish_reason, version_low=item.version_low,
                version_high=item.version_high,
            )  # fmt: skip
            sample.generated.set()
            self.finished.put_nowait(sample)

    def _renew_slots(self, samples: Sequence[Sample], lost: LeaseLost) -> None:
        """A late write cannot be refused, so an old slot is quarantined until its holder has answered or is dead."""
        old = [sample.ref for sample in samples]
        for sample in samples:
            if lost.kind == "timeout":
                self.cache.quarantine(sample.ref)
            else:
                self.cache.free(sample.ref)
            sample.ref = self.cache.allocate(sample.prompt.key)
            self.cache.set_scalars(sample.ref, sample=sample.index, step=self.step)
        if lost.kind == "timeout":
            self.dispatcher.when_over(lost.work, lambda: [self.cache.release(ref) for ref in old] and None)

    # ------------------------------------------------------------ scoring

    async def score(self) -> None:
        """Hands finished samples to whichever reward replica is free, in batches that grow while all are busy."""
        left = len(self.samples)
        async with asyncio.TaskGroup() as group:
            while left:
                batch = [await self.finished.get()]
                await self._until_scorer_free()
                while len(batch) < self.config.reward.batch_size and not self.finished.empty():
                    batch.append(self.finished.get_nowait())
                left -= len(batch)
                scorable = [sample for sample in batch if not sample.masked]
                if scorable:
                    group.create_task(self._score_batch(scorable))
                    await asyncio.sleep(0)  # lets the batch take its replica before the next one looks for a free one

    async def _until_scorer_free(self) -> None:
        limit = self.config.timeouts.start + self.config.timeouts.generate
        try:
            await asyncio.wait_for(self.dispatcher.until_free("reward"), limit)
        except TimeoutError:
            raise LeaseLost(0, "nobody", f"no reward replica was free within {limit:.0f} s: is one running?") from None

    async def _score_batch(self, batch: Sequence[Sample]) -> None:
        errors: dict[int, str] = {}
        left = list(batch)
        for attempt in range(self.config.reward.attempts):
            self.retries += len(left) if attempt else 0
            scores = await self._lease_scores(left, errors)
            for sample in left:
                score = scores.get(sample.ref.slot)
                if score is None:
                    continue
                if score.error:
                    errors[sample.index] = score.error
                else:
                    sample.score = score
                    self.cache.set_scalars(sample.ref, reward=score.reward)
            left = [sample for sample in left if sample.score is None]
            if not left:
                return
        for sample in left:
            sample.mask(f"not scored: {errors.get(sample.index, 'no answer')}")
            log.warning("step %d sample %d (%s) is masked out: %s", self.step, sample.index, sample.prompt.row.origin, sample.masked)

    async def _lease_scores(self, samples: Sequence[Sample], errors: dict[int, str]) -> dict[int, Score]:
        """Scores by slot; a lost lease leaves its reason in ``errors``."""
        items = [
            ScoreItem(
                ref=sample.ref, prompt=sample.prompt.text, ground_truth=bytes(sample.prompt.row.ground_truth),
                metadata=bytes(sample.prompt.row.metadata), source=sample.prompt.row.source,
            )  # fmt: skip
            for sample in samples
        ]
        # The service itself limits a batch to timeout_s and then tries sample by sample; the lease covers both.
        deadline = self.config.reward.timeout_s * (1 + len(samples)) + self.config.timeouts.stop
        try:
            done = await self.dispatcher.submit("reward", "SCORE", self.step, ScoreBatch(items=items), deadline)
        except LeaseLost as lost:
            log.warning("%s", lost)
            errors.update({sample.index: str(lost) for sample in samples})
            return {}
        assert isinstance(done.result, Scores), f"a reward replica answered {type(done.result).__name__}"
        return {score.ref.slot: score for score in done.result.scores}


def split(samples: Sequence[Sample], parts: int) -> list[Sequence[Sample]]:
    """Consecutive shares of nearly equal size, none empty."""
    parts = max(1, min(parts, len(samples)))
    size, extra = divmod(len(samples), parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [samples[start:end] for start, end in zip(starts, starts[1:], strict=False)]
