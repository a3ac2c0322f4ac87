"""How a replica process ends: refused, stopped, alone, or with its last words."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import NoReturn

import pytest
import zmq
import zmq.asyncio

from common.messages import (
    PROTOCOL,
    Ack,
    Done,
    Failed,
    Heartbeat,
    Hello,
    Leaving,
    Refused,
    Stop,
)
from common.replica import Replica
from common.run_files import SharedDirectory
from common.service import Assignment, ReplicaError
from tests.wire.scripted_values import committed, proved
from tests.wire.wire_support import (
    PATIENT,
    Processes,
    heard_for,
    join,
    lease,
    listening,
    next_from,
    patient,
    play,
    soon,
    until,
    welcome,
)


def test_a_refused_replica_says_why_and_fails(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("trainer")
            peer, _ = await next_from(router, Hello)
            router.send(peer, Refused(epoch=1, reason="there is a trainer already"))
            code, log = await replicas.ended(process)
            assert code == 2
            assert "refused trainer 0: there is a trainer already" in log

    play(scenario())


def test_a_coordinator_of_another_protocol_ends_it_with_a_clear_error(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(shared.endpoint)
        process = replicas.start("critic")
        peer, _ = await soon(asyncio.ensure_future(socket.recv_multipart()))
        await socket.send_multipart([peer, b"\x81\xa4type\xa7Unheard"])
        code, log = await replicas.ended(process)
        assert code == 1
        assert f"no message of protocol {PROTOCOL}" in log
        assert "Unheard" in log
        socket.close()
        context.term()

    play(scenario())


def test_without_a_coordinator_it_gives_up_at_its_deadline(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        code, log = await replicas.ended(replicas.start("critic", 0, "start:0.6"))
        assert code == 1
        assert f"no coordinator answered at {shared.endpoint}" in log

    play(scenario())


def test_without_a_coordinator_it_stops_at_once(shared: SharedDirectory, replicas: Processes) -> None:
    """The Hello that nobody took is not waited for."""

    async def scenario() -> None:
        process = replicas.start("critic", 0, "start:30")
        await until(lambda: signal_handled(process.pid, signal.SIGTERM), "the replica runs its loop")
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert (await replicas.ended(process, 5.0))[0] == 0
        assert time.monotonic() - asked < 0.9

    play(scenario())


def signal_handled(pid: int, signum: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(caught >> (signum - 1) & 1)


def test_it_ends_with_0_where_the_run_has_ended(shared: SharedDirectory, replicas: Processes) -> None:
    """Docker starts it again after a kill, and the run was over in the meantime."""
    shared.note.write_text("")
    try:

        async def scenario() -> None:
            process = replicas.start("critic")
            await until(lambda: signal_handled(process.pid, signal.SIGTERM), "the replica runs its loop")
            shared.path.rename(gone := shared.path.with_name(f"{shared.path.name}-gone"))
            try:
                assert (await replicas.ended(process, 10.0))[0] == 0
            finally:
                gone.rename(shared.path)

        play(scenario())
    finally:
        shared.note.unlink()


def test_a_coordinator_with_another_cache_is_refused(
    shared: SharedDirectory, replicas: Processes, tmp_path: Path
) -> None:
    """What the replica maps is the file of the dead coordinator; writing there would be lost without a word."""

    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("critic")
            peer, _ = await join(router, shared)
            other = tmp_path / "tokens"
            other.touch()
            router.send(peer, welcome(shared, PATIENT, epoch=2, cache_path=str(other)))
            _, failed = await next_from(router, Failed)
            code, log = await replicas.ended(process)
            assert (code, failed.work) == (1, 0)
            assert "another token cache" in log
            assert failed.message in log

    play(scenario())


def test_last_words_of_a_service_that_cannot_load(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("trainer", 0, "fail-load")
            peer, _ = await next_from(router, Hello)
            router.send(peer, welcome(shared, PATIENT))
            _, failed = await next_from(router, Failed)
            assert (failed.work, failed.message) == (0, "RuntimeError: there is no such model")
            code, log = await replicas.ended(process)
            assert code == 1
            assert "there is no such model" in log

    play(scenario())


def test_stop_ends_it_with_0_and_closes_the_service(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("critic")
            peer, _ = await join(router, shared)
            router.send(peer, Stop(epoch=1, reason="the run is finished"))
            assert (await replicas.ended(process, 5.0))[0] == 0
            assert replicas.noted("critic") == ["closed"]

    play(scenario())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0(shared: SharedDirectory, replicas: Processes, signum: signal.Signals) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("critic")
            peer, _ = await join(router, shared)
            process.send_signal(signum)
            await next_from(router, Leaving)
            router.send(peer, Stop(epoch=1, reason="let go"))
            assert (await replicas.ended(process, 5.0))[0] == 0

    play(scenario())


def test_stop_does_not_wait_for_a_computation(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("critic", 0, "block:EVALUATE")
            peer, _ = await join(router, shared)
            router.send(peer, lease(1))
            await until(lambda: "began EVALUATE 1" in replicas.noted("critic"), "the lease")
            router.send(peer, Stop(epoch=1, reason="enough"))
            assert (await replicas.ended(process, 3.0))[0] == 0

    play(scenario())


def test_what_a_computation_reports_after_the_end_goes_nowhere(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        problems: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, problem: problems.append(problem))
        async with listening(shared) as router:
            replica = Replica("trainer", 0, shared.endpoint, never_built)
            running = asyncio.create_task(replica.run())
            peer, _ = await next_from(router, Hello)
            router.send(peer, Stop(epoch=1, reason="enough"))
            assert await soon(running) == 0
            replica.outbox.samples_finished(1, [])
            replica.outbox.update_begun(1)
            replica.outbox.update_committed(1, committed(1))
            replica.outbox.weights_proved(proved(1))
            with pytest.raises(ReplicaError, match="trainer 0 stops"):  # nor does it wait for what nobody will answer
                await asyncio.to_thread(replica.want, "policy", "", 16)
            await heard_for(router, 0.1)
        assert problems == []

    play(scenario())


def never_built(assignment: Assignment) -> NoReturn:
    raise AssertionError("it was stopped before it was welcomed")


def test_a_silent_coordinator_ends_it_with_1(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("critic")
            await join(router, shared, patient(start=1.0))
            code, log = await replicas.ended(process, 6.0)
            assert code == 1
            assert "has been silent for" in log

    play(scenario())


def test_its_own_standstill_is_not_the_coordinators_silence(shared: SharedDirectory, replicas: Processes) -> None:
    """A computation that keeps the interpreter lock for longer than ``timeouts.start`` ends in its result."""

    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("critic", 0, "gil:1.6")
            peer, _ = await join(router, shared, patient(start=1.0))
            router.send(peer, lease(1))
            done = False
            while not done:
                peer, message = await soon(router.receive())
                done = isinstance(message, Done)
                if isinstance(message, Heartbeat):
                    router.send(peer, Heartbeat(epoch=1, sent=time.monotonic()))
            router.send(peer, Ack(epoch=1, work=1))
            await heard_for(router, 0.5)
            assert process.poll() is None

    play(scenario())
