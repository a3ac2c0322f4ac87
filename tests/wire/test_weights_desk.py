"""The coordinator answers whoever asks for the memory of shared weights; the holder here only counts its exports."""

from __future__ import annotations

import pytest

from common import bus
from common.messages import CudaHandle, Refused, Role, WeightsDenied, WeightsGranted, WeightsWanted, Welcome
from common.run_files import SharedDirectory
from tests.wire.scripted_replica import committed
from tests.wire.wire_leases import CONFIG
from tests.wire.wire_support import Processes, hello, next_of, patient, play, star, until

GPU = "GPU-7"
NO_ANSWER_S = 0.4


class Asker:
    """A replica of the test's own, on another host, that has joined and is not ready."""

    def __init__(self, shared: SharedDirectory, role: Role, name: str) -> None:
        self.role: Role = role
        self.name = name
        self.dealer = bus.Dealer(shared.endpoint, name)

    async def join(self) -> Asker:
        self.dealer.send(hello(self.role, self.name))
        await next_of(self.dealer, Welcome)
        return self

    def ask(self, request: int = 1, *, name: str = "policy", gpu: str = "", nbytes: int = 0) -> None:
        self.dealer.send(WeightsWanted(epoch=1, request=request, name=name, gpu=gpu, nbytes=nbytes))

    async def granted(self) -> WeightsGranted:
        return await next_of(self.dealer, WeightsGranted)

    async def denied(self, request: int = 1) -> str:
        found = await next_of(self.dealer, WeightsDenied)
        assert found.request == request
        return found.reason

    async def hears_nothing(self) -> None:
        with pytest.raises(TimeoutError):
            await next_of(self.dealer, WeightsGranted, NO_ANSWER_S)


async def asker(shared: SharedDirectory, role: Role = "rollout", name: str = "by-hand") -> Asker:
    return await Asker(shared, role, name).join()


def handle_of(granted: WeightsGranted) -> CudaHandle:
    assert granted.handle is not None
    return granted.handle


# ---------------------------------------------------------------- what is granted


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
                assert (handle.handle, handle.gpu, handle.nbytes) == (b"handle-%d" % number, GPU, 4128)
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


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("role", "asked", "reason"),
    [
        ("rollout", {"name": "polisy"}, "there is no weight set 'polisy', only policy"),
        ("rollout", {"nbytes": 64}, "rollout 0 cannot write weight set 'policy', which belongs to the trainer"),
        ("trainer", {"nbytes": -1}, "it asks for -1 bytes"),
    ],
)
def test_what_can_never_be_granted_is_refused_at_once(
    shared: SharedDirectory, role: Role, asked: dict[str, object], reason: str
) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG):
            replica = await asker(shared, role)
            replica.ask(**asked)  # pyright: ignore[reportArgumentType]
            assert reason in await replica.denied()
            replica.dealer.close()

    play(scenario())


@pytest.mark.parametrize(
    ("role", "nbytes", "commits", "reason"),
    [
        ("trainer", 64, False, "no holder is ready"),
        ("rollout", 0, False, "no trainer is ready, which commits weight set 'policy'"),
        ("rollout", 0, True, "no trainer is ready, and engines take the GPU memory that is left"),
    ],
)
def test_who_is_missing_at_the_deadline_is_named(
    shared: SharedDirectory, role: Role, nbytes: int, commits: bool, reason: str
) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=0.5)) as coordinator:
            if commits:
                coordinator.commit(0, GPU)
            replica = await asker(shared, role)
            replica.ask(9, gpu=GPU, nbytes=nbytes)
            assert f"(0.9 of timeouts.start) {reason}" in await replica.denied(9)
            assert coordinator.talk.weights.waiting == 0
            replica.dealer.close()

    play(scenario())


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise:PUBLISH", "holder 0 failed in PUBLISH of step 0: ValueError: a scripted exception"),
        ("die:PUBLISH", "holder 0 died"),
        ("block:PUBLISH", "the holder has not answered"),
        ("wrong:PUBLISH", "holder 0 answered PUBLISH of step 0 with Evaluated, expected Hosted"),
    ],
)
def test_a_holder_that_cannot_is_told(shared: SharedDirectory, replicas: Processes, word: str, reason: str) -> None:
    async def scenario() -> None:
        async with star(shared, patient(start=6.0 if "block" not in word else 1.5)) as coordinator:
            replicas.start("holder", 0, word)
            await coordinator.ready("holder")
            writer = await asker(shared, "trainer")
            writer.ask(gpu=GPU, nbytes=64)
            assert reason in await writer.denied()
            writer.dealer.close()

    play(scenario())


def test_a_failure_of_the_coordinator_itself_is_no_silence(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG) as coordinator:
            engine = await asker(shared)
            coordinator.commit(0)
            del coordinator.publisher.writing
            engine.ask()
            assert "the coordinator failed: AttributeError" in await engine.denied()
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


def test_a_second_holder_is_refused(shared: SharedDirectory) -> None:
    async def scenario() -> None:
        async with star(shared, CONFIG):
            first = await asker(shared, "holder", "first")
            second = bus.Dealer(shared.endpoint, "second")
            second.send(hello("holder", "second"))
            assert "there is a holder already" in (await next_of(second, Refused)).reason
            first.dealer.close()
            second.close()

    play(scenario())
