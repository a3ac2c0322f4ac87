"""The coordinator: one ROUTER socket, the run's cache, lock and ledger, and the loop over the steps (``training.py``).

beside the loop     the conversation with the replicas, the watchdog, the status file; if one ends, the run has failed
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from common import bus, processes
from common.config import Config
from common.config_checks import check_config
from common.config_loading import config_digest, to_json
from common.config_values import cache_prompts, cache_slots, learner_roles, samples_per_step, start_limit
from common.curve import ServerKeys
from common.log_lines import working_on
from common.messages import Welcome
from common.models import resolve_model
from common.records import write_whole
from common.run_files import FINISHED, STOPPED, RunDirectory, SharedDirectory
from common.run_lock import RunLock
from common.token_cache import CacheError, Geometry, TokenCache
from common.tokenizer import TextTokenizer, TokenizerError, load_tokenizer
from services.coordinator.conversation import Conversation
from services.coordinator.dispatch import Dispatcher
from services.coordinator.evaluation import Evaluator
from services.coordinator.failures import PublishError, RunFailed, innermost
from services.coordinator.journal import Journal
from services.coordinator.kl_control import kl_controller
from services.coordinator.learners import Learners
from services.coordinator.leases import LeaseLost
from services.coordinator.ledger import Ledger, LedgerError, bound_to
from services.coordinator.members import HOLDER, Members
from services.coordinator.prompts import PromptStream
from services.coordinator.publisher import Publisher
from services.coordinator.report import Reporter
from services.coordinator.row import RowError
from services.coordinator.states import SavedStates
from services.coordinator.step import StepRunner
from services.coordinator.training import Training
from services.coordinator.watchdog import Watchdog

log = logging.getLogger("coordinator")

STATUS_INTERVAL_S = 0.2
KILLED_S = 1.0
"""Longest wait for replicas that were killed because they did not stop."""
EXPECTED = (RunFailed, LeaseLost, PublishError, CacheError, LedgerError, RowError, TokenizerError)
"""Failures whose message says all; anything else, but for an OSError, is logged with its traceback."""


class Coordinator:
    """One run from Hello to Stop. Built only where nothing can be wrong any more with config, data and memory.

    With ``takeover`` the run's replicas, token cache and weights are there, and their coordinator is dead.
    """

    def __init__(self, config: Config, files: RunDirectory, lock: RunLock, takeover: bool) -> None:
        check_config(config)
        self.config = config
        self.lock = lock
        self.takeover = takeover
        shared = lock.shared
        processes.register(shared.processes, "coordinator", 0)
        tokenizer = load_tokenizer(resolve_model(config.model.path))
        self.cache = open_cache(config, shared, tokenizer, takeover)
        prompts, self.held_out = (PromptStream(config, tokenizer, split, self.cache) for split in ("train", "eval"))
        for stream in (prompts, self.held_out):
            stream.try_next()
        self.ledger = Ledger(files.ledger, to_json(config), os.getpid())
        journal = Journal(self.ledger)
        if config.bus.group_access and not shared.secret():  # before anybody can say Hello
            write_whole(shared.secret_file, secrets.token_hex(16).encode())
        keys = ServerKeys.load(Path(config.bus.keys)) if config.bus.listen else None
        self.router = bus.Router(shared.endpoint, config.bus.listen, keys)
        self.members = Members(self.router, self._welcome(files, shared), shared.processes)
        self.dispatcher = Dispatcher(self.members, start_limit(config).seconds, journal)
        publisher = Publisher(self.members, self.dispatcher.next_work, config.timeouts.update)
        states = SavedStates(
            files.checkpoints, config.run.name, self.ledger.epoch, learner_roles(config), config.checkpoint
        )
        states.scan()
        self.learners = Learners(config, self.members, self.dispatcher, publisher, states)
        self.conversation = Conversation(
            config, self.router, self.members, self.dispatcher, publisher, self.ledger, self.learners
        )
        kl = kl_controller(config.ppo.kl, samples_per_step=samples_per_step(config))
        self.runner = StepRunner(
            config, self.cache, journal, self.members, self.dispatcher, publisher, self.learners, kl
        )
        evaluator = Evaluator(config, self.cache, journal, self.held_out, self.runner)
        self.report = Reporter(config, config_digest(config), files, shared, self.cache, tokenizer, self.ledger)
        self.dispatcher.on_done = self.report.done
        self.training = Training(
            config, self.cache, self.ledger, journal, prompts, self.runner, evaluator, self.learners, states,
            self.report,
        )  # fmt: skip
        self.watchdog = Watchdog(config.timeouts.progress, self.members, self.dispatcher, publisher)
        if takeover:
            self.training.take_over()
        else:
            self.training.resume()
            self.ledger.bind(shared.tokens)
        if config.bus.group_access:
            self.admit_others(shared)

    def admit_others(self, shared: SharedDirectory) -> None:
        """Reward, which runs user code as another user of the group, may come in; whoever is more has the secret."""
        self.conversation.gate.secret = shared.secret()
        shared.open_to_group()
        shared.leave_note()

    def _welcome(self, files: RunDirectory, shared: SharedDirectory) -> Welcome:
        return Welcome(
            epoch=self.ledger.epoch, run=self.config.run.name, cache_path=str(shared.tokens),
            run_directory=str(files.path.resolve()), shm_directory=str(shared.path), config=to_json(self.config),
        )  # fmt: skip

    # ------------------------------------------------------------ the run

    async def run(self) -> int:
        """Runs to the end and returns the exit code; SIGTERM and SIGINT end it early and cleanly."""
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(self.work())
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, work.cancel)
        self.conversation.on_stop = work.cancel
        self.conversation.step = lambda: self.training.step
        helpers = [asyncio.create_task(job) for job in self.jobs()]
        for helper in helpers:
            helper.add_done_callback(lambda ended: work.cancel())
        reason = await self.outcome(work, helpers)
        written = self.write_down(finished=not reason)
        await self.dismiss(reason or FINISHED)
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        self.close()
        self.leave_note(reason or FINISHED)
        good = not reason or (reason == STOPPED and self.config.bus.group_access)  # docker would start it again
        return 0 if written and good else 1

    def jobs(self) -> Sequence[Coroutine[Any, Any, None]]:
        talk = self.conversation
        return (
            talk.listen(),
            talk.probe(),
            talk.until_broken(),
            self.watchdog.watch(),
            self.until_deleted(),
            self.show(),
        )

    async def work(self) -> None:
        self.runner.phase = "START"
        await self.conversation.until_everybody_ready()
        if self.takeover:
            await self.training.settle_inheritance()
        await self.training.run()

    async def outcome(self, work: asyncio.Task[None], helpers: Sequence[asyncio.Task[None]]) -> str:
        """Waits for the end of the steps; the reason why they ended early, or nothing."""
        await asyncio.wait([work])
        if not work.cancelled():
            error = work.exception()
            return self.failed(error) if error else ""
        ended = [helper.exception() for helper in helpers if helper.done() and not helper.cancelled()]
        if ended:
            return self.failed(ended[0] or RunFailed("the coordinator stopped to listen"))
        log.info("stopped in step %d, phase %s", self.training.step, self.runner.phase)
        await self.training.save_what_there_is(self.config.timeouts.stop / 2)
        return STOPPED

    def leave_note(self, reason: str) -> None:
        """For whoever docker starts again."""
        if not self.config.bus.group_access:
            return
        try:
            self.lock.shared.leave_note(reason)
        except OSError as error:
            log.warning("%s: cannot be written: %s", self.lock.shared.note, error.strerror)

    def failed(self, error: BaseException) -> str:
        cause = innermost(error)
        text = str(cause) if isinstance(cause, EXPECTED) else f"{type(cause).__name__}: {cause}"
        if not isinstance(cause, (*EXPECTED, OSError)):
            log.error("details", exc_info=error)
        log.error("the run failed in step %d, phase %s: %s", self.training.step, self.runner.phase, text)
        return f"the run failed: {text}"

    def write_down(self, finished: bool) -> bool:
        """Summary and ledger; whatever is wrong with them keeps nobody from being told to stop."""
        try:
            streams = (self.training.prompts, self.held_out)
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
        left = await self.members.until_all_gone(self.config.timeouts.stop / 2)
        others = [member for member in left if member.role != HOLDER]
        for member in others or left:
            log.warning("%s (pid %d) does not stop and is killed", member.name, member.hello.pid)
            self.members.watch.kill(member)
        for member in await self.members.until_all_gone(KILLED_S):
            self.members.watch.kill(member)

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
            working_on(self.training.step, self.runner.phase)
            try:
                self.report.write_status(self.training.step, self.runner.phase, self.members.status())
            except OSError as error:
                if not told:
                    log.warning("cannot write the run's status, the run goes on: %s", error)
                told = True
            await asyncio.sleep(STATUS_INTERVAL_S)

    def close(self) -> None:
        self.learners.close()
        self.conversation.close()
        self.members.close()
        self.router.close()
        self.cache.close()
        self.ledger.close()
        self.lock.remove_directory()


def open_cache(config: Config, shared: SharedDirectory, tokenizer: TextTokenizer, takeover: bool) -> TokenCache:
    """The run's token cache: a new one, or that of the coordinator before."""
    name, fingerprint = config.run.name, tokenizer.fingerprint
    if takeover:
        return TokenCache.adopt(shared.tokens, run=name, fingerprint=fingerprint)
    geometry = Geometry(
        slots=cache_slots(config), max_prompt_tokens=config.prompts.max_tokens,
        max_response_tokens=config.rollout.max_new_tokens, prompts=cache_prompts(config),
    )  # fmt: skip
    return TokenCache.create(shared.tokens, run=name, fingerprint=fingerprint, geometry=geometry)


def open_coordinator(config: Config, files: RunDirectory) -> Coordinator:
    """Takes the run's lock, and takes over what a dead coordinator left or opens the run anew.

    If that fails, nothing is left.
    """
    files.logs.mkdir(parents=True, exist_ok=True)
    lock = RunLock.acquire(SharedDirectory.of_run(config.run.name))
    try:
        if bound_to(files.ledger, lock.shared.tokens):
            try:
                return Coordinator(config, files, lock, takeover=True)
            except CacheError as error:
                log.warning("the token cache that is there cannot be taken over, so the run starts again: %s", error)
        lock.clear_directory()
        return Coordinator(config, files, lock, takeover=False)
    except BaseException:
        lock.remove_directory()
        raise
