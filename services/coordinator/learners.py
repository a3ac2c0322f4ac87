"""Trainer and critic: whose death loses state, and how that state comes back.

    the state it is to hold is saved               restored to that; what it had not answered is repeated
    it held s, unsaved, but s - 1 is saved and     restored to s - 1; its update is repeated from the cache's columns
    step s is still under way
    anything else                                  the whole run goes back to the newest state that is whole

A learner that holds another state than the work asks for gets none of it (``leases.may_take``), so that work waits in
the queue, within its deadline, while somebody is started again and restored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from common.config import Config
from common.config_values import learner_roles
from common.messages import (
    NO_STATE,
    Done,
    Phase,
    RestoreState,
    Role,
    StateRestored,
    Task,
    UpdateCritic,
    UpdatePolicy,
)
from services.coordinator.dispatch import Dispatcher
from services.coordinator.failures import RunFailed
from services.coordinator.journal import task_digest
from services.coordinator.leases import LeaseLost, result_of
from services.coordinator.member import Member
from services.coordinator.members import Members
from services.coordinator.publisher import Publisher
from services.coordinator.saving import StateSaving
from services.coordinator.states import SavedStates

log = logging.getLogger("learners")

DEATHS = 10
"""Deaths of learners that one step survives: more are no accident."""


class Rewind(Exception):
    """What a learner held is lost and cannot be made again from this step alone: earlier steps must be repeated."""


class Learners:
    """Knows which state each learner is to hold, and restores those that do not."""

    def __init__(
        self, config: Config, members: Members, dispatcher: Dispatcher, publisher: Publisher, states: SavedStates
    ) -> None:
        self.config = config
        self.members = members
        self.dispatcher = dispatcher
        self.publisher = publisher
        self.states = states
        self.roles = learner_roles(config)
        dispatcher.on_caught_up = self.caught_up
        self.saving = StateSaving(config, dispatcher, states, self.roles)
        self.wanted: dict[Role, int] = dict.fromkeys(self.roles, 0)
        """The step after which each learner's state is to be as it was."""
        self.step = 0
        """The step that is under way, or done last."""
        self._columns_there = False
        self._deaths, self._furthest = 0, 0
        """Deaths since a step was begun for the first time, and which that was."""
        self._hopeless = ""
        self._ahead = NO_STATE
        self._why = ""
        """Why the run must go back, if it must."""
        self._lost = asyncio.Event()
        self._restoring: dict[Role, asyncio.Task[None]] = {}

    # ------------------------------------------------------------ steps

    def begin(self, step: int) -> None:
        """Micro-batches of this step go out from now on."""
        self.step, self._columns_there = step, True
        if step > self._furthest:
            self._furthest, self._deaths = step, 0

    def end(self) -> None:
        """The step's columns are no longer needed, and soon gone."""
        self._columns_there = False

    def start_from(self, step: int, takeover: bool = False) -> None:
        """The run goes on after ``step``: whoever holds another state is to be restored.

        At a takeover a learner that lives may be one step ahead: its update was done for the coordinator before.
        """
        self.step, self._columns_there, self._why = step, takeover, ""
        self._lost.clear()
        self._ahead = step + 1 if takeover else NO_STATE
        self.wanted = dict.fromkeys(self.roles, step)
        if self.publisher.version > step:
            self.publisher.step_back(step)  # before anybody generates with the weights that are there now

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a part of the run; raises Rewind, ending it, as soon as a state is lost that it builds on.

        Raises RunFailed where learners die again and again.
        """
        working, losing = asyncio.create_task(work), asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait([working, losing], return_when=asyncio.FIRST_COMPLETED)
            if self._hopeless:
                raise RunFailed(self._hopeless)
            if self._why:
                raise Rewind(self._why)
            return working.result()
        finally:
            losing.cancel()
            working.cancel()
            await asyncio.gather(working, losing, return_exceptions=True)

    def _lose(self, why: str) -> None:
        self._why = self._why or why
        self._lost.set()

    # ------------------------------------------------------------ work

    async def work(self, role: Role, phase: Phase, task: Task, limit: float) -> Done:
        """A lease of the step under way; repeated where its holder dies. Raises LeaseLost where it fails otherwise."""
        while True:
            try:
                return await self.dispatcher.submit(role, phase, self.step, task, limit)
            except LeaseLost as lost:
                if lost.kind != "dead":
                    raise
                log.warning("%s: repeated when the %s is back", lost, role)

    async def update(self, role: Role, task: UpdatePolicy | UpdateCritic) -> Done:
        """The learner's update of the step under way; it holds the step's state afterwards."""
        while True:
            self._check_recall(role, task)
            done = await self.work(role, "UPDATE", task, self.config.timeouts.update)
            if self._holding(role, self.step):  # else it died between its answer and now
                self.wanted[role] = self.step
                return done

    def _holding(self, role: Role, step: int) -> list[Member]:
        """Living learners of this role, connected or not, that hold the state after ``step``."""
        return [member for member in self.members.by_peer.values() if member.role == role and member.state == step]

    def _check_recall(self, role: Role, task: UpdatePolicy | UpdateCritic) -> None:
        """What an earlier coordinator was told of this update counts only where the learner still holds its outcome."""
        journal, digest = self.dispatcher.journal, task_digest(role, self.step, task)
        if journal is None or self.dispatcher.inheritance.number_of(digest) is not None:
            return
        ahead = self._holding(role, self.step)
        if not ahead:
            journal.forget_result(digest)
        elif journal.result(digest) is None:  # it made another update of this step: for another batch
            self.wanted[role] = self.step - 1
            self._restore(ahead[0])

    def behind(self) -> list[Role]:
        """Learners that do not hold the state of the step under way (yet, or any more)."""
        return [role for role in self.roles if self.wanted[role] < self.step]

    # ------------------------------------------------------------ death and return

    def member_died(self, member: Member) -> None:
        """Decides what state its successor is to have."""
        role, wanted = member.role, self.wanted.get(member.role, NO_STATE)
        if role not in self.roles:
            return
        if (restoring := self._restoring.pop(role, None)) is not None:
            restoring.cancel()
        self.saving.member_died(member)
        self._deaths += 1
        if self._deaths > DEATHS:
            self._hopeless = f"trainer and critic died {self._deaths} times in step {self.step}: see their logs"
            self._lost.set()
        elif not self.states.has(role, wanted):
            before = self.step - 1
            if self._columns_there and wanted == self.step and self.states.has(role, before):
                self.wanted[role] = before
            else:
                self._lose(f"{member.name} died, and its state after step {wanted} was not saved")

    def member_ready(self, member: Member) -> None:
        """Restores a learner that does not hold what it is to hold."""
        role = member.role
        if role not in self.roles or member.state == self.wanted[role]:
            return
        journal = self.dispatcher.journal
        ahead = member.state == self._ahead != NO_STATE
        if ahead and journal is not None and journal.knows_update(role, self._ahead):
            self.wanted[role] = self._ahead
        else:
            self._restore(member)

    def caught_up(self, member: Member) -> None:
        """The update that it was in the middle of at a takeover is done."""
        if member.role in self.roles and member.state == self._ahead:
            self.wanted[member.role] = self._ahead

    def _restore(self, member: Member) -> None:
        role = member.role
        task = self._restoring[role] = asyncio.create_task(self._bring(member, self.wanted[role]))
        task.add_done_callback(lambda done: self._restored(role, done))

    def _restored(self, role: Role, task: asyncio.Task[None]) -> None:
        if self._restoring.get(role) is task:
            del self._restoring[role]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lose(str(error))

    async def _bring(self, member: Member, step: int) -> None:
        """Has a learner become what it was after ``step``. Raises Rewind where it cannot."""
        if not self.states.has(member.role, step):
            raise Rewind(f"{member.name} is new, and the state after step {step} was not saved")
        member.state = NO_STATE
        if member.role == "trainer":
            self.publisher.step_back(step)
        digest = self.states.digest(member.role, step)
        task = RestoreState(step=step, path=str(self.states.path(step)), digest=digest)
        limit = self.config.timeouts.checkpoint
        try:
            done = await self.dispatcher.submit(member.role, "CHECKPOINT", step, task, limit, member=member)
        except LeaseLost as lost:
            if lost.kind == "dead":
                return  # its successor is restored when it is ready
            if lost.kind != "failed":  # a slow disk, or a learner that is stuck: nothing is wrong with the files
                self.states.not_in_time(step)
                limits = f"within timeouts.checkpoint ({limit:g} s)"
                raise Rewind(f"{member.name} was not restored to step {step} {limits}: {lost}") from lost
            self.states.distrust(step, str(lost))
            raise Rewind(f"{member.name} cannot be restored to step {step}: {lost}") from lost
        seconds = result_of(done, StateRestored).seconds
        member.state = step
        self.saving.count("restore_s", seconds)
        log.info("%s holds the state after step %d again (%.2f s)", member.name, step, seconds)
        self.dispatcher.pump(member.role)

    async def bring_all(self) -> None:
        """Waits until every learner that is there holds what it is to hold; others are restored when they are ready.

        Raises Rewind where one cannot be restored.
        """
        for role in self.roles:
            for member in self.members.of_role(role):
                if member.state != self.wanted[role] and role not in self._restoring:
                    self._restore(member)
        if self._restoring:
            await asyncio.wait(list(self._restoring.values()))
        if self._why:
            raise Rewind(self._why)

    def close(self) -> None:
        self.saving.close()
        for task in self._restoring.values():
            task.cancel()
