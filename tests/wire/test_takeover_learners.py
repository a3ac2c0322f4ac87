"""A coordinator dies while trainer and critic learn: each update is made once, and from the right batch."""

from __future__ import annotations

import asyncio

import pytest

from common.messages import Role, UpdateCritic, Updated
from common.run_files import SharedDirectory
from tests.wire.wire_learners import (
    REFS,
    start,
    told,
    update,
)
from tests.wire.wire_support import Processes, play, soon, until
from tests.wire.wire_takeover import succession

ROLES: tuple[Role, ...] = ("trainer", "critic")


# ---------------------------------------------------------------- a coordinator that takes over


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("when", ["before the greeting", "before anybody asks", "after"])
def test_an_update_that_ends_over_the_change_of_coordinators_is_made_once(
    shared: SharedDirectory, replicas: Processes, role: Role, when: str
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                start(replicas, role, 0, "block:UPDATE")
                await first.ready(role)
                first.learners.begin(1)
                updating = asyncio.create_task(update(first, role, 1))
                await until(lambda: "UPDATE" in told(replicas, role, 0), "the update")
                updating.cancel()
                await asyncio.wait([updating])
            if when == "before the greeting":
                replicas.go()
                await until(lambda: "ended UPDATE 1" in replicas.noted(role), "its end")
            async with run.reign() as second:
                second.learners.start_from(0, takeover=True)
                (member,) = await second.ready(role)
                if when == "before anybody asks":
                    replicas.go()
                await until(lambda: when == "after" or not member.leases, "its answer")
                second.learners.begin(1)
                updating = asyncio.create_task(update(second, role, 1))
                await asyncio.sleep(0)
                replicas.go()
                await soon(updating)
                assert told(replicas, role, 0) == ["UPDATE"]
                assert (second.learners.wanted[role], member.state) == (1, 1)

    play(scenario())


def test_a_learner_that_has_made_another_update_is_restored_first(shared: SharedDirectory, replicas: Processes) -> None:
    """It learnt from a batch that is not the one of the new coordinator: from more samples that could be scored."""

    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                start(replicas, "critic")
                await first.ready("critic")
                first.learners.begin(1)
                await update(first, "critic", 1)
            async with run.reign() as second:
                second.learners.start_from(0, takeover=True)
                await second.ready("critic")
                second.learners.begin(1)
                done = await soon(second.learners.update("critic", UpdateCritic(refs=REFS[:1])))
                assert done.result == Updated(metrics={}, tokens=1)
                assert told(replicas, "critic", 0) == ["UPDATE", "CHECKPOINT", "restored 0", "UPDATE"]

    play(scenario())


def test_an_update_whose_learner_died_with_the_coordinator_is_made_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with succession(shared, replicas) as run:
            async with run.reign() as first:
                start(replicas, "critic")
                await first.ready("critic")
                first.learners.begin(1)
                await update(first, "critic", 1)
            replicas.started[0].kill()
            replicas.started[0].wait()
            async with run.reign() as second:
                second.learners.start_from(0, takeover=True)
                start(replicas, "critic", 1)
                await second.ready("critic")
                second.learners.begin(1)
                await update(second, "critic", 1)
                assert told(replicas, "critic", 1) == ["UPDATE"]

    play(scenario())
