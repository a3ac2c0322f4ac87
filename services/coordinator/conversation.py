"""The coordinator's side of the bus: takes every message, answers it, and knows who is there and who is missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common import bus
from common.config import Config
from common.config_values import has_critic, start_limit, uses_gpu
from common.messages import (
    Ack,
    Done,
    Failed,
    Heartbeat,
    Hello,
    Leaving,
    Message,
    Probe,
    Ready,
    Receipt,
    Rehello,
    Role,
    SamplesFinished,
    StateSaved,
    Stop,
    UpdateBegun,
    UpdateCommitted,
    WeightsApplied,
    WeightsProved,
    WeightsWanted,
)
from common.restarts import Deaths
from services.coordinator.complaints import Complaints, stranger_name
from services.coordinator.dispatch import Dispatcher
from services.coordinator.failures import STATE_LOST, RunFailed
from services.coordinator.gate import Gate
from services.coordinator.learners import Learners
from services.coordinator.ledger import Ledger
from services.coordinator.member import Member
from services.coordinator.members import COMES_AND_GOES, Members
from services.coordinator.publisher import Publisher
from services.coordinator.weights import WeightsDesk

log = logging.getLogger("conversation")


class Conversation:
    """Runs as tasks beside the steps: ``listen``, ``probe`` and ``until_broken``; if one ends, the run ends."""

    def __init__(
        self, config: Config, router: bus.Router, members: Members, dispatcher: Dispatcher, publisher: Publisher,
        ledger: Ledger, learners: Learners,
    ) -> None:  # fmt: skip
        self.config = config
        self.router = router
        self.members = members
        self.dispatcher = dispatcher
        self.publisher = publisher
        self.ledger = ledger
        self.learners = learners
        self.weights = WeightsDesk(config, members, dispatcher, publisher)
        self.everybody_ready = asyncio.Event()
        self._broken = asyncio.Event()
        self._problem = ""
        self._applying: set[asyncio.Task[Receipt | None]] = set()
        self.on_stop: Callable[[], object] = lambda: None
        """Ends the run in order: somebody was told to end without whom it cannot go on."""
        self.step: Callable[[], int] = lambda: 0
        """The step that the run works on."""
        self.deaths = Deaths(config.restart.limit) if config.bus.group_access else None
        """Where docker starts services again nobody else counts."""
        members.on_join = dispatcher.inheritance.claim
        self.gate = Gate(members.welcome, uses_gpu(config))
        self.complaints = Complaints()
        members.on_sent = self.gate.sent
        members.hello_problem = lambda peer, hello: self.gate.hello_problem(peer, hello, members.by_peer.values())
        members.on_refused = lambda peer, reason: self.complaints.note(peer, stranger_name(peer), reason)
        members.on_ready = self.on_ready
        members.on_death = self.on_death

    # ------------------------------------------------------------ tasks

    async def listen(self) -> None:
        """Takes messages one after the other. Raises RunFailed where one cannot be dealt with."""
        while True:
            peer, message = await self.router.receive()
            if isinstance(message, bus.BadMessage):
                self.refuse(peer, f"no message ({message.size} bytes): {message.reason}")
                continue
            try:
                self.take(peer, message)
            except Exception as error:
                member = self.members.by_peer.get(peer)
                sender, kind = member.name if member else stranger_name(peer), type(message).__name__
                log.exception("details")
                raise RunFailed(f"cannot deal with {kind} of {sender}: {type(error).__name__}: {error}") from error

    async def probe(self) -> None:
        """Writes to silent members, since a connection that is gone shows only when something is sent."""
        interval = self.config.timeouts.heartbeat
        while True:
            await asyncio.sleep(interval)
            self.members.probe(2 * interval)
            self.complaints.sweep()

    async def until_broken(self) -> None:
        """Raises RunFailed as soon as somebody died whom the run cannot do without."""
        await self._broken.wait()
        raise RunFailed(self._problem)

    def close(self) -> None:
        self.weights.close()
        self.complaints.close()
        for task in self._applying:
            task.cancel()

    # ------------------------------------------------------------ messages

    def take(self, peer: bytes, message: Message) -> None:
        """One message of anybody. Who is not known, or speaks to another epoch, is told to say Hello first."""
        member = self.members.by_peer.get(peer)
        if isinstance(message, Hello):
            if self.complaints.may_answer(peer):
                self.members.hello(peer, message)
            return
        if isinstance(message, Probe):
            if self.complaints.may_answer(peer):
                self.members.health(peer, message)
            return
        if member is None or message.epoch != self.members.epoch:
            if self.complaints.may_answer(peer):
                self.members.answer(peer, Rehello(epoch=self.members.epoch))
            return
        if self.members.heard(member):
            self.catch_up(member)
            self.weights.changed()
        if objection := self.gate.check_in(member, message):
            self.refuse(peer, objection)
            instead = self.gate.instead(member, message, objection)
            if instead is None:
                return
            message = instead
        self.take_from(member, message)

    def refuse(self, peer: bytes, reason: str) -> None:
        """What comes of it is one line in the log, however often a peer does it."""
        member = self.members.by_peer.get(peer)
        self.complaints.note(peer, f"{member.name} (pid {member.hello.pid})" if member else stranger_name(peer), reason)

    def take_from(self, member: Member, message: Message) -> None:
        """What is repeated until acknowledged is acknowledged, also when it comes late or again."""
        match message:
            case Ready():
                self.members.ready(member.peer, message)
            case WeightsWanted():
                self.weights.wanted(member, message)
            case Heartbeat():
                if self.complaints.may_answer(member.peer):
                    self.members.beat(member)
            case SamplesFinished():
                self.dispatcher.finished(message)
            case Done(work=work):
                self.dispatcher.done(message)
                self.acknowledge(member, work)
            case Failed(work=0):
                member.last_words = message.message
                log.error("%s gives up: %s", member.name, message.message)
            case Failed(work=work):
                self.acknowledge(member, work)
                self.failed(member, message)
            case Leaving():
                self.leaving(member)
            case UpdateBegun(version=version):
                self.publisher.begun(version)
            case UpdateCommitted():  # the Ack of the update's Done covers it
                self.publisher.committed(message)
                self.ledger.committed(message.manifest.version)
                self.weights.changed()
            case StateSaved():
                self.learners.saving.saved(member, message)
            case WeightsProved(proof=proof):
                self.publisher.proved(proof)
            case WeightsApplied(work=work):
                self.acknowledge(member, work)
                self.publisher.applied(message)
            case _:
                log.error("%s sent an unexpected %s", member.name, type(message).__name__)
        self.let_go(member)

    def leaving(self, member: Member) -> None:
        """A replica too many gets nothing more; one that the run cannot do without takes the run with it, in order."""
        if member.role not in COMES_AND_GOES:
            log.info("%s was told to end, and so the run stops", member.name)
            self.on_stop()
        elif not member.leaving:
            member.leaving = True
            log.info("%s leaves when it has answered the %d leases that it holds", member.name, len(member.leases))

    def let_go(self, member: Member) -> None:
        """A lease that crossed its word counts as held: it is answered first."""
        if member.leaving and not member.leases:
            self.members.send(member, Stop(epoch=self.members.epoch, reason="it has answered what it held"))

    def failed(self, member: Member, message: Failed) -> None:
        """A replica that turns out not to have the weights that it proved gets no leases before it has proved some."""
        if self.publisher.applications.failed(message):
            return
        stale = member.role == "rollout" and message.kind == "stale"
        if stale:
            log.warning("%s is to apply the weights again: %s", member.name, message.message)
            member.version = -1
        self.dispatcher.failed(message)
        if stale:
            self.catch_up(member)

    def acknowledge(self, member: Member, work: int) -> None:
        self.members.send(member, Ack(epoch=self.members.epoch, work=work))

    # ------------------------------------------------------------ members

    def attendance(self) -> dict[Role, tuple[int, int]]:
        """For each role how many replicas are ready, and how many the run starts with."""
        config = self.config
        wanted: dict[Role, int] = {
            "rollout": config.rollout.replicas, "reward": max(1, config.reward.replicas), "trainer": 1,
        }  # fmt: skip
        if has_critic(config):
            wanted["critic"] = 1
        if uses_gpu(config):
            wanted["holder"] = 1
        return {role: (len(self.members.of_role(role)), count) for role, count in wanted.items()}

    async def until_everybody_ready(self) -> None:
        """Raises RunFailed where somebody is missing at ``start_limit``."""
        limit = start_limit(self.config)
        try:
            async with asyncio.timeout(limit.seconds):
                await self.everybody_ready.wait()
        except TimeoutError:
            attendance = self.attendance().items()
            missing = ", ".join(f"{found} of {wanted} {role}" for role, (found, wanted) in attendance if found < wanted)
            text = f"not everybody is ready after {limit.seconds:.0f} s ({limit.keys}): {missing}; see their logs"
            raise RunFailed(text) from None

    def on_ready(self, member: Member, ready: Ready) -> None:
        self.publisher.learn(ready)
        self.weights.changed()
        self.learners.member_ready(member)
        if self.everybody_ready.is_set():
            self.catch_up(member)
        elif all(found >= wanted for found, wanted in self.attendance().values()):
            self.everybody_ready.set()
        self.dispatcher.pump(member.role)

    def catch_up(self, member: Member) -> None:
        """Gives work to a member that joins a running run; a rollout replica must first prove the current weights.

        While the trainer writes it need not: the publish that follows includes it. One that still loads is told when
        it is ready.
        """
        if not member.ready:
            return
        manifest = self.publisher.manifest
        late = member.role == "rollout" and manifest is not None and member.version != manifest.version
        if late and manifest is not None and self.publisher.writing is None:
            task = asyncio.create_task(self.publisher.apply(member, manifest))
            self._applying.add(task)
            task.add_done_callback(lambda done: self.late_rollout(member, done))
        self.dispatcher.pump(member.role)

    def late_rollout(self, member: Member, applied: asyncio.Task[Receipt | None]) -> None:
        """A rollout replica that was told to apply beside a publish gets work once its receipt is right."""
        self._applying.discard(applied)
        if not applied.cancelled() and applied.exception() is not None:
            log.error("%s gets no work before the next publish: %s", member.name, applied.exception())
        self.dispatcher.pump("rollout")

    def on_death(self, member: Member, reason: str) -> None:
        """Leases of the dead are lost. The run ends at once if it cannot go on, or start, without this member."""
        level = logging.INFO if self.members.stopping or member.leaving else logging.WARNING
        log.log(level, "%s (pid %d) is gone: %s", member.name, member.hello.pid, reason)
        self.ledger.event("death", f"{member.name}: {reason}")
        self.gate.left(member)
        self.complaints.left(member.peer)
        self.weights.member_died(member)
        self.publisher.applications.member_died(member)
        self.learners.member_died(member)
        self.dispatcher.member_died(member, reason)
        self.weights.changed()
        if (why := self._why_it_ends_with(member)) and not self._problem:
            self._problem = f"{member.name} (pid {member.hello.pid}) is gone, {why}: {reason}"
            self._broken.set()

    def _why_it_ends_with(self, member: Member) -> str:
        """Empty where the run goes on without a member that died."""
        if lost := STATE_LOST.get(member.role, "") if member.ready else "":
            return lost
        if member.last_words and not self.everybody_ready.is_set():
            return "it did not get ready"
        if self.deaths is None or self.members.stopping or self.members.of_role(member.role):
            return ""
        number, limit = self.deaths.count(member.name, self.step()), self.deaths.limit
        return f"death {number} without a finished step, with restart.limit = {limit}" if number > limit else ""
