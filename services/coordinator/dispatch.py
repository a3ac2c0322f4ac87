"""Leases: work goes to whoever is free, and comes back exactly once as a result or as a ``LeaseLost``.

The dispatcher never retries by itself: what to do about lost work depends on the work (fresh slots, another replica, or
the end of the run), so whoever submitted it decides.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.messages import (
    Done,
    Evaluate,
    Evaluated,
    Failed,
    FinishedSample,
    Generate,
    Generated,
    HostBuffer,
    Hosted,
    Lease,
    Logprobs,
    LogprobsDone,
    Phase,
    Result,
    Role,
    SamplesFinished,
    Saved,
    SavePolicy,
    ScoreBatch,
    Scores,
    Sleep,
    Slept,
    Task,
    UpdateCritic,
    Updated,
    UpdatePolicy,
)
from services.coordinator.members import Member, Members

log = logging.getLogger("dispatch")

LossKind = Literal["dead", "timeout", "failed", "nobody"]
DEPTH: dict[Role, int] = {"rollout": 1, "reward": 1, "critic": 4, "trainer": 4, "holder": 4}
"""Leases that a replica holds at a time; more than one hides the round trip between micro-batches."""
WORK_PER_EPOCH = 1_000_000_000
"""Work is numbered on from epoch to epoch, so that an answer to a dead coordinator is never taken for another one."""
ANSWERS: dict[type[Task], type[Result]] = {
    Generate: Generated,
    ScoreBatch: Scores,
    Evaluate: Evaluated,
    Logprobs: LogprobsDone,
    UpdatePolicy: Updated,
    UpdateCritic: Updated,
    SavePolicy: Saved,
    Sleep: Slept,
    HostBuffer: Hosted,
}


class LeaseLost(Exception):
    """Work came to nothing. With kind ``dead`` its holder cannot write any more; with ``timeout`` it still may."""

    def __init__(self, work: int, kind: LossKind, message: str) -> None:
        super().__init__(message)
        self.work = work
        self.kind: LossKind = kind


@dataclass
class _Work:
    lease: Lease
    role: Role
    future: asyncio.Future[Done]
    on_finished: Callable[[list[FinishedSample]], None] | None
    timer: asyncio.TimerHandle
    only: Member | None = None
    """The one member that this work is for."""
    member: Member | None = None
    """Who holds it."""

    @property
    def name(self) -> str:
        before = "Sleep before " if isinstance(self.lease.task, Sleep) else ""
        return f"{before}{self.lease.phase} of step {self.lease.step}"

    def lose(self, kind: LossKind, message: str) -> None:
        if not self.future.done():
            self.future.set_exception(LeaseLost(self.lease.work, kind, message))


class Dispatcher:
    """Queues work per role and hands it to ready members of that role that have room."""

    def __init__(self, members: Members, start_timeout: float) -> None:
        self.members = members
        self.start_timeout = start_timeout
        self.on_done: Callable[[Role, Phase, Done], None] = lambda role, phase, done: None
        self._ids = itertools.count((members.epoch - 1) * WORK_PER_EPOCH + 1)
        self._queues: dict[Role, deque[_Work]] = {role: deque() for role in DEPTH}
        self._leased: dict[int, _Work] = {}
        self._lost: dict[int, tuple[Member, Callable[[], None]]] = {}
        self._freed: dict[Role, asyncio.Event] = {role: asyncio.Event() for role in DEPTH}

    def next_work(self) -> int:
        return next(self._ids)

    def submit(
        self, role: Role, phase: Phase, step: int, task: Task, deadline_s: float,
        on_finished: Callable[[list[FinishedSample]], None] | None = None, member: Member | None = None,
    ) -> asyncio.Future[Done]:  # fmt: skip
        """Queues work; the future raises LeaseLost. ``on_finished`` gets generated samples the moment they end.

        With ``member`` nobody else gets the work: it is lost as ``dead`` when that one dies, also while it is queued.
        """
        loop = asyncio.get_running_loop()
        number = self.next_work()
        lease = Lease(epoch=self.members.epoch, work=number, step=step, phase=phase, deadline_s=deadline_s, task=task)
        timer = loop.call_later(self.start_timeout + deadline_s, self._expire, number, role)
        work = _Work(lease, role, loop.create_future(), on_finished, timer, member)
        work.future.add_done_callback(lambda future: self._over(work, future))
        self._queues[role].append(work)
        if member is not None and self.members.by_peer.get(member.peer) is not member:
            self._lose_queued(member, "it had left before")
        self.pump(role)
        return work.future

    def _over(self, work: _Work, future: asyncio.Future[Done]) -> None:
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

    def when_over(self, work: int, then: Callable[[], None]) -> None:
        """Calls ``then`` once the holder of timed-out work has answered or died, and so writes no more."""
        if work in self._lost:
            self._lost[work] = (self._lost[work][0], then)
        else:
            then()

    def close(self) -> None:
        """Forgets all work and its timers; whoever still waits for some is cancelled."""
        for work in [*itertools.chain(*self._queues.values()), *self._leased.values()]:
            work.timer.cancel()
            work.future.cancel()
        for queue in self._queues.values():
            queue.clear()
        self._leased.clear()
        self._lost.clear()

    # ------------------------------------------------------------ what goes out

    def _free_members(self, role: Role) -> list[Member]:
        """Members with room. One that has not answered work whose lease ran out is still busy with it."""
        free = [member for member in self.members.of_role(role) if len(member.leases) < DEPTH[role]]
        return sorted(free, key=lambda member: len(member.leases))

    def _takers(self, work: _Work) -> list[Member]:
        """Members with room that may take this work: no generation without the receipt for its policy version."""
        free = [member for member in self._free_members(work.role) if work.only in (None, member)]
        task = work.lease.task
        return [member for member in free if member.version == task.version] if isinstance(task, Generate) else free

    def pump(self, role: Role) -> None:
        """Hands queued work to members with room, in order: only work for one member lets later work pass."""
        queue = self._queues[role]
        for work in list(queue):
            while not work.future.done() and (free := self._takers(work)):
                if self.members.send(free[0], work.lease):
                    queue.remove(work)
                    self._leave_with(work, free[0])
                    break
            else:
                if work.only is None:
                    break
        if not queue:
            self._freed[role].set()

    def _leave_with(self, work: _Work, member: Member) -> None:
        number = work.lease.work
        work.timer.cancel()
        work.member = member
        member.leases.add(number)
        if isinstance(work.lease.task, Sleep):
            member.version = -1  # it generates no more until it has proved a version again, which wakes it
        self._leased[number] = work
        loop = asyncio.get_running_loop()
        work.timer = loop.call_later(work.lease.deadline_s, self._expire, number, work.role)

    # ------------------------------------------------------------ what comes back

    def finished(self, message: SamplesFinished) -> None:
        work = self._leased.get(message.work)
        if work is None or work.on_finished is None or work.future.done():
            log.info("dropped %d late samples of work %d", len(message.samples), message.work)
        else:
            work.on_finished(message.samples)

    def done(self, message: Done) -> None:
        work = self._close(message.work)
        if work is None or work.member is None:
            return
        expected = ANSWERS[type(work.lease.task)]
        if not isinstance(message.result, expected):
            found = type(message.result).__name__
            work.lose("failed", f"{work.member.name} answered {work.name} with {found}, expected {expected.__name__}")
            return
        self.on_done(work.role, work.lease.phase, message)
        work.future.set_result(message)

    def failed(self, message: Failed) -> None:
        work = self._close(message.work)
        if work is not None and work.member is not None:
            work.lose("failed", f"{work.member.name} failed in {work.name}: {message.message}")

    def _close(self, number: int) -> _Work | None:
        """Takes work off its holder; None for a late or repeated answer, or where nobody waits any more."""
        if number in self._lost:
            member, then = self._lost.pop(number)
            log.info("late answer of %s for work %d dropped", member.name, number)
            then()
            member.leases.discard(number)
            self.pump(member.role)
            return None
        work = self._leased.pop(number, None)
        if work is None:
            return None
        work.timer.cancel()
        if work.member is not None:
            work.member.leases.discard(number)
        self.pump(work.role)
        return None if work.future.done() else work

    def member_died(self, member: Member, reason: str) -> None:
        for number in sorted(member.leases):
            work = self._leased.pop(number, None)
            if work is not None:
                work.timer.cancel()
                work.lose("dead", f"{member.name} died ({reason}) in {work.name}")
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
            work.lose("timeout", text)
            return
        for queued in [queued for queued in self._queues[role] if queued.lease.work == number]:
            self._queues[role].remove(queued)
            if queued.only is not None:
                queued.lose("nobody", f"{queued.only.name} did not take {queued.name} in time: it is busy")
                continue
            queued.lose("nobody", f"no {role} replica took {queued.name} in time: none is ready or all are busy")
