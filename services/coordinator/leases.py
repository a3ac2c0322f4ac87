"""Leases: what is handed out, to whom, and how it can be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from common.messages import (
    Done,
    Evaluate,
    Evaluated,
    FinishedSample,
    Generate,
    Generated,
    HostBuffer,
    Hosted,
    Lease,
    Logprobs,
    LogprobsDone,
    RestoreState,
    Result,
    Role,
    Saved,
    SavePolicy,
    SaveState,
    ScoreBatch,
    Scores,
    Sleep,
    Slept,
    StateRestored,
    StateStaged,
    Task,
    UpdateCritic,
    Updated,
    UpdatePolicy,
)
from services.coordinator.member import Member

R = TypeVar("R")
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
    SaveState: StateStaged,
    RestoreState: StateRestored,
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
class Work:
    """A lease that somebody waits for."""

    lease: Lease
    role: Role
    future: asyncio.Future[Done]
    on_finished: Callable[[list[FinishedSample]], None] | None
    timer: asyncio.TimerHandle
    only: Member | None = None
    """The one member that this work is for."""
    member: Member | None = None
    """Who holds it."""
    given: float = 0.0
    """``time.monotonic()`` when it was handed out."""

    @property
    def name(self) -> str:
        task = self.lease.task
        if isinstance(task, (SaveState, RestoreState)):
            return f"{type(task).__name__} of step {task.step}"
        before = "Sleep before " if isinstance(task, Sleep) else ""
        return f"{before}{self.lease.phase} of step {self.lease.step}"

    def fits(self, result: Result | None) -> bool:
        """Whether this is the kind of answer that the task asks for."""
        return isinstance(result, ANSWERS[type(self.lease.task)])

    def lose(self, kind: LossKind, message: str) -> None:
        if not self.future.done():
            self.future.set_exception(LeaseLost(self.lease.work, kind, message))


def result_of(done: Done, kind: type[R]) -> R:
    """The result of work whose task asks for this kind; another answer is a loss (``Work.fits``)."""
    assert isinstance(done.result, kind), "the dispatcher lets no other answer through"
    return done.result


def may_take(member: Member, work: Work) -> bool:
    """No generation without the receipt for its policy version; no work of a step for a learner in another state."""
    task = work.lease.task
    match task:
        case Generate():
            return member.version == task.version
        case Logprobs() | Evaluate() | UpdatePolicy() | UpdateCritic():
            return member.state == work.lease.step - 1
        case SaveState(step=step) | SavePolicy(version=step):
            return member.state == step
        case _:
            return True
