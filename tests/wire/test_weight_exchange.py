"""A replica that asks for the memory of shared weights: what it sends, what it takes for an answer, when it ends."""

from __future__ import annotations

import time

import pytest

from common import bus
from common.messages import (
    ApplyWeights,
    Failed,
    Heartbeat,
    Hello,
    HostBuffer,
    Ready,
    Rehello,
    WeightsApplied,
    WeightsDenied,
    WeightsGranted,
    WeightsWanted,
)
from common.run_files import SharedDirectory
from tests.wire.scripted_values import committed, exported
from tests.wire.wire_support import PATIENT, Processes, join, listening, next_from, patient, play, soon, welcome

GPU = "GPU-7"


def granted(request: int, epoch: int = 1) -> WeightsGranted:
    handle = exported(HostBuffer(name="policy", nbytes=4128, gpu=GPU), 5)
    return WeightsGranted(epoch=epoch, request=request, handle=handle, manifest=committed(3, GPU), created=False)


async def asked(router: bus.Router, shared: SharedDirectory) -> tuple[bytes, WeightsWanted]:
    """Welcomes a replica that asks while it loads."""
    peer, _ = await next_from(router, Hello)
    router.send(peer, welcome(shared, PATIENT))
    return await next_from(router, WeightsWanted)


def test_what_is_granted_while_loading_reaches_the_service(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("rollout", 0, f"want:{GPU}")
            peer, wanted = await asked(router, shared)
            assert (wanted.name, wanted.gpu, wanted.nbytes) == ("policy", GPU, 0)
            router.send(peer, WeightsDenied(epoch=1, request=wanted.request + 1, reason="nobody asked this"))
            router.send(peer, granted(wanted.request))
            router.send(peer, granted(wanted.request))  # one that comes again is dropped
            await next_from(router, Ready)
            assert replicas.noted("rollout") == ["granted handle-5 3 False"]

    play(scenario())


def test_a_writer_says_how_much_it_needs(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("trainer", 0, "want:", "size:4128")
            peer, wanted = await asked(router, shared)
            assert (wanted.gpu, wanted.nbytes) == ("", 4128)
            router.send(peer, WeightsGranted(epoch=1, request=wanted.request))
            await next_from(router, Ready)
            assert replicas.noted("trainer") == ["granted none none True"]

    play(scenario())


def test_a_refusal_ends_it_with_the_reason(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("rollout", 0, f"want:{GPU}")
            peer, wanted = await asked(router, shared)
            router.send(peer, WeightsDenied(epoch=1, request=wanted.request, reason="no holder is ready"))
            _, failed = await next_from(router, Failed)
            assert (failed.work, failed.message) == (0, "weight set 'policy' is refused: no holder is ready")
            code, log = await replicas.ended(process)
            assert code == 1
            assert failed.message in log

    play(scenario())


@pytest.mark.parametrize(
    ("words", "waited"),
    [
        ((), f"waited 1.5 s (timeouts.start + timeouts.update) for a committed version on {GPU}"),
        (("size:4128",), f"waited 1 s (timeouts.start) for 4128 bytes on {GPU} to write it"),
    ],
)
def test_without_an_answer_it_gives_up_at_its_deadline(
    shared: SharedDirectory, replicas: Processes, words: tuple[str, ...], waited: str
) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            process = replicas.start("trainer" if words else "rollout", 0, f"want:{GPU}", *words)
            peer, _ = await next_from(router, Hello)
            router.send(peer, welcome(shared, patient(start=1.0, update=0.5)))
            await next_from(router, WeightsWanted)
            while not isinstance((await soon(router.receive()))[1], Failed):  # it is not silence that ends it
                router.send(peer, Heartbeat(epoch=1, sent=time.monotonic()))
            code, log = await replicas.ended(process)
            assert code == 1
            assert f"weight set 'policy': {waited}" in log

    play(scenario())


def test_orders_that_come_while_it_loads_are_carried_out_when_it_has(
    shared: SharedDirectory, replicas: Processes
) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("rollout", 0, f"want:{GPU}")
            peer, wanted = await asked(router, shared)
            router.send(peer, ApplyWeights(epoch=1, work=1, manifest=committed(3)))
            router.send(peer, granted(wanted.request))
            await next_from(router, Ready)
            assert (await next_from(router, WeightsApplied))[1].version == 3

    play(scenario())


def test_a_new_coordinator_is_asked_again(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("rollout", 0, f"want:{GPU}")
            peer, first = await asked(router, shared)
            router.send(peer, Rehello(epoch=2))
            await next_from(router, Hello)
            router.send(peer, welcome(shared, PATIENT, epoch=2))
            _, again = await next_from(router, WeightsWanted)
            assert (again.epoch, again.request, again.name, again.gpu) == (2, first.request, "policy", GPU)
            router.send(peer, granted(again.request, epoch=2))
            assert (await next_from(router, Ready))[1].epoch == 2
            router.send(peer, Rehello(epoch=2))
            await next_from(router, Hello)
            router.send(peer, welcome(shared, PATIENT, epoch=2))
            peer, message = await soon(router.receive())
            while isinstance(message, Heartbeat):
                peer, message = await soon(router.receive())
            assert isinstance(message, Ready)  # what was answered is not asked again

    play(scenario())


def test_it_asks_and_is_answered_while_it_applies_weights(shared: SharedDirectory, replicas: Processes) -> None:
    async def scenario() -> None:
        async with listening(shared) as router:
            replicas.start("rollout", 0, f"want-again:{GPU}")
            peer, _ = await join(router, shared)
            router.send(peer, ApplyWeights(epoch=1, work=1, manifest=committed(3)))
            _, wanted = await next_from(router, WeightsWanted)
            router.send(peer, granted(wanted.request))
            _, applied = await next_from(router, WeightsApplied)
            assert applied.version == 3
            assert "granted handle-5 3 False" in replicas.noted("rollout")
            router.send(peer, ApplyWeights(epoch=1, work=2, manifest=committed(4)))
            _, wanted = await next_from(router, WeightsWanted)
            router.send(peer, WeightsDenied(epoch=1, request=wanted.request, reason="scripted"))
            _, failed = await next_from(router, Failed)
            assert (failed.work, failed.kind) == (0, "error"), "without its weights the replica is of no more use"
            assert "weight set 'policy' is refused: scripted" in failed.message

    play(scenario())
