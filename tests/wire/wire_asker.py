"""A replica, spoken by the test, that asks the coordinator for the memory of shared weights."""

from __future__ import annotations

import pytest

from common import bus
from common.messages import Role, WeightsDenied, WeightsGranted, WeightsWanted, Welcome
from common.run_files import SharedDirectory
from tests.wire.wire_support import Processes, Star, hello, next_of

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


async def ready_for_engines(coordinator: Star, replicas: Processes) -> None:
    """Whom engines on a GPU wait for is ready, and the policy is committed on that GPU."""
    for role in ("holder", "trainer", "critic"):
        replicas.start(role)
        await coordinator.ready(role)
    coordinator.commit(1, GPU)
