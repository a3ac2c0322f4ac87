"""Generating and scoring a step's samples with real replicas, slots and sockets, while replicas die, hang and err."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from common.config import Config, RewardConfig
from common.messages import Sampling
from common.models import resolve_model
from common.run_files import SharedDirectory
from common.token_cache import Geometry, TokenCache, prompt_key
from common.tokenizer import load_tokenizer
from services.coordinator.collect import DEATHS, GENERATE_ATTEMPTS, Collection, Tries
from services.coordinator.dispatch import LeaseLost
from services.coordinator.prompts import Prompt
from services.coordinator.row import Row
from services.coordinator.sample import Sample, close_samples, counted, open_samples
from tests.wire.scripted_replica import committed, tokens_of
from tests.wire.wire_support import Processes, Star, patient, play, soon, star, until

SAMPLES = 8
SAMPLING = Sampling(temperature=1.0, max_new_tokens=8)
NULL = msgspec.Raw(b"null")


class Setting:
    """A step's samples in a real token cache, and a coordinator's end of the bus."""

    def __init__(self, shared: SharedDirectory, config: Config, bad: frozenset[int], slots: int) -> None:
        self.config = config
        run = shared.path.name.removeprefix("quartet-")
        fingerprint = load_tokenizer(resolve_model("tiny")).fingerprint
        geometry = Geometry(slots=slots, max_prompt_tokens=8, max_response_tokens=8, prompts=32)
        self.cache = TokenCache.create(shared.tokens, run=run, fingerprint=fingerprint, geometry=geometry)
        prompts = [self.prompt(index, "bad" if index in bad else "good") for index in range(SAMPLES)]
        self.samples = open_samples(self.cache, prompts, 1, 1)
        self.first_refs = [sample.ref for sample in self.samples]
        self.star: Star

    def prompt(self, index: int, word: str) -> Prompt:
        text = f"{word} prompt {index}"
        key = prompt_key(text, "", "")
        self.cache.put_prompt(key, [1 + index, 2, 3])
        row = Row(prompt=text, ground_truth=NULL, metadata=NULL, source="", origin=f"rows.jsonl:{index + 1}")
        return Prompt(index=index, text=text, key=key, length=3, ids=None, row=row)

    def collection(self) -> Collection:
        members, dispatcher = self.star.members, self.star.dispatcher
        return Collection(self.config, self.cache, dispatcher, lambda: len(members.of_role("rollout")), 1, self.samples)

    async def publish(self) -> None:
        self.star.publisher.manifest = committed(0)
        self.star.talk.everybody_ready.set()
        await soon(self.star.publisher.publish())

    async def collect(self) -> Collection:
        collection = self.collection()
        await soon(collection.collect(SAMPLING, 0))
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
            yield found
        close_samples(found.cache, found.samples)
        assert found.cache.check() == []
        assert (found.cache.leased(), found.cache.quarantined) == ([], 0)
    finally:
        found.cache.close()


def test_every_sample_is_generated_once_and_scored_by_what_was_written(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with setting(shared) as step:
            for number in range(2):
                replicas.start("rollout", number)
            replicas.start("reward")
            await step.star.ready("rollout", 2)
            await step.publish()
            collection = await step.collect()
            step.check_whole(step.samples)
            assert (collection.retries, step.renewed()) == (0, [])
            for number in range(2):
                assert len([line for line in replicas.noted("rollout", number) if "began GENERATE" in line]) == 1

    play(scenario())


def test_the_samples_of_a_killed_replica_get_fresh_slots(shared: SharedDirectory, replicas: Processes) -> None:
    """What it had finished stays; the rest is generated by the other replica, into slots that nobody else knows."""

    async def scenario() -> None:
        async with setting(shared) as step:
            replicas.start("rollout", 0, "die:GENERATE", "after:2")
            replicas.start("rollout", 1)
            replicas.start("reward")
            await step.star.ready("rollout", 2)
            await step.publish()
            collection = await step.collect()
            step.check_whole(step.samples)
            assert [name for name, _, _ in step.star.deaths] == ["rollout 0"]
            # Which of the two finished samples were reported before the death is a matter of moments.
            assert set(step.renewed()) in ({2, 3}, {1, 2, 3}, {0, 1, 2, 3})
            assert collection.retries == len(step.renewed())

    play(scenario())


def test_no_number_of_deaths_changes_the_batch(shared: SharedDirectory, replicas: Processes) -> None:
    """The only replica dies more often than a share may fail, and waits each time for its restart."""

    async def scenario() -> None:
        async with setting(shared) as step:
            rollout = replicas.start("rollout", 0, "block:GENERATE", "after:1")
            replicas.start("reward")
            await step.star.ready("rollout")
            await step.publish()
            collecting = asyncio.create_task(step.collect())
            for death in range(1, GENERATE_ATTEMPTS + 2):
                await until(lambda: "began GENERATE" in " ".join(replicas.noted("rollout")[-1:]), "a lease")
                rollout.kill()
                await until(lambda: len(step.star.deaths) == death, f"death {death}")  # noqa: B023
                rollout = replicas.start("rollout", 0, "block:GENERATE", "after:1")
                await step.star.ready("rollout")
            replicas.go()
            await soon(collecting)
            step.check_whole(step.samples)

    play(scenario())


@pytest.mark.parametrize("end", ["answer", "death"])
def test_slots_of_expired_work_stay_in_quarantine_until_its_holder_writes_no_more(
    shared: SharedDirectory, replicas: Processes, end: str
) -> None:
    async def scenario() -> None:
        async with setting(shared, generate=0.5) as step:
            slow = replicas.start("rollout", 0, "block:GENERATE", "late:99")
            replicas.start("rollout", 1)
            replicas.start("reward")
            await step.star.ready("rollout", 2)
            await step.publish()
            await step.collect()
            step.check_whole(step.samples)
            assert step.renewed() == [0, 1, 2, 3]
            assert step.cache.in_quarantine() == step.first_refs[:4]
            if end == "death":
                slow.kill()
            replicas.go()
            await until(lambda: step.cache.quarantined == 0, "the end of the quarantine")
            if end == "answer":
                assert "ended GENERATE 3" in replicas.noted("rollout", 0)
            step.check_whole(step.samples)  # the late write went where nobody reads

    play(scenario())


def test_a_share_that_fails_again_and_again_is_masked_out_and_counted(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with setting(shared) as step:
            replicas.start("rollout", 0, "raise:GENERATE")
            replicas.start("reward")
            await step.star.ready("rollout")
            await step.publish()
            collection = await step.collect()
            reason = "rollout 0 failed in GENERATE of step 1: ValueError: a scripted exception"
            expected = f"not generated after {GENERATE_ATTEMPTS} tries: {reason}"
            assert [sample.masked for sample in step.samples] == [expected] * SAMPLES
            assert [sample.score for sample in step.samples] == [None] * SAMPLES
            assert collection.retries == (GENERATE_ATTEMPTS - 1) * SAMPLES
            assert replicas.noted("reward") == []

    play(scenario())


def test_samples_that_a_replica_forgets_to_report_are_handed_out_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with setting(shared) as step:
            replicas.start("rollout", 0, "forget:3")
            replicas.start("reward")
            await step.star.ready("rollout")
            await step.publish()
            collection = await step.collect()
            masked = [sample.index for sample in step.samples if sample.masked]
            assert masked == [5, 6, 7]
            assert collection.retries == 6
            assert "reported the work as done without them" in step.samples[7].masked
            step.check_whole(counted(step.samples))

    play(scenario())


@pytest.mark.parametrize(("kind", "reason"), [("error", "a scripted error"), ("nan", "its reward is nan")])
def test_what_cannot_be_scored_is_tried_again_then_masked_and_never_a_reward_of_0(
    shared: SharedDirectory, replicas: Processes, kind: str, reason: str
) -> None:
    async def scenario() -> None:
        reward = RewardConfig(attempts=3)
        async with setting(shared, reward=reward, bad=frozenset({2, 5})) as step:
            replicas.start("rollout")
            replicas.start("reward", 0, f"bad:{kind}")
            await step.star.ready("rollout")
            await step.publish()
            collection = await step.collect()
            assert [sample.index for sample in step.samples if sample.masked] == [2, 5]
            for index in (2, 5):
                assert step.samples[index].masked == f"not scored after 3 tries: {reason}"
                assert step.samples[index].score is None
            assert collection.retries == 2 * 2
            step.check_whole(counted(step.samples))

    play(scenario())


def test_a_reward_replica_that_raises_costs_its_samples_only_after_all_attempts(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        reward = RewardConfig(attempts=2)
        async with setting(shared, reward=reward) as step:
            replicas.start("rollout")
            replicas.start("reward", 0, "raise:SCORE")
            await step.star.ready("rollout")
            await step.publish()
            await step.collect()
            expected = "not scored after 2 tries: reward 0 failed in SCORE of step 1: ValueError: a scripted exception"
            assert [sample.masked for sample in step.samples] == [expected] * SAMPLES
            assert all(sample.score is None for sample in step.samples)

    play(scenario())


def test_a_reward_replica_may_die_without_costing_a_sample(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        reward = RewardConfig(attempts=1)
        async with setting(shared, reward=reward) as step:
            replicas.start("rollout")
            replicas.start("reward", 0, "die:SCORE")
            await step.star.ready("rollout")
            await step.star.ready("reward")
            await step.publish()
            collecting = asyncio.create_task(step.collect())
            await until(lambda: bool(step.star.deaths), "the death")
            replicas.start("reward", 1)
            collection = await soon(collecting)
            step.check_whole(step.samples)
            assert collection.retries > 0

    play(scenario())


def test_without_any_reward_replica_the_run_ends_with_its_name(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with setting(shared, start=0.8, generate=0.7) as step:
            replicas.start("rollout")
            await step.star.ready("rollout")
            await step.publish()
            with pytest.raises(ExceptionGroup) as caught:
                await step.collect()
            lost = caught.value.split(LeaseLost)[0]
            assert lost is not None
            assert "no reward replica was free in SCORE of step 1" in repr(lost)

    play(scenario())


def test_a_full_cache_is_a_clear_error(shared: SharedDirectory, replicas: Processes, tmp_path: Path) -> None:
    """Every slot that is not leased is in quarantine: the run says so and names the key to raise."""

    async def scenario() -> None:
        async with setting(shared, generate=0.3, slots=SAMPLES + 1) as step:
            replicas.start("rollout", 0, "block:GENERATE")
            await step.star.ready("rollout")
            await step.publish()
            with pytest.raises(ExceptionGroup) as caught:
                await step.collect()
            assert "raise cache.slots" in repr(caught.value)
            replicas.go()
            await until(lambda: not step.star.members.of_role("rollout")[0].leases, "the late answer")
            for ref in step.cache.in_quarantine():
                step.cache.release(ref)
            step.samples = []
            for ref in step.cache.leased():
                step.cache.free(ref)

    play(scenario())


def test_deaths_are_not_counted_as_tries_up_to_a_bound() -> None:
    dead, failed = LeaseLost(1, "dead", ""), LeaseLost(2, "failed", "")
    tries = Tries(2)
    assert all(tries.again(dead) for _ in range(DEATHS))
    assert tries.again(failed)
    assert not tries.again(dead)
    assert tries.made == DEATHS + 2
    once = Tries(1)
    assert not once.again(None)
