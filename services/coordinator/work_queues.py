"""Work that waits, role by role, until somebody has room for it and may take it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator

from common.messages import Role
from services.coordinator.leases import DEPTH, Work, may_take
from services.coordinator.member import Member
from services.coordinator.members import Members


class WorkQueues:
    """``give`` hands work to a member, and says whether that has it now: its connection may turn out to be gone."""

    def __init__(self, members: Members, give: Callable[[Work, Member], bool]) -> None:
        self.members = members
        self.give = give
        self._waiting: dict[Role, deque[Work]] = {role: deque() for role in DEPTH}
        self._freed: dict[Role, asyncio.Event] = {role: asyncio.Event() for role in DEPTH}

    def __iter__(self) -> Iterator[Work]:
        return itertools.chain(*self._waiting.values())

    def add(self, work: Work) -> None:
        self._waiting[work.role].append(work)

    def drop(self, work: Work) -> None:
        """Nobody needs it any more, if it still waits."""
        if work in self._waiting[work.role]:
            work.timer.cancel()
            self._waiting[work.role].remove(work)
            self.pump(work.role)

    def clear(self) -> None:
        for queue in self._waiting.values():
            queue.clear()

    # ------------------------------------------------------------ handing out

    def pump(self, role: Role) -> None:
        """Hands work out in order; what is for one member passes what nobody may take yet."""
        blocked = False
        for work in list(self._waiting[role]):
            if blocked and work.only is None:
                continue
            if self._hand_out(work):
                self._waiting[role].remove(work)
            elif work.only is None:
                blocked = True
        if not self._waiting[role]:
            self._freed[role].set()

    def _hand_out(self, work: Work) -> bool:
        """Whether somebody has it now. It may be lost on the way, if it was for one member alone."""
        while not work.future.done() and (takers := self._takers(work)):
            if self.give(work, takers[0]):
                return True
        return False

    def _takers(self, work: Work) -> list[Member]:
        """Members with room that may take this work (``leases.may_take``)."""
        free = [member for member in self._free_members(work.role) if work.only in (None, member)]
        return [member for member in free if may_take(member, work)]

    def _free_members(self, role: Role) -> list[Member]:
        """Members with room. One that has not answered work whose lease ran out is still busy with it."""
        free = [member for member in self.members.of_role(role) if len(member.leases) < DEPTH[role]]
        return sorted(free, key=lambda member: len(member.leases))

    async def until_free(self, role: Role) -> None:
        """Waits until a member of the role has room."""
        while not self._free_members(role) or self._waiting[role]:
            self._freed[role].clear()
            await self._freed[role].wait()

    # ------------------------------------------------------------ what nobody takes

    def lose_for(self, member: Member, reason: str) -> None:
        """Work that was for this member alone and did not reach it any more."""
        queue = self._waiting[member.role]
        for work in [work for work in queue if work.only is member]:
            queue.remove(work)
            work.timer.cancel()
            work.lose("dead", f"{member.name} died ({reason}) before {work.name}")

    def expire(self, role: Role, number: int) -> None:
        """Nobody took it in time."""
        for work in [work for work in self._waiting[role] if work.lease.work == number]:
            self._waiting[role].remove(work)
            if work.only is not None:
                work.lose("nobody", f"{work.only.name} did not take {work.name} in time: it is busy")
            else:
                work.lose("nobody", f"no {role} replica took {work.name} in time: none is ready or all are busy")
