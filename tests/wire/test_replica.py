"""A real replica process against a real router: what it says, repeats and ignores."""

from __future__ import annotations

import time

import pytest

from common.messages import (
    Ack,
    ApplyWeights,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    Heartbeat,
    Hello,
    Lease,
    Ready,
    Rehello,
    UpdateBegun,
    UpdateCommitted,
    UpdatePolicy,
    WeightsApplied,
    WeightsProved,
)
from common.outbox import REPEAT_INTERVAL_S
from common.processes import process_start
from common.run_files import SharedDirectory
from tests.wire.scripted_values import committed, proved
from tests.wire.wire_support import (
    PATIENT,
    Processes,
    heard_for,
    join,
    lease,
    listening,
    next_from,
    play,
    until,
    welcome,
)


def test_hello_repeats_until_welcome_and_says_who_it_is(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("critic", 3)
            hellos = [await next_from(router, Hello) for _ in range(3)]
            peer, hello = hellos[0]
            assert {found for found, _ in hellos} == {peer}
            assert hello.identity.encode() == peer
            assert (hello.role, hello.replica, hello.epoch) == ("critic", 3, 0)
            assert (hello.pid, hello.pid_start) == (process.pid, process_start(process.pid))
            assert hello.versions["msgspec"]
            router.send(peer, welcome(shared, PATIENT))
            _, ready = await next_from(router, Ready)
            assert (ready.epoch, ready.manifest, ready.proof) == (1, None, None)
            later = await heard_for(router, 1.2)
            assert not [message for message in later if isinstance(message, Hello)]
            for _ in range(2):
                await next_from(router, Heartbeat)

    play(scenario())


def test_a_result_is_repeated_until_it_is_acknowledged(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("critic")
            peer, _ = await join(router, shared)
            router.send(peer, lease(7))
            _, first = await next_from(router, Done)
            since = time.monotonic()
            assert (first.work, first.result) == (7, Evaluated(tokens=0))
            assert (first.cache_hits, first.cache_misses) == (3, 1)
            assert first.started <= first.ended <= time.monotonic()
            assert first.memory_bytes > 2**20
            _, second = await next_from(router, Done, REPEAT_INTERVAL_S + 3)
            assert second == first
            assert time.monotonic() - since >= REPEAT_INTERVAL_S * 0.9
            router.send(peer, Ack(epoch=1, work=7))
            later = await heard_for(router, REPEAT_INTERVAL_S + 0.5)
            assert not [message for message in later if isinstance(message, Done)]

    play(scenario())


def test_rehello_is_answered_with_what_is_held_and_finished(shared: SharedDirectory, replicas: Processes) -> None:
    """And a new coordinator gets, under its own epoch, what the dead one had not acknowledged."""

    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("critic", 0, "block:SCORE")
            peer, first = await join(router, shared)
            router.send(peer, lease(1))
            await next_from(router, Done)
            waits = Lease(epoch=1, work=2, step=1, phase="SCORE", deadline_s=60.0, task=Evaluate(refs=[]))
            router.send(peer, waits)
            await until(lambda: "began SCORE 2" in replicas.noted("critic"), "work 2")
            router.send(peer, Rehello(epoch=2))
            _, again = await next_from(router, Hello)
            assert again.identity == first.identity
            assert (again.leases_held, again.leases_finished, again.epoch) == ([2], [1], 1)
            router.send(peer, welcome(shared, PATIENT, epoch=2))
            _, ready = await next_from(router, Ready)
            _, done = await next_from(router, Done, REPEAT_INTERVAL_S / 2)
            assert (ready.epoch, done.epoch, done.work) == (2, 2, 1)
            router.send(peer, Ack(epoch=2, work=1))
            replicas.go()
            _, done = await next_from(router, Done)
            assert (done.epoch, done.work) == (2, 2)

    play(scenario())


def test_a_lease_of_another_epoch_is_ignored(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("critic")
            peer, _ = await join(router, shared)
            router.send(peer, lease(50, epoch=7))
            router.send(peer, lease(51))
            _, done = await next_from(router, Done)
            assert done.work == 51
            assert replicas.noted("critic") == ["began EVALUATE 51", "ended EVALUATE 51"]

    play(scenario())


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [("raise", "error", "ValueError: a scripted exception"), ("stale", "stale", "scripted to be stale")],
)
def test_an_exception_becomes_a_failed_and_the_replica_lives(
    shared: SharedDirectory, replicas: Processes, word: str, kind: str, message: str
) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("critic", 0, f"{word}:EVALUATE")
            peer, _ = await join(router, shared)
            for work in (3, 4):
                router.send(peer, lease(work))
                _, failed = await next_from(router, Failed)
                assert (failed.work, failed.kind, failed.message) == (work, kind, message)
                router.send(peer, Ack(epoch=1, work=work))

    play(scenario())


def test_orders_are_carried_out_in_order_and_commits_precede_their_result(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("trainer")
            peer, _ = await join(router, shared)
            task = UpdatePolicy(refs=[], version=4, kl_coefficient=0.1)
            update = Lease(epoch=1, work=1, step=4, phase="UPDATE", deadline_s=60.0, task=task)
            router.send(peer, update)
            router.send(peer, ApplyWeights(epoch=1, work=2, manifest=committed(4)))
            kinds = (UpdateBegun, UpdateCommitted, WeightsProved, Done, WeightsApplied)
            found = [(await next_from(router, kind))[1] for kind in kinds]
            assert isinstance(found[1], UpdateCommitted)
            assert found[1].manifest == committed(4)
            assert isinstance(found[2], WeightsProved)
            assert found[2].proof == proved(4)
            assert isinstance(found[4], WeightsApplied)
            assert found[4].version == 4
            router.send(peer, Ack(epoch=1, work=1))
            router.send(peer, Ack(epoch=1, work=2))
            later = await heard_for(router, REPEAT_INTERVAL_S + 0.3)
            assert all(isinstance(message, Heartbeat) for message in later)
            # A coordinator that meets this trainer now is told of version 4, not of the one it began with.
            router.send(peer, Rehello(epoch=1))
            await next_from(router, Hello)
            router.send(peer, welcome(shared, PATIENT))
            _, ready = await next_from(router, Ready)
            assert (ready.manifest, ready.proof) == (committed(4), proved(4))

    play(scenario())
