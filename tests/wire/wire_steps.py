"""Whole steps of the real step runner with replicas that the test speaks for, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec

from common import bus
from common.config import Config, PPOConfig, RolloutConfig
from common.messages import (
    ApplyWeights,
    Done,
    Failed,
    FinishedSample,
    Generate,
    Generated,
    Heartbeat,
    Lease,
    Logprobs,
    LogprobsDone,
    Manifest,
    Proof,
    Ready,
    Receipt,
    Result,
    Role,
    SamplesFinished,
    SaveState,
    Score,
    ScoreBatch,
    Scores,
    Sleep,
    Slept,
    StateSaved,
    StateStaged,
    TensorEntry,
    UpdateBegun,
    UpdateCommitted,
    Updated,
    UpdatePolicy,
    WeightsApplied,
    WeightsProved,
    Welcome,
)
from common.run_files import SharedDirectory
from services.coordinator.kl_control import kl_controller
from services.coordinator.sample import close_samples
from services.coordinator.step import StepOutcome, StepRunner
from tests.wire.wire_collect import Setting
from tests.wire.wire_support import hello, next_of, patient, soon, star, until

WHEN_TOLD_TO_SLEEP = Literal["sleep", "die", "fail"]
GPU = "GPU-7"
AWAKE_BYTES, ASLEEP_BYTES = 5 << 30, 2 << 30


def weights(version: int) -> tuple[Manifest, Proof]:
    tensor = TensorEntry(name="weight", dtype="float32", shape=(2, 2), offset=0)
    manifest = Manifest(
        name="policy", version=version, path="", identity="file 17", gpu="", nbytes=16, tensors=(tensor,)
    )
    return manifest, Proof(version=version, checksums=(version,), canary_logprobs=())


class Actor:
    """A replica on another host. It does its work at once and notes what it got, in the order of all actors' work."""

    def __init__(
        self, shared: SharedDirectory, role: Role, name: str, told: list[tuple[str, str]],
        when_told_to_sleep: WHEN_TOLD_TO_SLEEP = "sleep", used: tuple[int, int] = (AWAKE_BYTES, ASLEEP_BYTES),
    ) -> None:  # fmt: skip
        self.role: Role = role
        self.name = name
        self.told = told
        self.when_told_to_sleep = when_told_to_sleep
        self.used = used
        self.may_start, self.may_sleep, self.may_update = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for allowed in (self.may_start, self.may_sleep, self.may_update):
            allowed.set()
        self.dealer = bus.Dealer(shared.endpoint, name)

    async def act(self) -> None:
        """Joins, then takes orders until it is cancelled or dies."""
        self.dealer.send(hello(self.role, self.name))
        await next_of(self.dealer, Welcome)
        await self.may_start.wait()
        manifest, proof = weights(0) if self.role == "trainer" else (None, None)
        self.dealer.send(Ready(epoch=1, manifest=manifest, proof=proof))
        while True:
            match await self.dealer.receive():
                case Lease(task=Sleep()) if self.when_told_to_sleep == "die":
                    self.note("died")
                    self.dealer.close()
                    return
                case Lease(task=Sleep(), work=work) if self.when_told_to_sleep == "fail":
                    self.dealer.send(Failed(epoch=1, work=work, kind="error", message="the pool cannot be freed"))
                case Lease() as lease:
                    self.note(type(lease.task).__name__)
                    started = time.monotonic()
                    if isinstance(lease.task, Sleep):
                        await self.may_sleep.wait()
                    if isinstance(lease.task, UpdatePolicy):
                        await self.may_update.wait()
                    result = self.carry_out(lease)
                    self.note(type(result).__name__)
                    ended = time.monotonic()
                    self.dealer.send(Done(epoch=1, work=lease.work, result=result, started=started, ended=ended))
                case ApplyWeights(work=work, manifest=manifest):
                    self.note("ApplyWeights")
                    self.dealer.send(self.applied(work, manifest))
                case Heartbeat() as beat:
                    self.dealer.send(beat)
                case _:
                    pass

    def note(self, what: str) -> None:
        self.told.append((self.name, what))

    def carry_out(self, lease: Lease) -> Result:
        match lease.task:
            case Generate(items=items, version=version):
                finished = [
                    FinishedSample(
                        ref=item.ref, length=1, finish_reason="stop", version_low=version, version_high=version
                    )
                    for item in items
                ]
                self.dealer.send(SamplesFinished(epoch=1, work=lease.work, samples=finished))
                return Generated(samples=len(items), tokens=len(items))
            case ScoreBatch(items=items):
                return Scores(scores=[Score(ref=item.ref, reward=1.0, accuracy=1.0) for item in items])
            case Logprobs(refs=refs):
                return LogprobsDone(tokens=len(refs))
            case UpdatePolicy(version=version):
                manifest, proof = weights(version)
                self.dealer.send(UpdateBegun(epoch=1, version=version))
                self.dealer.send(UpdateCommitted(epoch=1, work=lease.work, manifest=manifest))
                self.dealer.send(WeightsProved(epoch=1, proof=proof))
                return Updated(metrics={"loss": 0.5}, tokens=0)
            case Sleep():
                before, after = self.used
                return Slept(used_before_bytes=before, used_after_bytes=after)
            case SaveState(step=step, path=path):
                (Path(path) / self.role).mkdir(parents=True)
                self.dealer.send(StateSaved(epoch=1, step=step, nbytes=0, seconds=0.0))
                return StateStaged(stall_s=0.0)
            case task:
                raise AssertionError(f"{self.name} got {task}")

    def applied(self, work: int, manifest: Manifest) -> WeightsApplied:
        receipt = Receipt(
            transport="alias",
            identity=manifest.identity,
            offsets=tuple(tensor.offset for tensor in manifest.tensors),
            checksums=(manifest.version,),
            canary_logprobs=(),
        )
        return WeightsApplied(epoch=1, work=work, version=manifest.version, receipt=receipt)


