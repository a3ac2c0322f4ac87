"""A replica too many: told to end, it finishes what it holds, takes nothing more, and nothing is lost."""

from __future__ import annotations

import logging
import signal

import pytest

from common.messages import Role
from common.run_files import SharedDirectory
from tests.wire.wire_leases import CONFIG, NOTICED_WITHIN_S, lost, score
from tests.wire.wire_support import Processes, play, soon, star, until


def test_it_answers_what_it_holds_and_gets_nothing_more(
    shared: SharedDirectory, replicas: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            leaves = replicas.start("reward", 0, "block:SCORE")
            (member,) = await coordinator.ready("reward")
            held = score(coordinator)
            await until(lambda: bool(replicas.noted("reward")), "the lease")
            leaves.send_signal(signal.SIGTERM)
            await until(lambda: member.leaving, "its word")
            next_one = score(coordinator)
            replicas.start("reward", 1)
            await until(next_one.done, "another takes the next")
            assert not held.done()
            replicas.go()
            await soon(held)
            assert (await replicas.ended(leaves))[0] == 0
            await until(lambda: member not in coordinator.members.by_peer.values(), "its end", NOTICED_WITHIN_S)

    with caplog.at_level(logging.INFO):
        play(scenario())
    assert "reward 0 leaves when it has answered the 1 leases that it holds" in caplog.text
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING], "nothing went wrong"


@pytest.mark.parametrize("role", ["reward", "critic"])
def test_who_holds_nothing_or_may_not_leave_ends_at_once(
    shared: SharedDirectory, replicas: Processes, role: Role
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start(role, 0)
            await coordinator.ready(role)
            process.send_signal(signal.SIGTERM)
            assert (await replicas.ended(process))[0] == 0
            await until(lambda: not coordinator.members.by_peer, "its end", NOTICED_WITHIN_S)

    play(scenario())


def test_a_second_signal_ends_it_at_once(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("reward", 0, "block:SCORE")
            (member,) = await coordinator.ready("reward")
            held = score(coordinator)
            await until(lambda: bool(replicas.noted("reward")), "the lease")
            process.send_signal(signal.SIGTERM)
            await until(lambda: member.leaving, "its word")
            process.send_signal(signal.SIGTERM)
            assert (await replicas.ended(process))[0] == 0
            await lost(held, "dead", NOTICED_WITHIN_S)

    play(scenario())
