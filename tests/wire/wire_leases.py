"""Leases to hand out, and a replica that the test speaks for."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from common import bus
from common.messages import (
    Done,
    Evaluate,
    Generate,
    GenerateItem,
    Ready,
    Sampling,
    ScoreBatch,
    SlotRef,
    Welcome,
)
from common.run_files import SharedDirectory
from services.coordinator.leases import LeaseLost
from tests.wire.wire_support import Star, hello, next_of, patient, soon

CONFIG = patient(start=20.0, update=20.0)
NOTICED_WITHIN_S = 5.0
"""How long a death may stay unnoticed."""


_slots = itertools.count()


def evaluation() -> Evaluate:
    """A micro-batch unlike any before it: what was done of the same one would be recalled and not done again."""
    return Evaluate(refs=[SlotRef(next(_slots), 1)])


def submit(coordinator: Star, deadline_s: float = 20.0) -> asyncio.Future[Done]:
    return coordinator.dispatcher.submit("critic", "EVALUATE", 1, evaluation(), deadline_s)


def score(coordinator: Star, deadline_s: float = 20.0) -> asyncio.Future[Done]:
    """Work for reward replicas: any number of them may join, and each takes one at a time."""
    return coordinator.dispatcher.submit("reward", "SCORE", 1, ScoreBatch(items=[]), deadline_s)


def generate(coordinator: Star, version: int, **more: Any) -> asyncio.Future[Done]:
    sampling = Sampling(temperature=1.0, max_new_tokens=4)
    items = [GenerateItem(ref=SlotRef(0, 1), sample=0)]
    task = Generate(items=items, sampling=sampling, version=version)
    return coordinator.dispatcher.submit("rollout", "GENERATE", 1, task, 20.0, **more)


async def lost(future: asyncio.Future[Done], kind: str, within: float = 20.0) -> LeaseLost:
    with pytest.raises(LeaseLost) as caught:
        await soon(future, within)
    assert caught.value.kind == kind
    return caught.value


class ByHand:
    """A replica on another host, spoken by the test: joins, and then says what the test makes it say."""

    def __init__(self, coordinator: Star, shared: SharedDirectory, name: str) -> None:
        self.coordinator = coordinator
        self.name = name
        self.dealer = bus.Dealer(shared.endpoint, name)

    async def join(self, role: Any) -> None:
        self.dealer.send(hello(role, self.name))
        await next_of(self.dealer, Welcome)
        self.dealer.send(Ready(epoch=1))
        await self.coordinator.ready(role)