class Steps:
    """A step runner with its cache, and the actors that take part."""

    def __init__(self, setting: Setting, told: list[tuple[str, str]], actors: Sequence[Actor]) -> None:
        self.setting = setting
        self.actors = {actor.name: actor for actor in actors}
        self.star = setting.star
        self.told = told
        kl = kl_controller(setting.config.ppo.kl, samples_per_step=len(setting.samples))
        self.runner = StepRunner(
            setting.config, setting.cache, self.star.journal, self.star.members, self.star.dispatcher,
            self.star.publisher, self.star.learners, kl,
        )  # fmt: skip

    async def publish_first(self) -> None:
        self.star.talk.everybody_ready.set()
        await soon(self.star.publisher.publish())
        self.told.clear()

    async def step(self, number: int) -> StepOutcome:
        """One whole step on the setting's samples, in slots of their own."""
        outcome = await soon(self.runner.run(number, self.setting.samples, lambda: None))
        self.star.learners.end()
        close_samples(self.setting.cache, self.setting.samples)
        self.setting.open(number + 1)
        return outcome

    def told_to(self, name: str, *kinds: str) -> list[str]:
        """What one actor got of these kinds, in order."""
        return [what for who, what in self.told if who == name and what in kinds]


def sleeping_config(sleep: Literal["auto", "always", "never"]) -> Config:
    """No critic and no reference, so that rollout, reward and trainer are all there is."""
    return msgspec.structs.replace(
        patient(start=20.0, update=20.0),
        rollout=RolloutConfig(sleep=sleep),
        ppo=PPOConfig(advantage="reinforce_pp", kl=msgspec.structs.replace(PPOConfig().kl, placement="none")),
    )


@asynccontextmanager
async def steps(
    shared: SharedDirectory, config: Config, rollouts: Sequence[WHEN_TOLD_TO_SLEEP] = ("sleep",)
) -> AsyncGenerator[Steps]:
    """Rollout actors named rollout-0, rollout-1, …, one reward actor and one trainer, all ready and published to."""
    setting = Setting(shared, config, frozenset(), 32)
    told: list[tuple[str, str]] = []
    actors = [Actor(shared, "trainer", "trainer", told), Actor(shared, "reward", "reward", told)]
    actors += [Actor(shared, "rollout", f"rollout-{number}", told, how) for number, how in enumerate(rollouts)]
    try:
        async with star(shared, config, str(shared.tokens)) as setting.star:
            setting.open()
            acting = [asyncio.create_task(actor.act()) for actor in actors]
            await setting.star.ready("rollout", len(rollouts))
            for role in ("trainer", "reward"):
                await setting.star.ready(role)
            found = Steps(setting, told, actors)
            await found.publish_first()
            yield found
            failed = [task.exception() for task in acting if task.done()]
            assert not any(failed), f"an actor failed: {failed}"
            for task in acting:
                task.cancel()
            await asyncio.gather(*acting, return_exceptions=True)
        close_samples(setting.cache, setting.samples)
    finally:
        for actor in actors:
            actor.dealer.close()
        setting.cache.close()


@asynccontextmanager
async def joining(running: Steps, starts_on: str = "") -> AsyncGenerator[Actor]:
    """One more rollout replica; with a GPU it has been granted weights there and starts until it ``may_start``."""
    late = Actor(running.setting.shared, "rollout", "late", running.told)
    if starts_on:
        late.may_start.clear()
    acting = asyncio.create_task(late.act())
    if starts_on:
        members, publisher = running.star.members.by_peer, running.star.publisher
        await until(lambda: b"late" in members, "its Hello")
        members[b"late"].granted_gpu = starts_on
        assert publisher.manifest is not None
        publisher.manifest = msgspec.structs.replace(publisher.manifest, gpu=GPU)
    try:
        yield late
    finally:
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
        late.dealer.close()
