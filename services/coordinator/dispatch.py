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
from collections import deque
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
from services.coordinator.leases import ANSWERS, DEPTH, UPDATES, WORK_PER_EPOCH, LeaseLost, Work, may_take
from services.coordinator.members import Member, Members

__all__ = ["Dispatcher", "LeaseLost"]

log = logging.getLogger("dispatch")

POLL_S = 0.02
Finished = Callable[[list[FinishedSample]], None]


class Dispatcher:
    """Queues work per role and hands it to ready members of that role that have room."""

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
        self._queues: dict[Role, deque[Work]] = {role: deque() for role in DEPTH}
        self._leased: dict[int, Work] = {}
        self._lost: dict[int, tuple[Member, Callable[[], None]]] = {}
        self._freed: dict[Role, asyncio.Event] = {role: asyncio.Event() for role in DEPTH}

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
        self._queues[role].append(work)
        if member is not None and self.members.by_peer.get(member.peer) is not member:
            self._lose_queued(member, "it had left before")
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
        elif work in self._queues[work.role]:
            work.timer.cancel()
            self._queues[work.role].remove(work)
            self.pump(work.role)

    async def until_free(self, role: Role) -> None:
        """Waits until a member of the role has room."""
        while not self._free_members(role) or self._queues[role]:
            self._freed[role].clear()
            await self._freed[role].wait()

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
        if work in self._lost:
            self._lost[work] = (self._lost[work][0], then)
        elif (inherited := self.inheritance.works.get(work)) is not None:
            inherited.when_over.append(then)
        else:
            then()

    def outstanding(self) -> list[Work]:
        """What is handed out, and then what waits to be."""
        return [*self._leased.values(), *itertools.chain(*self._queues.values())]

    def close(self) -> None:
        """Forgets all work and its timers; whoever still waits for some is cancelled."""
        for work in self.outstanding():
            work.timer.cancel()
            work.future.cancel()
        for queue in self._queues.values():
            queue.clear()
        self._leased.clear()
        self._lost.clear()

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

    def _free_members(self, role: Role) -> list[Member]:
        """Members with room. One that has not answered work whose lease ran out is still busy with it."""
        free = [member for member in self.members.of_role(role) if len(member.leases) < DEPTH[role]]
        return sorted(free, key=lambda member: len(member.leases))

    def _takers(self, work: Work) -> list[Member]:
        """Members with room that may take this work (``leases.may_take``)."""
        free = [member for member in self._free_members(work.role) if work.only in (None, member)]
        return [member for member in free if may_take(member, work)]

    def pump(self, role: Role) -> None:
        """Hands queued work to members with room, in order; what is for one member passes what nobody may take yet."""
        queue = self._queues[role]
        blocked = False
        for work in list(queue):
            if blocked and work.only is None:
                continue
            while not work.future.done() and (free := self._takers(work)):
                self._write_down(work, free[0])
                if self.members.send(free[0], work.lease):
                    queue.remove(work)
                    self._leave_with(work, free[0])
                    break
            else:
                blocked = blocked or work.only is None
        if not queue:
            self._freed[role].set()

    def _write_down(self, work: Work, member: Member) -> None:
        if self.journal is not None:
            self.journal.leased(work.lease, member.role, member.hello.replica, member.hello.pid)

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
        work = self._close(message.work, message.result)
        if work is None or work.member is None:
            return
        expected = ANSWERS[type(work.lease.task)]
        if not isinstance(message.result, expected):
            found = type(message.result).__name__
            work.lose("failed", f"{work.member.name} answered {work.name} with {found}, expected {expected.__name__}")
            return
        if isinstance(work.lease.task, UPDATES):
            work.member.state = work.lease.step
        self.on_done(work.role, work.lease.phase, message)
        work.future.set_result(message)

    def failed(self, message: Failed) -> None:
        work = self._close(message.work, None)
        if work is not None and work.member is not None:
            work.lose("failed", f"{work.member.name} failed in {work.name}: {message.message}")

    def _close(self, number: int, result: Result | None) -> Work | None:
        """Takes work off its holder; None for a late or repeated answer, or where nobody waits any more."""
        self.progress = time.monotonic()
        if number in self._lost:
            member, then = self._lost.pop(number)
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
        fits = isinstance(result, ANSWERS[type(work.lease.task)]) and not work.future.done()
        self._ended(number, "done" if fits else "failed", result if fits else None)
        if work.member is not None:
            work.member.leases.discard(number)
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
        for number in [number for number, (holder, _) in self._lost.items() if holder is member]:
            self._lost.pop(number)[1]()
        member.leases.clear()
        self._lose_queued(member, reason)

    def _lose_queued(self, member: Member, reason: str) -> None:
        """Work that was for this member alone and did not reach it any more."""
        queue = self._queues[member.role]
        for work in [work for work in queue if work.only is member]:
            queue.remove(work)
            work.timer.cancel()
            work.lose("dead", f"{member.name} died ({reason}) before {work.name}")

    def _expire(self, number: int, role: Role) -> None:
        work = self._leased.pop(number, None)
        if work is not None and work.member is not None:
            limit = work.lease.deadline_s
            text = f"{work.member.name} holds work {number} ({work.name}) longer than {limit:.1f} s"
            log.warning("%s", text)
            self._lost[number] = (work.member, lambda: None)
            self._ended(number, "late")
            work.lose("timeout", text)
            return
        for queued in [queued for queued in self._queues[role] if queued.lease.work == number]:
            self._queues[role].remove(queued)
            if queued.only is not None:
                queued.lose("nobody", f"{queued.only.name} did not take {queued.name} in time: it is busy")
                continue
            queued.lose("nobody", f"no {role} replica took {queued.name} in time: none is ready or all are busy")
