"""The coordinator answers whoever asks for the memory of shared weights; the holder here only counts its exports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from common import bus
from common.messages import ApplyWeights, CudaHandle, Heartbeat, Ready, WeightsGranted, Welcome
from common.processes import pid_space, process_start
from common.run_files import SharedDirectory
from tests.wire.scripted_values import committed
from tests.wire.wire_asker import GPU, NO_ANSWER_S, Asker, asker, ready_for_engines
from tests.wire.wire_leases import CONFIG
from tests.wire.wire_support import Processes, hello, next_of, patient, play, star, until


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives and does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def handle_of(granted: WeightsGranted) -> CudaHandle:
    assert granted.handle is not None
    return granted.handle


def test_on_cpu_a_writer_is_answered_at_once_and_a_consumer_after_the_commit(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("rollout", 0, "want:")
            await until(lambda: coordinator.talk.weights.waiting == 1, "the request")
            replicas.start("trainer", 0, "want:", "size:4128")
            await coordinator.ready("trainer")
            await coordinator.ready("rollout")
            assert replicas.noted("trainer") == ["granted none none True"]
            assert replicas.noted("rollout") == ["granted none 0 False"]
            assert coordinator.talk.weights.waiting == 0

    play(scenario())


def test_on_a_gpu_everybody_gets_an_export_of_his_own(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("trainer", 0, f"want:{GPU}", "size:4128")
            await until(lambda: coordinator.talk.weights.waiting == 1, "the writer's request")
            replicas.start("holder")
            await coordinator.ready("trainer")
            assert replicas.noted("trainer") == ["granted handle-1 none True"]
            replicas.start("critic")
            await coordinator.ready("critic")
            for number in (2, 3):
                consumer = await asker(shared, name=f"consumer-{number}")
                consumer.ask(gpu="GPU-8")
                found = await consumer.granted()
                handle = handle_of(found)
                assert (handle.handle.rstrip(b"\0"), handle.gpu, handle.nbytes) == (b"handle-%d" % number, GPU, 4128)
                assert (found.manifest, found.created) == (committed(0, GPU), False)
                consumer.dealer.close()

    play(scenario())


def test_on_a_gpu_an_engine_waits_for_trainer_and_critic(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("holder")
            await coordinator.ready("holder")
            engine = await asker(shared)
            engine.ask(gpu=GPU)
            replicas.start("trainer")
            await coordinator.ready("trainer")
            await engine.hears_nothing()
            replicas.start("critic")
            assert (await engine.granted()).manifest == committed(0)
            assert coordinator.members.of_role("critic")
            engine.dealer.close()

    play(scenario())


def test_what_is_committed_during_the_export_is_granted(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            replicas.start("holder", 0, "block:PUBLISH")
            await coordinator.ready("holder")
            coordinator.commit(0, GPU)
            engine = await asker(shared)
            engine.ask()
            await until(lambda: bool(replicas.noted("holder")), "the export")
            coordinator.commit(1, GPU)
            replicas.go()
            assert (await engine.granted()).manifest == committed(1, GPU)
            engine.dealer.close()

    play(scenario())


def test_a_consumer_waits_while_the_trainer_writes(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            coordinator.commit(1)
            coordinator.publisher.begun(2)
            engine = await asker(shared)
            engine.ask()
            await engine.hears_nothing()
            coordinator.commit(2)
            assert (await engine.granted()).manifest == committed(2)
            engine.dealer.close()

    play(scenario())


def test_a_consumer_waits_for_the_update_longer_than_a_start_may_take(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=0.3, update=20.0)) as coordinator:
            coordinator.commit(1)
            coordinator.publisher.begun(2)
            engine = await asker(shared)
            engine.ask()
            await engine.hears_nothing()
            assert coordinator.talk.weights.waiting == 1
            coordinator.commit(2)
            assert (await engine.granted()).manifest == committed(2)
            engine.dealer.close()

    play(scenario())


@pytest.mark.parametrize("end", ["ready", "death"])
def test_one_engine_at_a_time_starts_on_a_gpu(shared: SharedDirectory, replicas: Processes, end: str) -> None:
    """Each takes its share of the memory that it finds free there."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await ready_for_engines(coordinator, replicas)
            first, second, elsewhere = [await asker(shared, name=name) for name in ("first", "second", "elsewhere")]
            for engine in (first, second):
                engine.ask(gpu=GPU)
            await first.granted()
            elsewhere.ask(gpu="GPU-8")
            await elsewhere.granted()
            await second.hears_nothing()
            if end == "ready":
                first.dealer.send(Ready(epoch=1))
            else:
                first.dealer.close()
            assert (await second.granted()).manifest == committed(1, GPU)
            for engine in (first, second, elsewhere):
                engine.dealer.close()

    play(scenario())


def test_an_engine_that_is_ready_waits_neither_for_one_that_starts_nor_for_the_trainer(
    shared: SharedDirectory, replicas: Processes
) -> None:
    """It asks while it applies weights, after which it may be told to sleep, and takes no share of what is free."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            await ready_for_engines(coordinator, replicas)
            ready, starts = await asker(shared, name="ready"), await asker(shared, name="starts")
            ready.dealer.send(Ready(epoch=1))
            await coordinator.ready("rollout")
            starts.ask(gpu=GPU)
            await starts.granted()
            coordinator.publisher.begun(2)
            ready.ask(gpu=GPU)
            await ready.granted()
            for engine in (ready, starts):
                engine.dealer.close()

    play(scenario())


def test_a_request_that_is_repeated_is_answered_once_and_one_that_comes_later_again(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            engine = await asker(shared)
            engine.ask(4)
            engine.ask(4)
            await until(lambda: coordinator.talk.weights.waiting == 1, "the request")
            coordinator.commit(0)
            assert (await engine.granted()).request == 4
            await engine.hears_nothing()
            engine.ask(4)
            assert (await engine.granted()).request == 4
            engine.dealer.close()

    play(scenario())


def test_the_dead_are_forgotten(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            process = replicas.start("rollout", 0, "want:")
            await until(lambda: coordinator.talk.weights.waiting == 1, "the request")
            process.kill()
            await until(lambda: coordinator.talk.weights.waiting == 0, "its end")
            coordinator.commit(0)
            replicas.start("rollout", 1, "want:")
            await coordinator.ready("rollout")
            assert replicas.noted("rollout", 1) == ["granted none 0 False"]

    play(scenario())


def test_who_is_cut_off_for_a_moment_is_answered_when_it_is_back(
    shared: SharedDirectory, bystander: subprocess.Popen[bytes]
) -> None:
    """A connection that is gone is not yet a death where there is a process that lives."""

    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            engine = Asker(shared, "rollout", "cut-off")
            pid, started = bystander.pid, process_start(bystander.pid)
            known = hello("rollout", "cut-off", pid_space=pid_space())
            engine.dealer.send(msgspec.structs.replace(known, pid=pid, pid_start=started))
            await next_of(engine.dealer, Welcome)
            engine.ask()
            await until(lambda: coordinator.talk.weights.waiting == 1, "the request")
            (member,) = coordinator.members.by_peer.values()
            engine.dealer.close()
            await until(lambda: not coordinator.members.send(member, Heartbeat(epoch=1, sent=0.0)), "the cut")
            coordinator.commit(0)
            back = bus.Dealer(shared.endpoint, "cut-off")
            back.send(Heartbeat(epoch=1, sent=0.0))
            assert (await next_of(back, WeightsGranted)).manifest == committed(0)
            with pytest.raises(TimeoutError):  # it still loads
                await next_of(back, ApplyWeights, NO_ANSWER_S)
            back.close()

    play(scenario())
