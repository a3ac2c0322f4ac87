"""Scoring a step's samples: what cannot be scored is tried again, masked out and counted, never a reward of 0."""

from __future__ import annotations

import asyncio

import pytest

from common.config import RewardConfig
from common.run_files import SharedDirectory
from services.coordinator.leases import LeaseLost
from services.coordinator.sample import counted
from tests.wire.wire_collect import SAMPLES, setting
from tests.wire.wire_support import Processes, play, soon, until


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
