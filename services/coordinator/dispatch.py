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

from common.messages import Done, Failed, FinishedSample, Generate, Lease, Phase, Role, SamplesFinished, Task
from services.coordinator.members import Member, Members

log = logging.getLogger("dispatch")

LossKind = Literal["dead", "timeout", "failed", "nobody"]
DEPTH: dict[Role, int] = {"rollout": 1, "reward": 1, "critic": 4, "trainer": 4}
"""Leases that a replica holds at a time; more than one hides the round trip between micro-batches."""


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
    member: Member | None = None


class Dispatcher:
    """Queues work per role and hands it to ready members of that role that have room."""

    def __init__(self, members: Members, start_timeout: float) -> None:
        self.members = members
        self.start_timeout = start_timeout
        self.on_done: Callable[[Role, Phase, Done], None] = lambda role, phase, done: None
        self._ids = itertools.count(1)
        self._queues: dict[Role, deque[_Work]] = {role: deque() for role in DEPTH}
        self._leased: dict[int, _Work] = {}
        self._lost: dict[int, tuple[Member, Callable[[], None]]] = {}
        self._freed: dict[Role, asyncio.Event] = {role: asyncio.Event() for role in DEPTH}

    def next_work(self) -> int:
        return next(self._ids)

    def submit(
        self, role: Role, phase: Phase, step: int, task: Task, deadline_s: float,
        on_finished: Callable[[list[FinishedSample]], None] | None = None,
    ) -> asyncio.Future[Done]:  # fmt: skip
        """Queues work; the future raises LeaseLost. ``on_finished`` gets generated samples the moment they end."""
        loop = asyncio.get_running_loop()
        lease = Lease(epoch=self.members.epoch, work=self.next_work(), step=step, phase=phase, deadline_s=deadline_s, task=task)
        timer = loop.call_later(self.start_timeout + deadline_s, self._expire, lease.work, role)
        self._queues[role].append(_Work(lease, role, loop.create_future(), on_finished, timer))
        future = self._queues[role][-1].future
        self.pump(role)
        return future

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

    def _free_members(self, role: Role) -> list[Member]:
        free = [member for member in self.members.of_role(role) if len(member.leases) < DEPTH[role]]
        return sorted(free, key=lambda member: len(member.leases))

    def _takers(self, work: _Work) -> list[Member]:
        """Members with room that may take this work: no generation without the receipt for its policy version."""
        free = self._free_members(work.role)
        task = work.lease.task
        return [member for member in free if member.version == task.version] if isinstance(task, Generate) else free

    def pump(self, role: Role) -> None:
        """Hands queued work to members with room."""
        while self._queues[role] and (free := self._takers(self._queues[role][0])):
            work, member = self._queues[role].popleft(), free[0]
            work.timer.cancel()
            work.member = member
            member.leases.add(work.lease.work)
            self._leased[work.lease.work] = work
            work.timer = asyncio.get_running_loop().call_later(work.lease.deadline_s, self._expire, work.lease.work, role)
            self.members.send(member, work.lease)
        if not self._queues[role]:
            self._freed[role].set()

    # ------------------------------------------------------------ what comes back

    def finished(self, message: SamplesFinished) -> None:
        work = self._leased.get(message.work)
        if work is None or work.on_finished is None:
            log.info("dropped %d late samples of work %d", len(message.samples), message.work)
        else:
            work.on_finished(message.samples)

    def done(self, message: Done) -> None:
        work = self._close(message.work)
        if work is not None:
            self.on_done(work.role, work.lease.phase, message)
            work.future.set_result(message)

    def failed(self, message: Failed) -> None:
        work = self._close(message.work)
        if work is not None and work.member is not None:
            reason = f"{work.member.name} failed in {work.lease.phase} of step {work.lease.step}: {message.message}"
            work.future.set_exception(LeaseLost(message.work, "failed", reason))

    def _close(self, work_id: int) -> _Work | None:
        """Takes work off its holder; None for a late or repeated answer."""
        if work_id in self._lost:
            member, then = self._lost.pop(work_id)
            then()
            log.info("late answer of %s for work %d dropped", member.name, work_id)
            return None
        work = self._leased.pop(work_id, None)
        if work is None:
            return None
        work.timer.cancel()
        if work.member is not None:
            work.member.leases.discard(work_id)
        self.pump(work.role)
        return None if work.future.done() else work

    def member_died(self, member: Member, reason: str) -> None:
        for work_id in sorted(member.leases):
            work = self._leased.pop(work_id, None)
            if work is not None:
                work.timer.cancel()
                if not work.future.done():
                    lease = work.lease
                    text = f"{member.name} died ({reason}) in {lease.phase} of step {lease.step}"
                    work.future.set_exception(LeaseLost(work_id, "dead", text))
        for work_id in [work_id for work_id, (holder, _) in self._lost.items() if holder is member]:
            self._lost.pop(work_id)[1]()

    def _expire(self, work_id: int, role: Role) -> None:
        work = self._leased.pop(work_id, None)
        if work is not None and work.member is not None:
            lease = work.lease
            text = f"{work.member.name} holds work {work_id} ({lease.phase} of step {lease.step}) longer than {lease.deadline_s:.1f} s"
            log.warning("%s", text)
            work.member.leases.discard(work_id)
            self._lost[work_id] = (work.member, lambda: None)
            if not work.future.done():
                work.future.set_exception(LeaseLost(work_id, "timeout", text))
            return
        for queued in [queued for queued in self._queues[role] if queued.lease.work == work_id]:
            self._queues[role].remove(queued)
            text = f"no {role} replica took {queued.lease.phase} of step {queued.lease.step} in time: none is ready or all are busy"
            if not queued.future.done():
                queued.future.set_exception(LeaseLost(work_id, "nobody", text))
