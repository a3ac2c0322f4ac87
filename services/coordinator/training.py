"""The loop over the steps, from wherever the run is: its beginning, a saved state, or the middle of a step.

    evaluation -> step -> written down, slots freed -> evaluation -> step -> … -> final policy

A run that has lost what it builds on goes back to the newest saved state and does the steps since then again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from common.config import Config
from common.config_values import samples_per_step
from common.token_cache import TokenCache
from services.coordinator.evaluation import Evaluator
from services.coordinator.failures import RunFailed
from services.coordinator.journal import Journal
from services.coordinator.kl_control import kl_controller
from services.coordinator.learners import Learners, Rewind
from services.coordinator.ledger import Ledger, RecordSizes, StepRecord
from services.coordinator.prompts import PromptStream
from services.coordinator.report import Reporter
from services.coordinator.sample import Sample, close_samples, open_samples
from services.coordinator.states import RECENT, SavedStates
from services.coordinator.step import StepOutcome, StepRunner

log = logging.getLogger("training")

POLL_S = 0.02
RESTORE_TRIES = 3
"""Times that a state is restored too slowly before that ends the run."""


@dataclass
class Training:
    """``run`` returns when the last step is done and its policy saved."""

    config: Config
    cache: TokenCache
    ledger: Ledger
    journal: Journal
    prompts: PromptStream
    runner: StepRunner
    evaluator: Evaluator
    learners: Learners
    states: SavedStates
    report: Reporter
    step: int = 0
    """The step under way, or done last."""

    def __post_init__(self) -> None:
        self.upcoming: list[Sample] = []
        self.position_after = self.prompts.position
        self.record: StepRecord | None = None
        """Of the step done last; None before the first."""
        self.winding: asyncio.Task[None] | None = None
        self.moving: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Raises RunFailed where the run cannot go on."""
        self.states.write_beside(asyncio.get_running_loop())
        while True:
            try:
                await self.learners.bring_all()
                await self.learners.guard(self.train())
                return
            except Rewind as lost:
                await self.rewind(str(lost))

    async def train(self) -> None:
        await self.evaluate_held_out()
        while self.step < self.config.run.steps:
            self.step += 1
            started = time.monotonic()
            samples, position = await self.take_upcoming()
            outcome = await self.runner.run(self.step, samples, partial(self.prepare_next, samples))
            self.learners.end()
            await self.wound_up()
            # A task of its own: the next step's leases go out while it writes.
            self.winding = asyncio.create_task(self.wind_up(outcome, started, time.monotonic(), position))
            await self.evaluate_held_out()
        await self.wound_up()
        await self.save_final()
        await self.learners.saving.until_saved(self.config.timeouts.checkpoint)

    # ------------------------------------------------------------ a step's beginning and end

    async def take_upcoming(self) -> tuple[list[Sample], tuple[int, int]]:
        """This step's samples, opened while the step before was updating if the cache had room for both."""
        if not self.upcoming:
            await self.wound_up()
            self.open_next(self.step)
        samples, self.upcoming = self.upcoming, []
        return samples, self.position_after

    def open_next(self, step: int) -> None:
        prompts = self.prompts.next_batch(self.config.prompts.per_step)
        self.upcoming = open_samples(self.cache, self.journal, prompts, self.config.rollout.responses_per_prompt, step)
        self.position_after = self.prompts.position

    def prepare_next(self, samples: Sequence[Sample]) -> None:
        """Called when both updates are under way and the coordinator has time."""
        self.report.write_samples(self.step, samples)
        if self.step < self.config.run.steps and self.cache.free_slots >= samples_per_step(self.config):
            self.open_next(self.step + 1)

    async def wind_up(self, outcome: StepOutcome, started: float, ended: float, position: tuple[int, int]) -> None:
        """Writes the step down; from then on the run can go on after it, once its state is saved."""
        outcome.timings |= self.learners.saving.take_timings()
        self.record = self.report.write_step(outcome, started, ended, position, self.runner.kl.coefficient)
        self.journal.step_done(outcome.step)
        close_samples(self.cache, outcome.samples)
        self._move_log()
        self.states.reached(self.record)

    def _move_log(self) -> None:
        """Beside the next step, since it waits for the disk; a log that cannot be moved only grows."""
        if self.moving is None or self.moving.done():
            self.moving = asyncio.get_running_loop().run_in_executor(None, self.ledger.move_log)
            self.moving.add_done_callback(_told)

    async def wound_up(self) -> None:
        """Waits until the step before is written down and its slots are free; raises what went wrong there."""
        if self.winding is not None:
            winding, self.winding = self.winding, None
            await winding

    async def evaluate_held_out(self) -> None:
        if not self.evaluator.due(self.step):
            return
        await self.wound_up()
        earlier = next((done for done in self.ledger.evaluations() if done.step == self.step), None)
        if earlier is not None:  # an earlier coordinator wrote it down
            self.states.evaluated(self.step, earlier.accuracy)
            return
        started = time.monotonic()
        samples = await self.evaluator.run(self.step)
        accuracy = self.report.write_evaluation(self.step, samples, time.monotonic() - started)
        self.states.evaluated(self.step, accuracy)

    async def save_final(self) -> None:
        started = time.monotonic()
        saved = await self.runner.save("final")
        self.report.policy_saved(self.step, saved, time.monotonic() - started)

    async def save_what_there_is(self, timeout: float) -> None:
        """The run is stopped: what its learners hold is saved, if they hold the state of a step that is written down.

        In the middle of an update they do not, and the run goes on from an older state.
        """
        if self.winding is not None:
            await asyncio.gather(self.winding, return_exceptions=True)
        record = self.record
        if record is not None and set(self.learners.wanted.values()) == {record.step}:
            self.learners.saving.save(record.step, last=True)
        await self.learners.saving.until_saved(timeout)

    # ------------------------------------------------------------ where to go on

    def resume(self) -> None:
        """Goes on from what is on disk. The learners are restored as they get ready."""
        last = self.ledger.last_step()
        if last is None:
            self.back_to(0)  # what was begun lay in a token cache that is gone
            return
        self._find_states(last.step)
        target = self.states.newest(most=last.step)
        if not target and self.states.distrusted:
            raise RunFailed(f"no saved state in {self._unusable()}")
        if target != last.step:
            log.warning("step %d was the last; the newest saved state is that after step %d", last.step, target)
        self.ledger.event("resume", f"after step {target}")
        self.back_to(target)

    def _find_states(self, last: int) -> None:
        """Steps whose parts may have got whole while nobody was there are known to be done."""
        for record in self.ledger.steps(after=last - RECENT):
            self.states.reached(record)

    def _unusable(self) -> str:
        reasons = "; ".join(f"step {step}: {why}" for step, why in sorted(self.states.distrusted.items()))
        return (
            f"{self.states.directory} can be used: {reasons}. Delete them to begin from step 0, or start a run of "
            "another name (run.name)"
        )

    def take_over(self) -> None:
        """Goes on in the middle of the step that an earlier coordinator had begun, with its slots and results."""
        self.go_on_after(self.ledger.last_step(), takeover=True)
        self._find_states(self.step)
        self.cut_records(evaluation=True)
        wanted = self.journal.open_slots(self.step)
        for ref in self.cache.leased():
            if ref not in wanted:
                self.cache.free(ref)
        self.ledger.event("takeover", f"after step {self.step}")

    async def settle_inheritance(self) -> None:
        """Once replicas have told what they hold: what nobody may write to any more is free again.

        Scores that are on their way are waited for, so that no response is scored twice.
        """
        works = self.runner.dispatcher.inheritance.works
        deadline = time.monotonic() + self.config.reward.timeout_s + self.config.timeouts.stop
        while any(work.entry.task == "ScoreBatch" for work in works.values()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        left = {number for number, work in works.items() if work.entry.refs}
        quarantined = self.cache.in_quarantine()

        def over(number: int) -> None:
            left.discard(number)
            if not left:
                for ref in quarantined:
                    self.cache.release(ref)

        for number in sorted(left):
            self.runner.dispatcher.when_over(number, partial(over, number))
        if not left:
            over(0)

    def go_on_after(self, record: StepRecord | None, takeover: bool = False) -> None:
        """Everything that the coordinator keeps becomes what it was after this step; None: as at the beginning."""
        self.record, self.step = record, 0 if record is None else record.step
        self.prompts.seek(*((0, 0) if record is None else record.position))
        self.position_after = self.prompts.position
        coefficient = None if record is None else record.kl_coefficient
        samples = samples_per_step(self.config)
        self.runner.kl = kl_controller(self.config.ppo.kl, samples_per_step=samples, coefficient=coefficient)
        self.report.recount()
        self.learners.start_from(self.step, takeover)

    def cut_records(self, evaluation: bool) -> None:
        """Takes back what was written since the step done last, or since the evaluation after it."""
        sizes = RecordSizes() if self.record is None else self.record.sizes
        if evaluation:
            sizes = next((done.sizes for done in self.ledger.evaluations() if done.step == self.step), sizes)
        self.report.cut(sizes)

    async def rewind(self, why: str) -> None:
        """The run goes back to the newest whole state. Raises RunFailed where there is none that can be restored."""
        self.runner.phase = "REWIND"
        reached = self.step
        while True:
            await self.settle()
            target = self.states.newest(most=reached)
            if not target and self.states.distrusted:
                raise RunFailed(f"{why}; no other saved state in {self._unusable()}")
            if self.states.late[target] >= RESTORE_TRIES:
                raise RunFailed(
                    f"{why}; that happened {RESTORE_TRIES} times. Is the disk too slow, or a learner stuck? Go on with "
                    f"a larger timeouts.checkpoint ({self.config.timeouts.checkpoint:g} s): `quartet up --resume`"
                )
            log.warning("back from step %d to the state after step %d: %s", reached, target, why)
            self.ledger.event("rewind", f"from step {reached} to {target}: {why}")
            self.back_to(target)
            try:
                await self.learners.bring_all()
            except Rewind as error:
                why = str(error)
                continue
            # A learner ends its writing before it is restored: what it wrote is of steps that are not done any more.
            self.states.forget_after(target)
            return

    def back_to(self, step: int) -> None:
        """All that was done after ``step`` has not been."""
        record = self.states.whole[step].record if step else None
        self.states.forget_after(step)
        self.ledger.forget_after(step)
        self.go_on_after(record)
        self.cut_records(evaluation=False)

    async def settle(self) -> None:
        """Nobody works on the run any more, and no slot is leased. Who does not end what is not wanted is killed."""
        limit = self.config.timeouts.generate
        if self.winding is not None:
            self.winding.cancel()
            await asyncio.gather(self.winding, return_exceptions=True)
            self.winding = None
        await self.learners.saving.until_saved(limit)
        for member in await self.runner.dispatcher.until_idle(limit):
            log.warning("%s still works after %.0f s (timeouts.generate) and is killed", member.name, limit)
            self.runner.members.watch.kill(member)
        busy = await self.runner.dispatcher.until_idle(self.config.timeouts.stop)
        if busy:
            raise RunFailed(f"{', '.join(member.name for member in busy)} cannot be killed")
        for ref in self.cache.leased():
            self.cache.free(ref)
        self.upcoming = []


def _told(moved: asyncio.Future[None]) -> None:
    if not moved.cancelled() and (error := moved.exception()) is not None:
        log.warning("%s", error)
