"""Generating and scoring a set of samples: the part that training steps and evaluations have in common.

    samples -> leases, one per rollout replica -> tokens in slots -> finished samples -> leases to free reward replicas

A sample is scored as soon as it is finished, while others are still being generated. What goes wrong costs a retry and
at worst the sample, which is then masked out and counted; it never becomes a reward of 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from common.config import Config
from common.messages import (
    FinishedSample,
    Generate,
    GenerateItem,
    Sampling,
    Score,
    ScoreBatch,
    ScoreItem,
    Scores,
    SlotRef,
)
from common.token_cache import TokenCache
from services.coordinator.dispatch import Dispatcher
from services.coordinator.journal import Journal
from services.coordinator.leases import LeaseLost
from services.coordinator.sample import Sample, move_samples

log = logging.getLogger("collect")

GENERATE_ATTEMPTS = 3
DEATHS = 10
"""Deaths that a piece of work survives: it is not to blame for them, unless it is what kills its holders."""
Published = Callable[[], Awaitable[int]]
"""Waits until the newest weights are published, and returns their version."""
UNREPORTED = "its replica reported the work as done without them"


@dataclass
class Tries:
    """How often work is handed out: ``attempts`` times, the deaths of its holders not counted up to ``DEATHS``."""

    attempts: int
    deaths: int = 0
    made: int = 0

    def again(self, lost: LeaseLost | None) -> bool:
        """Counts a try that came to nothing; whether there is another."""
        self.made += 1
        if lost is not None and lost.kind == "dead" and self.deaths < DEATHS:
            self.deaths += 1
        return self.made - self.deaths < self.attempts


class Collection:
    """One set of samples of one step (0 is the evaluation before the first).

    Samples that an earlier coordinator left generated, scored or masked out go on from there; those that a replica
    still generates for it are waited for.
    """

    def __init__(
        self, config: Config, cache: TokenCache, journal: Journal, dispatcher: Dispatcher,
        replicas: Callable[[], int], step: int, samples: Sequence[Sample],
    ) -> None:  # fmt: skip
        self.config = config
        self.cache = cache
        self.journal = journal
        self.dispatcher = dispatcher
        self.replicas = replicas
        self.step = step
        self.samples = samples
        self.finished: asyncio.Queue[Sample] = asyncio.Queue()
        self.retries = 0
        for sample in samples:
            if sample.ended.is_set() and not sample.settled:
                self.finished.put_nowait(sample)

    async def collect(self, sampling: Sampling, published: Published) -> None:
        """Returns when every sample is generated and scored, or masked out."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.generate(sampling, published))
            group.create_task(self.score())

    # ------------------------------------------------------------ generation

    async def generate(self, sampling: Sampling, published: Published) -> None:
        missing = [sample for sample in self.samples if not sample.ended.is_set()]
        async with asyncio.TaskGroup() as group:
            for number, refs in self.dispatcher.inheritance.generating().items():
                share = [sample for sample in missing if sample.ref in refs]
                if share:
                    group.create_task(self._generate_share(share, sampling, published, number))
                    missing = [sample for sample in missing if sample not in share]
            if missing:
                await published()  # who has proved the weights by then shares the work
                for share in split(missing, self.replicas()):
                    group.create_task(self._generate_share(share, sampling, published))

    async def _generate_share(
        self, share: Sequence[Sample], sampling: Sampling, published: Published, inherited: int | None = None
    ) -> None:
        """Generates one replica's share; what it leaves unfinished is handed out again at once."""
        missing, tries = list(share), Tries(GENERATE_ATTEMPTS)
        while True:
            lost = await self._lease_generation(missing, sampling, published, inherited)
            inherited = None
            missing = [sample for sample in missing if not sample.ended.is_set()]
            if not missing:
                return
            if not tries.again(lost):
                break
            self.retries += len(missing)
            log.warning("step %d: %d samples are handed out again: %s", self.step, len(missing), lost or UNREPORTED)
        for sample in missing:
            self._mask(sample, f"not generated after {tries.made} tries: {lost or UNREPORTED}")
            self.finished.put_nowait(sample)

    def _mask(self, sample: Sample, reason: str) -> None:
        self.journal.masked(self.step, sample.wave, sample.place, reason)
        sample.mask(reason)

    async def _lease_generation(
        self, samples: Sequence[Sample], sampling: Sampling, published: Published, inherited: int | None
    ) -> LeaseLost | None:
        """One lease, or the rest of an inherited one. Returns how it was lost, if it was; the unfinished samples then
        have fresh slots."""
        by_ref = {sample.ref: sample for sample in samples}
        items = [GenerateItem(ref=sample.ref, sample=sample.index) for sample in samples]
        version = await published() if inherited is None else -1  # the one that it was leased with
        task = Generate(items=items, sampling=sampling, version=version)
        limit = self.config.timeouts.generate
        note = partial(self._note, by_ref)
        try:
            if inherited is None:
                await self.dispatcher.submit("rollout", "GENERATE", self.step, task, limit, note)
            else:
                await self.dispatcher.adopt_generation(inherited, self.step, task, limit, note)
        except LeaseLost as lost:
            if lost.kind == "nobody":
                raise
            self._renew_slots([sample for sample in samples if not sample.ended.is_set()], lost)
            return lost
        return None

    def _note(self, by_ref: Mapping[SlotRef, Sample], finished: Sequence[FinishedSample]) -> None:
        for item in finished:
            sample = by_ref.get(item.ref)
            if sample is None:
                log.error("step %d: %s was reported as finished and is not being generated", self.step, item.ref)
                continue
            if sample.ended.is_set():  # told again to a coordinator that took over
                continue
            sample.take_response(self.cache, item)
            self.finished.put_nowait(sample)

    def _renew_slots(self, samples: Sequence[Sample], lost: LeaseLost) -> None:
        """A late write cannot be refused, so an old slot is quarantined until its holder has answered or is dead."""
        old = [sample.ref for sample in samples]
        for ref in old:
            if lost.kind == "timeout":
                self.cache.quarantine(ref)
            else:
                self.cache.free(ref)
        move_samples(self.cache, self.journal, samples, self.step)
        if lost.kind == "timeout":
            self.dispatcher.when_over(lost.work, partial(self._release, old))

    def _release(self, refs: Sequence[SlotRef]) -> None:
        for ref in refs:
            self.cache.release(ref)

    # ------------------------------------------------------------ scoring

    async def score(self) -> None:
        """Hands finished samples to whichever reward replica is free, in batches that grow while all are busy."""
        left = sum(not sample.settled for sample in self.samples)
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
            async with asyncio.timeout(limit):
                await self.dispatcher.queues.until_free("reward")
        except TimeoutError:
            text = f"no reward replica was free in SCORE of step {self.step} within {limit:.0f} s: is one running?"
            raise LeaseLost(0, "nobody", text) from None

    async def _score_batch(self, batch: Sequence[Sample]) -> None:
        errors: dict[int, str] = {}
        left, tries = list(batch), Tries(self.config.reward.attempts)
        while True:
            lost = await self._lease_scores(left, errors)
            left = [sample for sample in left if sample.score is None]
            if not left:
                return
            if not tries.again(lost):
                break
            self.retries += len(left)
        for sample in left:
            self._mask(sample, f"not scored after {tries.made} tries: {errors.get(sample.index, 'no answer')}")
            origin = sample.prompt.row.origin
            log.warning("step %d sample %d (%s) is masked out: %s", self.step, sample.index, origin, sample.masked)

    async def _lease_scores(self, samples: Sequence[Sample], errors: dict[int, str]) -> LeaseLost | None:
        """One lease. Returns how it was lost, if it was; what a sample's scorer found wrong is put into ``errors``."""
        items = [
            ScoreItem(
                ref=sample.ref,
                prompt=sample.prompt.text,
                ground_truth=bytes(sample.prompt.row.ground_truth),
                metadata=bytes(sample.prompt.row.metadata),
                source=sample.prompt.row.source,
            )
            for sample in samples
        ]
        # The service itself limits a batch to timeout_s and then tries sample by sample; the lease covers both.
        deadline = self.config.reward.timeout_s * (1 + len(samples)) + self.config.timeouts.stop
        try:
            done = await self.dispatcher.submit("reward", "SCORE", self.step, ScoreBatch(items=items), deadline)
        except LeaseLost as lost:
            if lost.kind == "nobody":
                raise
            log.warning("%s", lost)
            errors.update({sample.index: str(lost) for sample in samples})
            return lost
        if isinstance(done.result, Scores):
            scores = {score.ref: score for score in done.result.scores}
            for sample in samples:
                self._take_score(sample, scores.get(sample.ref), errors)
        return None

    def _take_score(self, sample: Sample, score: Score | None, errors: dict[int, str]) -> None:
        if score is None:
            errors[sample.index] = "the reward service returned no score for it"
        elif score.error:
            errors[sample.index] = score.error
        elif not math.isfinite(score.reward):
            errors[sample.index] = f"its reward is {score.reward}"
        else:
            sample.take_score(self.cache, score)


def split(samples: Sequence[Sample], parts: int) -> list[Sequence[Sample]]:
    """Consecutive shares of nearly equal size, none empty."""
    parts = max(1, min(parts, len(samples)))
    size, extra = divmod(len(samples), parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [samples[start:end] for start, end in pairwise(starts)]
