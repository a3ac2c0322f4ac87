"""Where docker starts again whatever dies, the coordinator counts the deaths without a finished step."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from common.messages import Role
from common.run_files import SharedDirectory
from services.coordinator.failures import RunFailed
from tests.wire.wire_leases import CONFIG, NOTICED_WITHIN_S
from tests.wire.wire_support import Processes, Star, play, soon, star, until

DOCKER = replace(CONFIG, bus=replace(CONFIG.bus, group_access=True), restart=replace(CONFIG.restart, limit=2))


async def dies(coordinator: Star, replicas: Processes, role: Role, times: int) -> None:
    for _ in range(times):
        process = replicas.start(role, 0)
        await until(lambda: bool(coordinator.members.of_role(role)), f"a ready {role}")
        process.kill()
        await until(lambda: not coordinator.members.of_role(role), "its death is known", NOTICED_WITHIN_S)


def test_a_service_that_dies_again_and_again_ends_the_run(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, DOCKER) as coordinator:
            ended = asyncio.ensure_future(coordinator.talk.until_broken())
            await dies(coordinator, replicas, "reward", 2)
            coordinator.talk.step = lambda: 1
            await dies(coordinator, replicas, "reward", 2)
            assert not ended.done(), "a step was finished in between"
            await dies(coordinator, replicas, "reward", 1)
            with pytest.raises(RunFailed, match=r"reward 0 .*death 3 without a finished step, with restart\.limit = 2"):
                await soon(ended)

    play(scenario())


def test_one_of_several_does_not(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, DOCKER) as coordinator:
            replicas.start("reward", 1)
            ended = asyncio.ensure_future(coordinator.talk.until_broken())
            await coordinator.ready("reward")
            for _ in range(4):
                process = replicas.start("reward", 0)
                await coordinator.ready("reward", 2)
                process.kill()
                await coordinator.ready("reward", 1)
            assert not ended.done()
            ended.cancel()

    play(scenario())
