"""One sample on its way through a step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.messages import FinishedSample, Score, SlotRef
from common.token_cache import TokenCache
from services.coordinator.journal import Journal
from services.coordinator.prompts import Prompt


@dataclass
class Sample:
    """A prompt with one response: open, then generated, then scored; or masked out. There is no way back.

    ``index`` is its place in the step or the evaluation, ``group`` the place of its prompt, ``place`` the place in its
    wave (a step's samples are wave 0; an evaluation comes in waves of as many samples as the cache holds).
    """

    index: int
    group: int
    prompt: Prompt
    ref: SlotRef
    wave: int = 0
    place: int = 0
    finished: FinishedSample | None = None
    score: Score | None = None
    masked: str = ""
    """Why this sample does not count, if it does not."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the response is complete, or masked out."""

    def mask(self, reason: str) -> None:
        self.masked = reason
        self.ended.set()

    def take_slot(self, cache: TokenCache, step: int) -> None:
        """Leases it a slot; an old one is the caller's to free or to quarantine."""
        self.ref = cache.allocate(self.prompt.key)
        cache.set_scalars(self.ref, sample=self.index, step=step)

    def take_response(self, cache: TokenCache, finished: FinishedSample) -> None:
        """The response is complete."""
        self.finished = finished
        cache.set_scalars(
            self.ref, response_length=finished.length, finish_reason=finished.finish_reason,
            version_low=finished.version_low, version_high=finished.version_high,
        )  # fmt: skip
        self.ended.set()

    def take_score(self, cache: TokenCache, score: Score) -> None:
        self.score = score
        if self.ref.slot >= 0:  # else an evaluation's wave that is closed
            cache.set_scalars(self.ref, reward=score.reward)

    @property
    def settled(self) -> bool:
        """Nothing more happens to it: it is scored or masked out."""
        return self.score is not None or bool(self.masked)

    @property
    def length(self) -> int:
        return self.finished.length if self.finished else 0


def open_samples(
    cache: TokenCache, journal: Journal, prompts: Sequence[Prompt], responses: int, step: int, wave: int = 0,
    first: int = 0,
) -> list[Sample]:  # fmt: skip
    """Leases a slot for each of ``responses`` samples of each prompt; samples of a prompt are consecutive.

    ``first`` is the index of the first one. Samples that an earlier coordinator opened keep their slots, and what it
    knew of them.
    """
    samples = [
        Sample(index, index // responses, prompts[place // responses], SlotRef(-1, 0), wave, place)
        for place, index in enumerate(range(first, first + len(prompts) * responses))
    ]
    known = journal.recall(step, wave)
    if len(known) == len(samples):
        for sample, entry in zip(samples, known, strict=True):
            sample.ref, sample.finished = entry.ref, entry.finished
            if entry.masked:
                sample.mask(entry.masked)
            elif entry.finished is not None and entry.ref.slot < 0:
                sample.ended.set()
            elif entry.finished is not None:
                sample.take_response(cache, entry.finished)
            if entry.score is not None:
                sample.take_score(cache, entry.score)
        # The slots of some may have been freed just before the earlier coordinator died.
        leased = set(cache.leased())
        left = [sample for sample in samples if not sample.ended.is_set() and sample.ref not in leased]
        move_samples(cache, journal, left, step)
        return samples
    for sample in samples:
        sample.take_slot(cache, step)
    journal.opened(step, wave, [sample.ref for sample in samples])
    return samples


def move_samples(cache: TokenCache, journal: Journal, samples: Sequence[Sample], step: int) -> None:
    """Fresh slots for unfinished samples of one wave."""
    for sample in samples:
        sample.take_slot(cache, step)
    if samples:
        journal.moved(step, samples[0].wave, [(sample.place, sample.ref) for sample in samples])


def close_samples(cache: TokenCache, samples: Iterable[Sample]) -> None:
    """Frees their slots; those of an evaluation's wave that an earlier coordinator closed have none any more."""
    for sample in samples:
        if sample.ref.slot >= 0:
            cache.free(sample.ref)


def counted(samples: Iterable[Sample]) -> list[Sample]:
    """Samples that are not masked out, in order."""
    return [sample for sample in samples if not sample.masked]
