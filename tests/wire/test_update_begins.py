"""From when on an update counts as begun, and what a replica that starts or joins then waits for."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common.config import VLLMConfig
from common.run_files import SharedDirectory
from tests.wire.wire_steps import GPU, joining, sleeping_config, steps
from tests.wire.wire_support import play, soon, until

ORDERS = ("Generate", "Sleep", "ApplyWeights")
WAITS_S = 0.4


def test_a_replica_that_joins_while_others_sleep_waits_for_the_publish(shared: SharedDirectory) -> None:
    """The old weights would bring its KV cache back in the middle of the update."""

    async def scenario() -> None:
        async with steps(shared, sleeping_config("always")) as running:
            sleeper = running.actors["rollout-0"]
            sleeper.may_sleep.clear()
            step = asyncio.create_task(running.step(1))
            await until(lambda: ("rollout-0", "Sleep") in running.told, "the sleep")
            async with joining(running) as late:
                await running.star.ready("rollout", 2)
                assert ("trainer", "UpdatePolicy") not in running.told
                sleeper.may_sleep.set()
                await soon(step)
                assert running.told_to(late.name, *ORDERS) == ["ApplyWeights"]
                assert {member.version for member in running.star.members.of_role("rollout")} == {1}

    play(scenario())


def test_a_replica_that_joins_during_an_update_waits_for_the_publish_also_where_nobody_sleeps(
    shared: SharedDirectory,
) -> None:
    """From the moment that the update is asked for: the trainer's own word that it has begun comes later."""

    async def scenario() -> None:
        async with steps(shared, sleeping_config("never")) as running:
            trainer = running.actors["trainer"]
            trainer.may_update.clear()
            step = asyncio.create_task(running.step(1))
            await until(lambda: ("trainer", "UpdatePolicy") in running.told, "the update")
            assert running.star.publisher.writing == 1
            async with joining(running) as late:
                await running.star.ready("rollout", 2)
                trainer.may_update.set()
                await soon(step)
                assert running.told_to(late.name, *ORDERS) == ["ApplyWeights"]

    play(scenario())


def test_an_update_waits_for_an_engine_that_starts_on_the_trainers_gpu_and_has_it_sleep(
    shared: SharedDirectory,
) -> None:
    async def scenario() -> None:
        async with steps(shared, sleeping_config("always")) as running, joining(running, GPU) as late:
            step = asyncio.create_task(running.step(1))
            await until(lambda: running.star.publisher.writing == 1, "the update's turn")
            await asyncio.wait([step], timeout=WAITS_S)
            assert running.told_to("rollout-0", *ORDERS) == ["Generate"]
            late.may_start.set()
            await soon(step)
            assert running.told_to(late.name, *ORDERS) == ["Sleep", "ApplyWeights"]
            slept = running.told.index((late.name, "Slept"))
            assert slept < running.told.index(("trainer", "UpdatePolicy"))

    play(scenario())


@pytest.mark.parametrize(("gpu", "warned"), [(GPU, True), ("GPU-8", False)])
def test_an_update_does_not_wait_longer_than_a_start_may_take_nor_for_another_gpu(
    shared: SharedDirectory, caplog: pytest.LogCaptureFixture, gpu: str, warned: bool
) -> None:
    async def scenario() -> None:
        config = sleeping_config("never")
        rollout = msgspec.structs.replace(config.rollout, vllm=VLLMConfig(start_timeout=0.3))
        async with steps(shared, msgspec.structs.replace(config, rollout=rollout)) as running:
            async with joining(running, gpu):
                await running.step(1)
            expected = "step 1: the update begins although rollout 0 still starts on the trainer's GPU after 0 s"
            assert (expected in caplog.text) is warned

    play(scenario())
