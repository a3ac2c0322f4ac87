"""The coordinator: one ROUTER socket, the run's cache, lock and ledger, and the loop over the steps.

train_steps   start -> evaluation -> step, step, … -> checkpoint -> evaluation
beside it     the conversation with the replicas, and the status file; if one of these ends, the run has failed
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence
from functools import partial

from common import bus, processes
from common.config import Config
from common.config_checks import check_config
from common.config_loading import config_digest, to_json
from common.config_values import cache_prompts, cache_slots, samples_per_step, start_limit
from common.messages import Welcome
from common.models import resolve_model
from common.run_files import RunDirectory, SharedDirectory
from common.run_lock import RunLock
from common.token_cache import CacheError, Geometry, TokenCache
from common.tokenizer import TokenizerError, load_tokenizer
from services.coordinator.conversation import Conversation
from services.coordinator.dispatch import Dispatcher, LeaseLost
from services.coordinator.evaluation import Evaluator
from services.coordinator.failures import RunFailed, innermost
from services.coordinator.kl_control import kl_controller
from services.coordinator.ledger import Ledger, LedgerError
from services.coordinator.members import HOLDER, Members
from services.coordinator.prompts import PromptStream
from services.coordinator.publisher import Publisher, PublishError
from services.coordinator.report import Reporter
from services.coordinator.row import RowError
from services.coordinator.sample import Sample, close_samples, open_samples
from services.coordinator.step import StepOutcome, StepRunner

log = logging.getLogger("coordinator")

STATUS_INTERVAL_S = 0.2
KILLED_S = 1.0
"""Longest wait for replicas that were killed because they did not stop."""
EXPECTED = (RunFailed, LeaseLost, PublishError, CacheError, LedgerError, RowError, TokenizerError)
"""Failures whose message says all; anything else, but for an OSError, is logged with its traceback."""
Position = tuple[int, int]
"""(pass over the rows, rows of it that were looked at)."""


class Coordinator:
    """One run from Hello to Stop. Built only where nothing can be wrong any more with config, data and memory."""

    def __init__(self, config: Config, files: RunDirectory, lock: RunLock) -> None:
        check_config(config)
        self.config = config
        self.files = files
        self.lock = lock
        shared = lock.shared
        processes.register(shared.processes, "coordinator", 0)
        tokenizer = load_tokenizer(resolve_model(config.model.path))
        geometry = Geometry(
            slots=cache_slots(config), max_prompt_tokens=config.prompts.max_tokens,
            max_response_tokens=config.rollout.max_new_tokens, prompts=cache_prompts(config),
        )  # fmt: skip
        fingerprint = tokenizer.fingerprint
        self.cache = TokenCache.create(shared.tokens, run=config.run.name, fingerprint=fingerprint, geometry=geometry)
        self.train = PromptStream(config, tokenizer, "train", self.cache)
        self.held_out = PromptStream(config, tokenizer, "eval", self.cache)
        for stream in (self.train, self.held_out):
            stream.try_next()
        digest = config_digest(config)
        self.ledger = Ledger(files.ledger, digest, os.getpid())
        self.router = bus.Router(shared.endpoint)
        self.members = Members(self.router, self._welcome(shared), shared.processes)
        self.dispatcher = Dispatcher(self.members, start_limit(config).seconds)
        self.publisher = Publisher(self.members, self.dispatcher.next_work, config.timeouts.update)
        self.conversation = Conversation(
            config, self.router, self.members, self.dispatcher, self.publisher, self.ledger
        )  # fmt: skip
        kl = kl_controller(config.ppo.kl, samples_per_step=samples_per_step(config))
        self.runner = StepRunner(config, self.cache, self.members, self.dispatcher, self.publisher, kl)
        self.evaluator = Evaluator(config, self.cache, self.held_out, self.runner)
        self.report = Reporter(config, digest, files, shared, self.cache, tokenizer, self.ledger)
        self.dispatcher.on_done = self.report.done
        self.step = 0
        self.upcoming: list[Sample] = []
        self.position_after: Position = self.train.position
        self.winding: asyncio.Task[None] | None = None

    def _welcome(self, shared: SharedDirectory) -> Welcome:
        return Welcome(
            epoch=self.ledger.epoch, run=self.config.run.name, cache_path=str(shared.tokens),
            run_directory=str(self.files.path.resolve()), shm_directory=str(shared.path), config=to_json(self.config),
        )  # fmt: skip

    # ------------------------------------------------------------ the run

    async def run(self) -> int:
        """Runs to the end and returns the exit code; SIGTERM and SIGINT end it early and cleanly."""
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(self.train_steps())
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, work.cancel)
        talk = self.conversation
        jobs = talk.listen(), talk.probe(), talk.until_broken(), self.until_deleted(), self.show()
        helpers = [asyncio.create_task(job) for job in jobs]
        for helper in helpers:
            helper.add_done_callback(lambda ended: work.cancel())
        reason = await self.outcome(work, helpers)
        written = self.write_down(finished=not reason)
        await self.dismiss(reason or "the run is finished")
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        self.close()
        return 0 if written and not reason else 1

    async def outcome(self, work: asyncio.Task[None], helpers: Sequence[asyncio.Task[None]]) -> str:
        """Waits for the end of the steps; the reason why they ended early, or nothing."""
        await asyncio.wait([work])
        if not work.cancelled():
            error = work.exception()
            return self.failed(error) if error else ""
        ended = [helper.exception() for helper in helpers if helper.done() and not helper.cancelled()]
        if ended:
            return self.failed(ended[0] or RunFailed("the coordinator stopped to listen"))
        log.info("stopped in step %d, phase %s", self.step, self.runner.phase)
        return "the run was stopped"

    def failed(self, error: BaseException) -> str:
        cause = innermost(error)
        text = str(cause) if isinstance(cause, EXPECTED) else f"{type(cause).__name__}: {cause}"
        if not isinstance(cause, (*EXPECTED, OSError)):
            log.error("details", exc_info=error)
        log.error("the run failed in step %d, phase %s: %s", self.step, self.runner.phase, text)
        return f"the run failed: {text}"

    def write_down(self, finished: bool) -> bool:
        """Summary and ledger; whatever is wrong with them keeps nobody from being told to stop."""
        try:
            streams = (self.train, self.held_out)
            without_truth, too_long = sum(s.without_ground_truth for s in streams), sum(s.too_long for s in streams)
            self.report.write_summary(finished, without_truth, too_long)
            self.ledger.event("end", "finished" if finished else "ended early")
        except Exception as error:
            details = None if isinstance(error, OSError) else error  # a full disk says enough
            log.error("cannot write down the end of the run: %s", error, exc_info=details)
            return False
        return True

    async def dismiss(self, reason: str) -> None:
        """Tells everybody to stop, the holder when the others are gone.

        Kills, on this host, whoever has not stopped after half of ``timeouts.stop``.
        """
        self.dispatcher.close()
        self.members.stop_all(reason)
        left = await self.members.all_gone(self.config.timeouts.stop / 2)
        others = [member for member in left if member.role != HOLDER]
        for member in others or left:
            log.warning("%s (pid %d) does not stop and is killed", member.name, member.hello.pid)
            self.members.kill(member)
        for member in await self.members.all_gone(KILLED_S):
            self.members.kill(member)

    async def train_steps(self) -> None:
        """The loop over the steps."""
        self.runner.phase = "START"
        await self.conversation.until_everybody_ready()
        await self.publisher.publish()
        await self.evaluate()
        while self.step < self.config.run.steps:
            self.step += 1
            started = time.monotonic()
            samples, position = await self.take_upcoming()
            outcome = await self.runner.run(self.step, samples, partial(self.prepare_next, samples))
            await self.wound_up()
            # A task of its own: the next step's leases go out while it writes.
            self.winding = asyncio.create_task(self.wind_up(outcome, started, time.monotonic(), position))
            await self.save()
            await self.evaluate()
        await self.wound_up()

    async def take_upcoming(self) -> tuple[list[Sample], Position]:
        """This step's samples, opened while the step before was updating if the cache had room for both."""
        if not self.upcoming:
            await self.wound_up()
            self.open_next(self.step)
        samples, self.upcoming = self.upcoming, []
        return samples, self.position_after

    def open_next(self, step: int) -> None:
        prompts = self.train.next_batch(self.config.prompts.per_step)
        self.upcoming = open_samples(self.cache, prompts, self.config.rollout.responses_per_prompt, step)
        self.position_after = self.train.position

    def prepare_next(self, samples: Sequence[Sample]) -> None:
        """Called when both updates are under way and the coordinator has time."""
        self.report.write_samples(self.step, samples)
        if self.step < self.config.run.steps and self.cache.free_slots >= samples_per_step(self.config):
            self.open_next(self.step + 1)

    async def wind_up(self, outcome: StepOutcome, started: float, ended: float, position: Position) -> None:
        self.report.write_step(outcome, started, ended, position)
        close_samples(self.cache, outcome.samples)

    async def wound_up(self) -> None:
        """Waits until the step before is written down and its slots are free; raises what went wrong there."""
        if self.winding is not None:
            winding, self.winding = self.winding, None
            await winding

    async def save(self) -> None:
        """The policy as a Hugging Face directory: after the last step, and every ``checkpoint.every`` steps before."""
        last, every = self.step == self.config.run.steps, self.config.checkpoint.every
        if last or (every and self.step % every == 0):
            await self.wound_up()
            started = time.monotonic()
            saved = await self.runner.save(self.step, "final" if last else f"step-{self.step}")
            self.report.write_checkpoint(self.step, saved, time.monotonic() - started)

    async def evaluate(self) -> None:
        if self.evaluator.due(self.step):
            await self.wound_up()
            started = time.monotonic()
            samples = await self.evaluator.run(self.step)
            self.report.write_evaluation(self.step, samples, time.monotonic() - started)

    # ------------------------------------------------------------ beside the run

    async def until_deleted(self) -> None:
        """Raises RunFailed as soon as somebody has deleted the run's memory: what is mapped lives on, and nobody new
        could map it."""
        while self.lock.guards_directory():
            await asyncio.sleep(self.config.timeouts.heartbeat)
        raise RunFailed(f"{self.lock.shared.path}, where socket, token cache and weights lie, was deleted")

    async def show(self) -> None:
        """Keeps the status file up to date; a run is worth more than its picture, so a failure is only told."""
        told = False
        while True:
            try:
                self.report.write_status(self.step, self.runner.phase, self.members.status())
            except OSError as error:
                if not told:
                    log.warning("cannot write the run's status, the run goes on: %s", error)
                told = True
            await asyncio.sleep(STATUS_INTERVAL_S)

    def close(self) -> None:
        self.conversation.close()
        self.members.close()
        self.router.close()
        self.cache.close()
        self.ledger.close()
        self.lock.remove_directory()


def open_coordinator(config: Config, files: RunDirectory) -> Coordinator:
    """Takes the run's lock, removes what a dead coordinator left, and opens the run; if that fails, nothing is left."""
    files.logs.mkdir(parents=True, exist_ok=True)
    lock = RunLock.acquire(SharedDirectory.of_run(config.run.name))
    lock.clear_directory()
    try:
        return Coordinator(config, files, lock)
    except BaseException:
        lock.remove_directory()
        raise
