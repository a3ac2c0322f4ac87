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

    ``index`` is its place in the step, ``group`` the place of its prompt, ``place`` the place in its wave (a step's
    samples are wave 0; an evaluation comes in waves of as many samples as the cache holds).
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
    generated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the response is complete, or masked out."""

    def mask(self, reason: str) -> None:
        self.masked = reason
        self.generated.set()

    def generate(self, cache: TokenCache, finished: FinishedSample) -> None:
        """The response is complete."""
        self.finished = finished
        cache.set_scalars(
            self.ref, response_length=finished.length, finish_reason=finished.finish_reason,
            version_low=finished.version_low, version_high=finished.version_high,
        )  # fmt: skip
        self.generated.set()

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
    cache: TokenCache, journal: Journal, prompts: Sequence[Prompt], responses: int, step: int, wave: int = 0
) -> list[Sample]:
    """Leases a slot for each of ``responses`` samples of each prompt; samples of a prompt are consecutive.

    Those that an earlier coordinator opened keep their slots, and what it knew of them.
    """
    samples = [
        Sample(index, group, prompt, SlotRef(-1, 0), wave, index)
        for index, (group, prompt) in enumerate(
            (group, prompt) for group, prompt in enumerate(prompts) for _ in range(responses)
        )
    ]
    known = journal.recall(step, wave)
    if len(known) == len(samples):
        for sample, entry in zip(samples, known, strict=True):
            sample.ref, sample.finished = entry.ref, entry.finished
            if entry.masked:
                sample.mask(entry.masked)
            elif entry.finished is not None and entry.ref.slot < 0:
                sample.generated.set()
            elif entry.finished is not None:
                sample.generate(cache, entry.finished)
            if entry.score is not None:
                sample.take_score(cache, entry.score)
        _give_slots(cache, journal, samples, step, wave)
        return samples
    for sample in samples:
        sample.ref = cache.allocate(sample.prompt.key)
        cache.set_scalars(sample.ref, sample=sample.index, step=step)
    journal.opened(step, wave, [sample.ref for sample in samples])
    return samples


def _give_slots(cache: TokenCache, journal: Journal, samples: Sequence[Sample], step: int, wave: int) -> None:
    """New slots for unfinished samples whose old ones were freed just before the earlier coordinator died."""
    leased = set(cache.leased())
    moves: list[tuple[int, SlotRef]] = []
    for sample in samples:
        if not sample.generated.is_set() and sample.ref not in leased:
            sample.ref = cache.allocate(sample.prompt.key)
            cache.set_scalars(sample.ref, sample=sample.index, step=step)
            moves.append((sample.place, sample.ref))
    journal.moved(step, wave, moves)


def close_samples(cache: TokenCache, samples: Iterable[Sample]) -> None:
    """Frees their slots; those of an evaluation's wave that an earlier coordinator closed have none any more."""
    for sample in samples:
        if sample.ref.slot >= 0:
            cache.free(sample.ref)


def counted(samples: Iterable[Sample]) -> list[Sample]:
    """Samples that are not masked out, in order."""
    return [sample for sample in samples if not sample.masked]
