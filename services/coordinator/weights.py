"""Answers whoever asks for the memory of a weight set, once everything that the answer needs is there.

    writer     needs the holder, which allocates; nothing where it has no GPU       -> a handle
    consumer   needs a commit; on a GPU also trainer and critic, and the holder     -> the manifest, a handle of its own
               one that starts also needs that nobody else starts on its GPU, since each takes of what it finds free

Every request ends in exactly one answer before its asker gives up; only a dead asker gets none.
"""

from __future__ import annotations

import asyncio
import logging

from common.config import Config
from common.config_values import Limit, learner_roles, weights_limit
from common.messages import (
    CudaHandle,
    HostBuffer,
    Hosted,
    Manifest,
    Role,
    WeightsDenied,
    WeightsGranted,
    WeightsWanted,
)
from services.coordinator.dispatch import Dispatcher
from services.coordinator.leases import LeaseLost, result_of
from services.coordinator.member import Member
from services.coordinator.members import Members
from services.coordinator.publisher import Publisher

log = logging.getLogger("weights")

WRITERS: dict[str, Role] = {"policy": "trainer"}
"""Who writes each weight set of a run."""
ANSWER_SHARE = 0.9
"""Part of ``weights_limit`` after which a request is refused: its asker waits for all of it, and so learns why."""


class WeightsDesk:
    """One task for each request that waits."""

    def __init__(self, config: Config, members: Members, dispatcher: Dispatcher, publisher: Publisher) -> None:
        self.config = config
        self.members = members
        self.dispatcher = dispatcher
        self.publisher = publisher
        self.learners = learner_roles(config)
        self._waiting: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def wanted(self, member: Member, message: WeightsWanted) -> None:
        """Takes a request; one that is asked again while it waits is the same request."""
        key = member.peer, message.request
        if key not in self._waiting:
            task = self._waiting[key] = asyncio.create_task(self._serve(member, message))
            task.add_done_callback(lambda done: self._waiting.pop(key, None))

    @property
    def waiting(self) -> int:
        """Requests that have no answer yet."""
        return len(self._waiting)

    def changed(self) -> None:
        """To be called when somebody has got ready, is back or has died, or weights have been committed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def member_died(self, member: Member) -> None:
        """Nobody answers the dead."""
        for (peer, _), task in list(self._waiting.items()):
            if peer == member.peer:
                task.cancel()

    def close(self) -> None:
        for task in list(self._waiting.values()):
            task.cancel()

    # ------------------------------------------------------------ answering

    async def _serve(self, member: Member, message: WeightsWanted) -> None:
        answer = await self._answer(member, message)
        if isinstance(answer, WeightsDenied):
            log.error("%s does not get weight set %r: %s", member.name, message.name, answer.reason)
            member.granted_gpu = ""  # it takes no memory there
        while not self.members.send(member, answer):  # it comes back, or dies, and with it this task
            await self._changed.wait()

    async def _answer(self, member: Member, message: WeightsWanted) -> WeightsGranted | WeightsDenied:
        epoch, request = self.members.epoch, message.request
        reason = self._reason_to_refuse(member, message)
        if not reason:
            asked = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(self._limit(message).seconds) as clock:
                    while reason := self._missing(member, message):
                        await self._changed.wait()
                        clock.reschedule(asked + self._limit(message).seconds)
                    return await (self._for_writer(message) if message.nbytes else self._for_consumer(member, message))
            except TimeoutError:
                late, limit = reason or "the holder has not answered", self._limit(message)
                reason = f"after {limit.seconds:.1f} s ({limit.keys}) {late}"
            except LeaseLost as error:
                reason = str(error)
            except Exception as error:  # silence would let the asker wait for all of its time
                log.exception("details")
                reason = f"the coordinator failed: {type(error).__name__}: {error}"
        return WeightsDenied(epoch=epoch, request=request, reason=reason)

    def _limit(self, message: WeightsWanted) -> Limit:
        """A consumer of a set that has been committed gets it after the update that may be under way."""
        committed = not message.nbytes and self.publisher.manifest is not None
        limit = weights_limit(self.config, committed=committed)
        return Limit(ANSWER_SHARE * limit.seconds, f"{ANSWER_SHARE:g} of {limit.keys}")

    async def _for_writer(self, message: WeightsWanted) -> WeightsGranted:
        epoch, request = self.members.epoch, message.request
        if not message.gpu:
            return WeightsGranted(epoch=epoch, request=request)
        hosted = await self._hosted(message.name, message.nbytes, message.gpu)
        return WeightsGranted(epoch=epoch, request=request, handle=hosted.handle, created=hosted.created)

    async def _for_consumer(self, member: Member, message: WeightsWanted) -> WeightsGranted:
        manifest = self.publisher.manifest
        assert manifest is not None, "a consumer's request waits for it"
        if not member.ready:
            member.granted_gpu = message.gpu
        handle: CudaHandle | None = None
        if manifest.gpu:
            handle = (await self._hosted(manifest.name, manifest.nbytes, manifest.gpu)).handle
            manifest = self._newest(manifest)
        return WeightsGranted(
            epoch=self.members.epoch, request=message.request, handle=handle, manifest=manifest, created=False
        )

    def _newest(self, manifest: Manifest) -> Manifest:
        """The same memory may have got a newer version while the holder exported it."""
        newest = self.publisher.manifest
        return newest if newest is not None and newest.identity == manifest.identity else manifest

    async def _hosted(self, name: str, nbytes: int, gpu: str) -> Hosted:
        task = HostBuffer(name=name, nbytes=nbytes, gpu=gpu)
        done = await self.dispatcher.submit("holder", "PUBLISH", 0, task, ANSWER_SHARE * self.config.timeouts.start)
        return result_of(done, Hosted)

    # ------------------------------------------------------------ refusing and waiting

    def _reason_to_refuse(self, member: Member, message: WeightsWanted) -> str:
        writer = WRITERS.get(message.name)
        if writer is None:
            return f"there is no weight set {message.name!r}, only {', '.join(WRITERS)}"
        if message.nbytes < 0:
            return f"it asks for {message.nbytes} bytes, expected the set's size, or 0 to read it"
        if message.nbytes and member.role != writer:
            return f"{member.name} cannot write weight set {message.name!r}, which belongs to the {writer}"
        return ""

    def _missing(self, member: Member, message: WeightsWanted) -> str:
        """What a request still waits for; empty where it can be answered."""
        manifest, gpu = self.publisher.manifest, message.gpu
        if not message.nbytes:
            # One that is ready asks in order to apply what it was told to, and may fall asleep only after that.
            if manifest is None or (self.publisher.writing is not None and not member.ready):
                return self._uncommitted(message.name)
            absent = [role for role in self.learners if not self.members.of_role(role) and role != member.role]
            if gpu and absent:
                return f"no {absent[0]} is ready, and engines take the GPU memory that is left by then; see its log"
            before = [other for other in self.members.starting_on(gpu) if other is not member]
            if before and not member.ready:
                return f"{before[0].name} still starts on {gpu}, where one at a time takes its share of the free memory"
            gpu = manifest.gpu
        if gpu and not self.members.of_role("holder"):
            return "no holder is ready, the service that hosts shared GPU memory; see its log, or start one"
        return ""

    def _uncommitted(self, name: str) -> str:
        if self.publisher.writing is not None:
            return f"the trainer still writes {name}@{self.publisher.writing}"
        if self.members.of_role("trainer"):
            return f"the trainer has not committed weight set {name!r}"
        return f"no trainer is ready, which commits weight set {name!r}; see its log"
