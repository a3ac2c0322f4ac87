"""A step's samples in a real token cache, to be generated and scored by scripted replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec

from common.config import Config, RewardConfig
from common.messages import Sampling, SlotRef
from common.models import resolve_model
from common.run_files import SharedDirectory
from common.token_cache import Geometry, TokenCache, prompt_key
from common.tokenizer import load_tokenizer
from services.coordinator.collect import Collection
from services.coordinator.prompts import Prompt
from services.coordinator.row import Row
from services.coordinator.sample import Sample, close_samples, open_samples
from tests.wire.scripted_values import tokens_of
from tests.wire.wire_support import Star, patient, soon, star

SAMPLES = 8
SAMPLING = Sampling(temperature=1.0, max_new_tokens=8)
NULL = msgspec.Raw(b"null")


async def published() -> int:
    """The version that ``Setting.publish`` has published."""
    return 0


class Setting:
    """A step's samples in a real token cache, and a coordinator's end of the bus."""

    def __init__(self, shared: SharedDirectory, config: Config, bad: frozenset[int], slots: int) -> None:
        self.shared = shared
        self.config = config
        run = shared.path.name.removeprefix("quartet-")
        fingerprint = load_tokenizer(resolve_model("tiny")).fingerprint
        geometry = Geometry(slots=slots, max_prompt_tokens=8, max_response_tokens=8, prompts=32)
        self.cache = TokenCache.create(shared.tokens, run=run, fingerprint=fingerprint, geometry=geometry)
        self.prompts = [self.prompt(index, "bad" if index in bad else "good") for index in range(SAMPLES)]
        self.samples: list[Sample] = []
        self.first_refs: list[SlotRef] = []
        self.star: Star

    def open(self, step: int = 1) -> None:
        """Gives a step's samples their slots; those that the ledger knows are recalled."""
        self.samples = open_samples(self.cache, self.star.journal, self.prompts, 1, step)
        self.first_refs = [sample.ref for sample in self.samples]

    def prompt(self, index: int, word: str) -> Prompt:
        text = f"{word} prompt {index}"
        key = prompt_key(text, "", "")
        self.cache.put_prompt(key, [1 + index, 2, 3])
        row = Row(prompt=text, ground_truth=NULL, metadata=NULL, source="", origin=f"rows.jsonl:{index + 1}")
        return Prompt(index=index, text=text, key=key, length=3, ids=None, row=row)

    def collection(self) -> Collection:
        members, dispatcher, journal = self.star.members, self.star.dispatcher, self.star.journal

        def replicas() -> int:
            return len(members.of_role("rollout"))

        return Collection(self.config, self.cache, journal, dispatcher, replicas, 1, self.samples)

    async def publish(self) -> None:
        self.star.commit(0)
        self.star.prove(0)
        self.star.talk.everybody_ready.set()
        await soon(self.star.publisher.publish())

    async def collect(self) -> Collection:
        collection = self.collection()
        await soon(collection.collect(SAMPLING, published))
        return collection

    def check_whole(self, samples: list[Sample]) -> None:
        """These samples have their own tokens, and the reward that a scorer gives to just these tokens."""
        for sample in samples:
            tokens = tokens_of(sample.index)
            assert not sample.masked
            assert self.cache.response("response_ids", sample.ref).tolist() == tokens
            assert sample.score is not None
            assert sample.score.reward == sum(tokens)
            scalars = self.cache.scalars(sample.ref)
            assert (scalars.reward, scalars.response_length) == (sum(tokens), len(tokens))
            assert (scalars.sample, scalars.step, scalars.finish_reason) == (sample.index, 1, "stop")

    def renewed(self) -> list[int]:
        """Samples that got another slot, or their old one again under another generation."""
        return [sample.index for sample, old in zip(self.samples, self.first_refs, strict=True) if sample.ref != old]


@asynccontextmanager
async def setting(
    shared: SharedDirectory, *, reward: RewardConfig | None = None, bad: frozenset[int] = frozenset(), slots: int = 32,
    **timeouts: float,
) -> AsyncGenerator[Setting]:  # fmt: skip
    config = msgspec.structs.replace(patient(**{"start": 20.0} | timeouts), reward=reward or RewardConfig())
    found = Setting(shared, config, bad, slots)
    try:
        async with star(shared, config, str(shared.tokens)) as found.star:
            found.open()
            yield found
        close_samples(found.cache, found.samples)
        assert found.cache.check() == []
        assert (found.cache.leased(), found.cache.quarantined) == ([], 0)
    finally:
        found.cache.close()
