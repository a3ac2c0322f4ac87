"""A replica too many: told to end, it finishes what it holds, takes nothing more, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest

from common.messages import Hello, Leaving, Rehello, Stop
from common.run_files import SharedDirectory
from tests.wire.wire_leases import CONFIG, NOTICED_WITHIN_S, lost, score
from tests.wire.wire_support import PATIENT, Processes, join, listening, next_from, play, soon, star, until, welcome


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


def test_who_holds_nothing_is_let_go_at_once(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("reward", 0)
            await coordinator.ready("reward")
            process.send_signal(signal.SIGTERM)
            assert (await replicas.ended(process))[0] == 0
            await until(lambda: not coordinator.members.by_peer, "its end", NOTICED_WITHIN_S)

    play(scenario())


def test_whom_the_run_cannot_do_without_ends_with_the_run(shared: SharedDirectory, replicas: Processes) -> None:
    """docker compose tells the coordinator last: who is told before must still save what there is."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            stopped = asyncio.Event()
            coordinator.talk.on_stop = stopped.set
            process = replicas.start("critic", 0)
            (member,) = await coordinator.ready("critic")
            process.send_signal(signal.SIGTERM)
            await soon(stopped.wait())
            assert member.there
            assert process.poll() is None
            coordinator.members.stop_all("the run was stopped")
            assert (await replicas.ended(process))[0] == 0

    play(scenario())


def test_a_new_coordinator_is_told_as_well(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("reward", 0, "block:SCORE")
            peer, _ = await join(router, shared)
            process.send_signal(signal.SIGTERM)
            assert (await next_from(router, Leaving))[1].epoch == 1
            router.send(peer, Rehello(epoch=2))
            await next_from(router, Hello)
            router.send(peer, welcome(shared, PATIENT, epoch=2))
            assert (await next_from(router, Leaving))[1].epoch == 2
            router.send(peer, Stop(epoch=2, reason="let go"))
            assert (await replicas.ended(process))[0] == 0

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
