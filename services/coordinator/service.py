"""The coordinator: one ROUTER socket, the run's cache, lock and ledger, and the loop over the steps."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence

from common import bus, processes
from common.config import Config
from common.config_checks import cache_prompts, cache_slots, check_config, has_critic, samples_per_step
from common.config_loading import config_digest, to_json
from common.messages import (
    Ack, Done, Failed, Heartbeat, Hello, Manifest, Message, Ready, Rehello, Role, SamplesFinished, UpdateBegun,
    UpdateCommitted, WeightsApplied, Welcome,
)  # fmt: skip
from common.models import resolve_model
from common.run_files import RunDirectory, SharedDirectory
from common.run_lock import RunLock
from common.token_cache import Geometry, TokenCache
from common.tokenizer import load_tokenizer
from services.coordinator.dispatch import Dispatcher
from services.coordinator.evaluation import Evaluator
from services.coordinator.kl_control import kl_controller
from services.coordinator.ledger import Ledger
from services.coordinator.members import Member, Members
from services.coordinator.prompts import PromptStream
from services.coordinator.publisher import Publisher
from services.coordinator.report import Reporter
from services.coordinator.sample import Sample, close_samples, open_samples
from services.coordinator.step import RunFailed, StepOutcome, StepRunner

log = logging.getLogger("coordinator")

STATUS_INTERVAL_S = 0.2
Position = tuple[int, int]
"""(pass over the rows, rows of it that were looked at)."""


class Coordinator:
    """One run from Hello to Stop. Built only where nothing can be wrong any more with config, data, model and memory."""

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
        self.cache = TokenCache.create(shared.tokens, run=config.run.name, fingerprint=tokenizer.fingerprint, geometry=geometry)
        self.train = PromptStream(config, tokenizer, "train", self.cache)
        held_out = PromptStream(config, tokenizer, "eval", self.cache)
        digest = config_digest(config)
        self.ledger = Ledger(files.ledger, digest, os.getpid())
        self.router = bus.Router(shared.endpoint)
        self.members = Members(self.router, self._welcome(shared), shared.processes)
        self.dispatcher = Dispatcher(self.members, config.timeouts.start)
        self.publisher = Publisher(self.members, self.dispatcher.next_work, config.timeouts.update)
        kl = kl_controller(config.ppo.kl, samples_per_step=samples_per_step(config))
        self.runner = StepRunner(config, self.cache, self.members, self.dispatcher, self.publisher, kl)
        self.evaluator = Evaluator(config, self.cache, held_out, self.runner)
        self.report = Reporter(config, digest, files, shared, self.cache, tokenizer, self.ledger)
        self.dispatcher.on_done = self.report.done
        self.members.on_ready = self.on_ready
        self.members.on_death = self.on_death
        self.everybody_ready = asyncio.Event()
        self.step = 0
        self.upcoming: list[Sample] = []
        self.position_after: Position = self.train.position

    def _welcome(self, shared: SharedDirectory) -> Welcome:
        return Welcome(
            epoch=self.ledger.epoch, run=self.config.run.name, cache_path=str(shared.tokens),
            run_directory=str(self.files.path), shm_directory=str(shared.path), config=to_json(self.config),
        )  # fmt: skip

    # ------------------------------------------------------------ the run

    async def run(self) -> int:
        """Runs to the end and returns the exit code; SIGTERM and SIGINT end it early and cleanly."""
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(self.train_steps())
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, work.cancel)
        helpers = [asyncio.create_task(self.listen()), asyncio.create_task(self.show_status())]
        code, reason = 1, "the run failed"
        try:
            await work
            code, reason = 0, "the run is finished"
        except asyncio.CancelledError:
            reason = "the run was stopped"
            log.info("stopped in step %d, phase %s", self.step, self.runner.phase)
        except Exception as error:
            log.error("the run failed in step %d, phase %s: %s", self.step, self.runner.phase, innermost(error), exc_info=error)
        self.report.write_summary(finished=code == 0)
        self.ledger.event("end", reason)
        self.members.stop_all(reason)
        for member in await self.members.all_gone(self.config.timeouts.stop / 2):
            log.warning("%s (pid %d) does not stop", member.name, member.hello.pid)
        for task in helpers:
            task.cancel()
        self.close()
        return code

    async def train_steps(self) -> None:
        """The loop over the steps."""
        await self.start()
        await self.evaluate(0)
        for self.step in range(1, self.config.run.steps + 1):
            started = time.monotonic()
            samples, position = self.take_upcoming()
            outcome = await self.runner.run(self.step, samples, lambda: self.prepare_next(samples))  # noqa: B023
            # Written down and freed when the next leases are out, so that no service waits for it.
            asyncio.get_running_loop().call_soon(self.wind_up, outcome, started, time.monotonic(), position)
            if self.evaluator.due(self.step):
                await asyncio.sleep(0)
                await self.evaluate(self.step)
        await asyncio.sleep(0)

    def take_upcoming(self) -> tuple[list[Sample], Position]:
        """This step's samples, opened while the step before was updating if the cache had room for both."""
        if not self.upcoming:
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

    def wind_up(self, outcome: StepOutcome, started: float, ended: float, position: Position) -> None:
        self.report.write_step(outcome, started, ended, position)
        close_samples(self.cache, outcome.samples)

    async def evaluate(self, step: int) -> None:
        if self.evaluator.due(step):
            started = time.monotonic()
            samples = await self.evaluator.run(step)
            self.report.write_evaluation(step, samples, time.monotonic() - started)

    async def start(self) -> None:
        """Returns when every service is ready and every engine has proved the first weights."""
        self.runner.phase = "START"
        limit = self.config.timeouts.start
        try:
            await asyncio.wait_for(self.everybody_ready.wait(), limit)
        except TimeoutError:
            missing = ", ".join(f"{found} of {wanted} {role}" for role, (found, wanted) in self.attendance().items() if found < wanted)
            raise RunFailed(f"not everybody is ready after {limit:.0f} s (timeouts.start): {missing}; see their logs") from None
        await self.publisher.publish()

    def attendance(self) -> dict[Role, tuple[int, int]]:
        """For each role how many replicas are ready, and how many the run starts with."""
        wanted: dict[Role, int] = {"rollout": self.config.rollout.replicas, "reward": max(1, self.config.reward.replicas), "trainer": 1}
        if has_critic(self.config):
            wanted["critic"] = 1
        return {role: (len(self.members.of_role(role)), count) for role, count in wanted.items()}

    # ------------------------------------------------------------ members

    def on_ready(self, member: Member, manifest: Manifest | None) -> None:
        if manifest is not None and self.publisher.manifest is None:
            self.publisher.manifest = manifest
        if all(found >= wanted for found, wanted in self.attendance().values()):
            if member.role == "rollout" and self.everybody_ready.is_set() and self.publisher.manifest is not None:
                task = asyncio.create_task(self.publisher.apply(member, self.publisher.manifest))
                task.add_done_callback(lambda done: self.late_rollout(member, done))
            self.everybody_ready.set()
        self.dispatcher.pump(member.role)

    def late_rollout(self, member: Member, applied: asyncio.Task[None]) -> None:
        """A rollout replica that joins a running run gets work once its receipt is right."""
        if not applied.cancelled() and applied.exception() is not None:
            log.error("%s joined late and gets no work: %s", member.name, applied.exception())
        self.dispatcher.pump("rollout")

    def on_death(self, member: Member, reason: str) -> None:
        level = logging.INFO if self.members.stopping else logging.WARNING
        log.log(level, "%s (pid %d) is gone: %s", member.name, member.hello.pid, reason)
        self.ledger.event("death", f"{member.name}: {reason}")
        self.publisher.member_died(member)
        self.dispatcher.member_died(member, reason)

    async def show_status(self) -> None:
        while True:
            self.report.write_status(self.step, self.runner.phase, self.members.status())
            await asyncio.sleep(STATUS_INTERVAL_S)

    # ------------------------------------------------------------ messages

    async def listen(self) -> None:
        while True:
            peer, message = await self.router.receive()
            if isinstance(message, bus.BadMessage):
                log.error("%s sent what is no message (%d bytes): %s", peer.decode(errors="replace"), message.size, message.reason)
            elif isinstance(message, Hello):
                self.members.hello(peer, message)
            elif peer not in self.members.by_peer or message.epoch != self.ledger.epoch:
                self.answer(peer, Rehello(epoch=self.ledger.epoch))
            else:
                self.members.by_peer[peer].heard = time.monotonic()
                self.take(peer, message)

    def take(self, peer: bytes, message: Message) -> None:
        """One message of a member. What is repeated until acknowledged is acknowledged, also when it comes late."""
        match message:
            case Ready():
                self.members.ready(peer, message)
            case Heartbeat():
                self.members.beat(peer)
            case SamplesFinished():
                self.dispatcher.finished(message)
            case Done(work=work):
                self.answer(peer, Ack(epoch=self.ledger.epoch, work=work))
                self.dispatcher.done(message)
            case Failed(work=work):
                self.answer(peer, Ack(epoch=self.ledger.epoch, work=work))
                if not self.publisher.failed(message):
                    self.dispatcher.failed(message)
            case UpdateBegun(version=version):
                self.publisher.begun(version)
            case UpdateCommitted():
                self.publisher.committed(message)
            case WeightsApplied(work=work):
                self.answer(peer, Ack(epoch=self.ledger.epoch, work=work))
                self.publisher.applied(message)
            case _:
                log.error("%s sent an unexpected %s", peer.decode(errors="replace"), type(message).__name__)

    def answer(self, peer: bytes, message: Message) -> None:
        member = self.members.by_peer.get(peer)
        try:
            self.router.send(peer, message)
        except bus.PeerGone:
            if member is not None:
                self.members.bury(member, "its connection is gone")

    def close(self) -> None:
        self.router.close()
        self.cache.close()
        self.ledger.close()
        self.lock.remove_directory()


def innermost(error: BaseException) -> BaseException:
    """The first plain exception inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def open_coordinator(config: Config, files: RunDirectory) -> Coordinator:
    """Takes the run's lock, removes what a dead coordinator left, and opens the run; leaves nothing behind if that fails."""
    files.logs.mkdir(parents=True, exist_ok=True)
    lock = RunLock.acquire(SharedDirectory.of_run(config.run.name))
    lock.clear_directory()
    try:
        return Coordinator(config, files, lock)
    except BaseException:
        lock.remove_directory()
        raise
