"""One coordinator after another over the same ledger, token cache and socket, and the training loop's part in that."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from common.config import Config
from common.config_loading import config_digest, load_config
from common.messages import Evaluate, Role
from common.models import resolve_model
from common.run_files import RunDirectory, SharedDirectory
from common.token_cache import TokenCache
from common.tokenizer import load_tokenizer
from services.coordinator.evaluation import Evaluator
from services.coordinator.kl_control import kl_controller
from services.coordinator.prompts import PromptStream
from services.coordinator.report import Reporter
from services.coordinator.step import StepRunner
from services.coordinator.training import Training
from tests.wire.wire_collect import SAMPLES, Setting
from tests.wire.wire_support import Processes, Star, star, until


class Succession:
    """A run's coordinators, one at a time. Each ends as SIGKILL would end it: nobody is told."""

    def __init__(self, shared: SharedDirectory, replicas: Processes, config: Config) -> None:
        self.shared = shared
        self.replicas = replicas
        self.config = config
        self.setting = Setting(shared, config, frozenset(), 32)
        self.reigns = 0
        self.tokenizer = load_tokenizer(resolve_model("tiny"))

    @asynccontextmanager
    async def reign(self) -> AsyncGenerator[Star]:
        """The next coordinator. From the second on it adopts the cache of the one before."""
        if self.reigns:
            self.setting.cache.close()
            run, fingerprint = self.shared.path.name.removeprefix("quartet-"), self.tokenizer.fingerprint
            self.setting.cache = TokenCache.adopt(self.shared.tokens, run=run, fingerprint=fingerprint)
        self.reigns += 1
        async with star(self.shared, self.config, str(self.shared.tokens)) as self.setting.star:
            yield self.setting.star

    def training(self) -> Training:
        """The training loop of the coordinator that reigns, over the star's own parts."""
        star, cache, config = self.setting.star, self.setting.cache, self.config
        tokenizer = self.tokenizer
        prompts, held_out = (PromptStream(config, tokenizer, split, cache) for split in ("train", "eval"))
        runner = StepRunner(
            config, cache, star.journal, star.members, star.dispatcher, star.publisher, star.learners,
            kl_controller(config.ppo.kl, samples_per_step=len(self.setting.prompts)),
        )  # fmt: skip
        evaluator = Evaluator(config, cache, star.journal, held_out, runner)
        files = RunDirectory(self.shared.path / "run")
        files.path.mkdir(exist_ok=True)
        report = Reporter(config, config_digest(config), files, self.shared, cache, tokenizer, star.ledger)
        return Training(
            config, cache, star.ledger, star.journal, prompts, runner, evaluator, star.learners, star.states, report
        )

    def close(self) -> None:
        self.setting.cache.close()


@asynccontextmanager
async def succession(shared: SharedDirectory, replicas: Processes, *more: str) -> AsyncGenerator[Succession]:
    """``more`` are overrides of the config."""
    given = ("rollout.replicas=1", "eval.rows=0", "timeouts.heartbeat=0.2", "timeouts.stop=4", "timeouts.start=20")
    config = load_config("tiny", (*given, "timeouts.update=20", "rollout.device=cpu", *more))
    found = Succession(shared, replicas, config)
    try:
        yield found
    finally:
        found.close()


async def until_evaluating(first: Star, replicas: Processes, task: Evaluate) -> None:
    """A critic has begun on this work and does not end it before ``replicas.go()``."""
    replicas.start("critic", 0, "block:EVALUATE")
    await first.ready("critic")
    first.dispatcher.submit("critic", "EVALUATE", 1, task, 20.0)
    await until(lambda: bool(began(replicas, "critic")), "the lease")


async def until_three_are_scored(first: Star, replicas: Processes, setting: Setting) -> subprocess.Popen[bytes]:
    """A rollout replica, which is returned, has ended three of the step's samples and stands still in the fourth."""
    setting.open()
    rollout = replicas.start("rollout", 0, "block:GENERATE", "after:3")
    replicas.start("reward")
    await first.ready("rollout")
    await first.ready("reward")
    await setting.publish()
    collecting = asyncio.create_task(setting.collect())
    await until(lambda: len(scored(replicas)) == 3, "three scored samples")
    collecting.cancel()
    await asyncio.wait([collecting])
    return rollout


def began(replicas: Processes, role: Role, number: int = 0) -> list[str]:
    return [line for line in replicas.noted(role, number) if line.startswith("began") and "APPLY" not in line]


def once(scored: list[str]) -> bool:
    return len(scored) == len(set(scored)) == SAMPLES


def scored(replicas: Processes) -> list[str]:
    path = replicas.folder / "scored"
    return path.read_text().split() if path.exists() else []
