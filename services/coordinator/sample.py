"""One sample on its way through a step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.messages import FinishedSample, Score, SlotRef
from common.token_cache import TokenCache
from services.coordinator.prompts import Prompt


@dataclass
class Sample:
    """A prompt with one response. ``index`` is its place in the step, ``group`` the place of its prompt."""

    index: int
    group: int
    prompt: Prompt
    ref: SlotRef
    finished: FinishedSample | None = None
    score: Score | None = None
    masked: str = ""
    """Why this sample does not count, if it does not."""
    generated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the response is complete, or masked out."""

    def mask(self, reason: str) -> None:
        self.masked = reason
        self.generated.set()

    @property
    def length(self) -> int:
        return self.finished.length if self.finished else 0


def open_samples(cache: TokenCache, prompts: Sequence[Prompt], responses: int, step: int) -> list[Sample]:
    """Leases a slot for each of ``responses`` samples of each prompt; samples of a prompt are consecutive."""
    samples: list[Sample] = []
    for group, prompt in enumerate(prompts):
        for _ in range(responses):
            sample = Sample(index=len(samples), group=group, prompt=prompt, ref=cache.allocate(prompt.key))
            cache.set_scalars(sample.ref, sample=sample.index, step=step)
            samples.append(sample)
    return samples


def close_samples(cache: TokenCache, samples: Iterable[Sample]) -> None:
    for sample in samples:
        cache.free(sample.ref)


def counted(samples: Iterable[Sample]) -> list[Sample]:
    """Samples that are not masked out, in order."""
    return [sample for sample in samples if not sample.masked]
