"""Leases: work goes to whoever is free, and comes back exactly once as a result or as a ``LeaseLost``.

The dispatcher never retries by itself: what to do about lost work depends on the work (fresh slots, another replica, or
the end of the run), so whoever submitted it decides. With a journal, work that was done under an earlier coordinator is
not done again, and work that somebody still holds is waited for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from common.messages import (
    Done,
    Failed,
    FinishedSample,
    Lease,
    Phase,
    Result,
    Role,
    SamplesFinished,
    Scores,
    Sleep,
    Task,
    Updated,
)
from services.coordinator.inheritance import Inheritance, Inherited
from services.coordinator.journal import RECALLED, Journal, LeaseState, task_digest
from services.coordinator.leases import ANSWERS, WORK_PER_EPOCH, Work
from services.coordinator.member import Member
from services.coordinator.members import Members
from services.coordinator.work_queues import WorkQueues

log = logging.getLogger("dispatch")

POLL_S = 0.02
Finished = Callable[[list[FinishedSample]], None]


class Dispatcher:
    """Knows who holds which work; what nobody has yet waits in its ``queues``."""

    def __init__(self, members: Members, start_timeout: float, journal: Journal | None = None) -> None:
        self.members = members
        self.start_timeout = start_timeout
        self.journal = journal
        self.inheritance = Inheritance(journal)
        self.progress = time.monotonic()
        """When work was last handed out or came back, or a sample ended."""
        self.on_done: Callable[[Role, Phase, Done], None] = lambda role, phase, done: None
        self.on_caught_up: Callable[[Member], None] = lambda member: None
        """Told of a learner whose update, given out by an earlier coordinator, has ended."""
        self._ids = itertools.count((members.epoch - 1) * WORK_PER_EPOCH + 1)
        self.queues = WorkQueues(members, self._give)
        self._leased: dict[int, Work] = {}
        self._late: dict[int, tuple[Member, Callable[[], None]]] = {}
        """Work whose lease ran out, by number: who has not answered it yet, and what to do once that is over."""

    def next_work(self) -> int:
        return next(self._ids)

    def submit(
        self, role: Role, phase: Phase, step: int, task: Task, deadline_s: float, on_finished: Finished | None = None,
        member: Member | None = None,
    ) -> asyncio.Future[Done]:  # fmt: skip
        """Queues work; the future raises LeaseLost. ``on_finished`` gets generated samples the moment they end.

        With ``member`` nobody else gets the work, and what waits for anybody does not hold it up: it is lost as
        ``dead`` when that one dies, also while it is queued. Work that the journal recalls is not queued at all.
        """
        known = self._recalled(role, step, task)
        if known is not None:
            return known
        number = self._inherited_number(role, step, task)
        work = self._work(number or self.next_work(), role, phase, step, task, deadline_s, on_finished, member)
        if number is not None:
            self._adopt(work)
            return work.future
        self.queues.add(work)
        if member is not None and self.members.by_peer.get(member.peer) is not member:
            self.queues.lose_for(member, "it had left before")
        self.pump(role)
        return work.future

    def _work(
        self, number: int, role: Role, phase: Phase, step: int, task: Task, deadline_s: float,
        on_finished: Finished | None, member: Member | None,
    ) -> Work:  # fmt: skip
        loop = asyncio.get_running_loop()
        lease = Lease(epoch=self.members.epoch, work=number, step=step, phase=phase, deadline_s=deadline_s, task=task)
        timer = loop.call_later(self.start_timeout + deadline_s, self._expire, number, role)
        work = Work(lease, role, loop.create_future(), on_finished, timer, member)
        work.future.add_done_callback(lambda future: self._over(work, future))
        return work

    def _over(self, work: Work, future: asyncio.Future[Done]) -> None:
        """Whoever waited may be cancelled and gone: then nobody else reads the exception, and nobody needs the work."""
        if not future.cancelled():
            future.exception()
        else:
            self.queues.drop(work)

    async def until_idle(self, timeout: float) -> list[Member]:
        """Waits until nobody holds work; returns those that still do then."""
        deadline = time.monotonic() + timeout
        while (busy := self._busy()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return busy

    def _busy(self) -> list[Member]:
        return [member for member in self.members.by_peer.values() if member.leases]

    def when_over(self, work: int, then: Callable[[], None]) -> None:
        """Calls ``then`` once the holder of timed-out or inherited work has answered or died, and so writes no more."""
        if work in self._late:
            self._late[work] = (self._late[work][0], then)
        elif (inherited := self.inheritance.works.get(work)) is not None:
            inherited.when_over.append(then)
        else:
            then()

    def outstanding(self) -> list[Work]:
        """What is handed out, and then what waits to be."""
        return [*self._leased.values(), *self.queues]

    def close(self) -> None:
        """Forgets all work and its timers; whoever still waits for some is cancelled."""
        for work in self.outstanding():
            work.timer.cancel()
            work.future.cancel()
        self.queues.clear()
        self._leased.clear()
        self._late.clear()

    # ------------------------------------------------------------ what an earlier coordinator gave out

    def _recalled(self, role: Role, step: int, task: Task) -> asyncio.Future[Done] | None:
        if self.journal is None or not isinstance(task, RECALLED):
            return None
        result = self.journal.result(task_digest(role, step, task))
        if result is None:
            return None
        now = time.monotonic()
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        future.set_result(Done(epoch=self.members.epoch, work=0, result=result, started=now, ended=now))
        return future

    def _inherited_number(self, role: Role, step: int, task: Task) -> int | None:
        return self.inheritance.number_of(task_digest(role, step, task)) if isinstance(task, RECALLED) else None

    def _adopt(self, work: Work) -> None:
        """From now on somebody waits for inherited work, as if it had been handed out now."""
        inherited = self.inheritance.take(work.lease.work)
        assert inherited is not None, "only what is inherited is adopted"
        log.info("%s still holds work %d (%s)", inherited.member.name, work.lease.work, work.name)
        self._leave_with(work, inherited.member)

    def adopt_generation(
        self, number: int, step: int, task: Task, deadline_s: float, on_finished: Finished
    ) -> asyncio.Future[Done]:
        """Waits for inherited work that generates samples; ``task`` says which are still wanted."""
        work = self._work(number, "rollout", "GENERATE", step, task, deadline_s, on_finished, None)
        self._adopt(work)
        return work.future

    # ------------------------------------------------------------ what goes out

    def pump(self, role: Role) -> None:
        """Hands out what waits, as far as there is somebody to take it."""
        self.queues.pump(role)

    def _give(self, work: Work, member: Member) -> bool:
        """False where the member's connection is gone."""
        if self.journal is not None:
            self.journal.leased(work.lease, member.role, member.hello.replica, member.hello.pid)
        if not self.members.send(member, work.lease):
            return False
        self._leave_with(work, member)
        return True

    def _leave_with(self, work: Work, member: Member) -> None:
        number = work.lease.work
        work.timer.cancel()
        work.member, work.given = member, time.monotonic()
        self.progress = work.given
        member.leases.add(number)
        if isinstance(work.lease.task, Sleep):
            member.version = -1  # it generates no more until it has proved a version again, which wakes it
        self._leased[number] = work
        loop = asyncio.get_running_loop()
        work.timer = loop.call_later(work.lease.deadline_s, self._expire, number, work.role)

    # ------------------------------------------------------------ what comes back

    def finished(self, message: SamplesFinished) -> None:
        work, inherited = self._leased.get(message.work), self.inheritance.works.get(message.work)
        wanted = work is not None and work.on_finished is not None and not work.future.done()
        if not wanted and inherited is None:
            log.info("dropped %d late samples of work %d", len(message.samples), message.work)
            return
        self.progress = time.monotonic()
        if self.journal is not None:
            self.journal.finished(message.samples)
        if work is not None and work.on_finished is not None:
            work.on_finished(message.samples)

    def done(self, message: Done) -> None:
        work = self._take_off(message.work, message.result)
        if work is None or work.member is None:
            return
        if not work.fits(message.result):
            found, expected = type(message.result).__name__, ANSWERS[type(work.lease.task)].__name__
            work.lose("failed", f"{work.member.name} answered {work.name} with {found}, expected {expected}")
            return
        self.on_done(work.role, work.lease.phase, message)
        work.future.set_result(message)

    def failed(self, message: Failed) -> None:
        work = self._take_off(message.work, None)
        if work is not None and work.member is not None:
            work.lose("failed", f"{work.member.name} failed in {work.name}: {message.message}")

    def _take_off(self, number: int, result: Result | None) -> Work | None:
        """Takes work off its holder; None for a late or repeated answer, or where nobody waits any more."""
        self.progress = time.monotonic()
        if number in self._late:
            member, then = self._late.pop(number)
            log.info("late answer of %s for work %d dropped", member.name, number)
            then()
            member.leases.discard(number)
            self.pump(member.role)
            return None
        if (inherited := self.inheritance.take(number)) is not None:
            self._inherited_over(number, inherited, result)
            return None
        work = self._leased.pop(number, None)
        if work is None:
            return None
        work.timer.cancel()
        counts = work.fits(result) and not work.future.done()
        self._ended(number, "done" if counts else "failed", result if counts else None)
        if work.member is not None:
            work.member.leases.discard(number)
            if isinstance(result, Updated) and work.fits(result):
                work.member.state = work.lease.step  # it holds that now, whether or not anybody still waits
        self.pump(work.role)
        return None if work.future.done() else work

    def _inherited_over(self, number: int, inherited: Inherited, result: Result | None) -> None:
        """Answered before anybody waited for it: the journal keeps it for whoever asks for this work next."""
        self._ended(number, "failed" if result is None else "done", result)
        if isinstance(result, Updated):
            inherited.member.state = inherited.entry.step
            self.on_caught_up(inherited.member)
        for then in inherited.when_over:
            then()
        inherited.member.leases.discard(number)
        self.pump(inherited.member.role)

    def _ended(self, number: int, state: LeaseState, result: Result | None = None) -> None:
        if self.journal is not None:
            if isinstance(result, Scores):
                self.journal.scored(result.scores)
            self.journal.ended(number, state, result)

    def member_died(self, member: Member, reason: str) -> None:
        for number in sorted(member.leases):
            work = self._leased.pop(number, None)
            if work is not None:
                work.timer.cancel()
                self._ended(number, "lost")
                work.lose("dead", f"{member.name} died ({reason}) in {work.name}")
        for number in self.inheritance.of(member):
            if (inherited := self.inheritance.take(number)) is not None:
                self._inherited_over(number, inherited, None)
        for number in [number for number, (holder, _) in self._late.items() if holder is member]:
            self._late.pop(number)[1]()
        member.leases.clear()
        self.queues.lose_for(member, reason)

    def _expire(self, number: int, role: Role) -> None:
        work = self._leased.pop(number, None)
        if work is not None and work.member is not None:
            limit = work.lease.deadline_s
            text = f"{work.member.name} holds work {number} ({work.name}) longer than {limit:.1f} s"
            log.warning("%s", text)
            self._late[number] = (work.member, lambda: None)
            self._ended(number, "late")
            work.lose("timeout", text)
            return
        self.queues.expire(role, number)
