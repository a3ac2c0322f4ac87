"""One PPO step, as it is run.

prompts -> slots -> GENERATE --(each sample as it ends)--> SCORE
                             \\--(micro-batches as they fill)--> EVALUATE: values, logprobs, reference logprobs
        -> ADVANTAGE (here, in numpy) -> engines sleep -> UPDATE: critic beside policy -> PUBLISH -> slots are freed

From the moment that engines are told to sleep the update counts as begun: a replica that joins then, or is back, waits
for the publish. Engines that sleep are woken by the weights that PUBLISH gives them, and by nothing else.

Any replica may die in any phase: what it held is handed out again, and UPDATE and PUBLISH are repeated until every
learner holds the step's state (``learners.py``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.config import Config
from common.config_values import gpu_present, has_critic, sleeps
from common.messages import (
    Evaluate,
    Logprobs,
    Role,
    Sampling,
    Saved,
    SavePolicy,
    Sleep,
    Slept,
    UpdateCritic,
    Updated,
    UpdatePolicy,
)
from common.micro_batches import consecutive
from common.token_cache import TokenCache
from services.coordinator.agreement import Agreement
from services.coordinator.batch_advantages import BatchStatistics, write_advantages
from services.coordinator.collect import Collection
from services.coordinator.dispatch import Dispatcher
from services.coordinator.failures import RunFailed, SteppedBack, innermost
from services.coordinator.journal import Journal
from services.coordinator.kl_control import KLController
from services.coordinator.learners import Learners
from services.coordinator.leases import LeaseLost, result_of
from services.coordinator.member import Member
from services.coordinator.members import Members
from services.coordinator.publisher import Publisher
from services.coordinator.sample import Sample, counted
from services.coordinator.unscored import Unscored

log = logging.getLogger("step")


@dataclass
class StepOutcome:
    """What a step leaves to be written down."""

    step: int
    samples: Sequence[Sample]
    statistics: BatchStatistics
    policy: dict[str, float] = field(default_factory=dict[str, float])
    critic: dict[str, float] = field(default_factory=dict[str, float])
    kl_coefficient: float = 0.0
    retries: int = 0
    advantage_s: float = 0.0
    publish_s: float = 0.0
    timings: dict[str, float] = field(default_factory=dict[str, float])
    """What sleep and publish measured, by name: seconds, GiB, bytes and counts."""


class StepRunner:
    """Runs steps one after the other over the same replicas and cache."""

    def __init__(
        self, config: Config, cache: TokenCache, journal: Journal, members: Members, dispatcher: Dispatcher,
        publisher: Publisher, learners: Learners, kl: KLController,
    ) -> None:  # fmt: skip
        self.config = config
        self.cache = cache
        self.journal = journal
        self.learners = learners
        self.members = members
        self.dispatcher = dispatcher
        self.publisher = publisher
        self.kl = kl
        self.agreement = Agreement(config)
        self.unscored = Unscored()
        self.with_critic = has_critic(config)
        self.phase = ""

    async def run(self, step: int, samples: Sequence[Sample], while_updating: Callable[[], None]) -> StepOutcome:
        """One whole step. ``while_updating`` is called while both updates are under way: time to prepare the next."""
        self.phase = "GENERATE"
        self.learners.begin(step)
        try:
            async with asyncio.TaskGroup() as group:
                collecting = group.create_task(self.collect(step, samples, self.training_sampling()))
                group.create_task(self.write_values_and_logprobs(samples))
            outcome = self.advantages(step, samples)
            outcome.retries = collecting.result()
            await self.update(outcome, while_updating)
            while not await self.publish(outcome):
                await self.update(outcome, lambda: None)
        except (LeaseLost, ExceptionGroup) as error:
            cause = innermost(error)
            raise (RunFailed(str(cause)) if isinstance(cause, LeaseLost) else cause) from error
        return outcome

    async def collect(self, step: int, samples: Sequence[Sample], sampling: Sampling) -> int:
        """Generates and scores; returns the number of retries."""

        def replicas() -> int:
            return sum(member.version == self.publisher.version for member in self.members.of_role("rollout"))

        collection = Collection(self.config, self.cache, self.journal, self.dispatcher, replicas, step, samples)
        await collection.collect(sampling, self.publisher.ensure)
        return collection.retries

    def training_sampling(self) -> Sampling:
        rollout = self.config.rollout
        length, seed = rollout.max_new_tokens, self.config.run.seed
        return Sampling(temperature=rollout.temperature, max_new_tokens=length, seed=seed)

    # ------------------------------------------------------------ EVALUATE

    async def write_values_and_logprobs(self, samples: Sequence[Sample]) -> None:
        """Values and logprobs of micro-batches in sample order, each as soon as its last sample is generated."""
        async with asyncio.TaskGroup() as group:
            for batch in consecutive(samples, self.config.trainer.micro_batch):
                group.create_task(self._logprobs(batch))
            if self.with_critic:
                for batch in consecutive(samples, self.config.critic.micro_batch):
                    group.create_task(self._values(batch))

    async def _logprobs(self, batch: Sequence[Sample]) -> None:
        reference = self.config.ppo.kl.placement != "none"
        refs = [sample.ref for sample in await with_response(batch)]
        if refs:
            task, limit = Logprobs(refs=refs, reference=reference), self.config.timeouts.evaluate
            await self.learners.work("trainer", "EVALUATE", task, limit)

    async def _values(self, batch: Sequence[Sample]) -> None:
        refs = [sample.ref for sample in await with_response(batch)]
        if refs:
            await self.learners.work("critic", "EVALUATE", Evaluate(refs=refs), self.config.timeouts.evaluate)

    # ------------------------------------------------------------ ADVANTAGE

    def advantages(self, step: int, samples: Sequence[Sample]) -> StepOutcome:
        """Raises RunFailed where the engine does not sample what the trainer trains, or where nothing is scored."""
        self.phase = "ADVANTAGE"
        started = time.monotonic()
        self.unscored.check_step(step, samples)
        coefficient = self.kl.coefficient
        statistics = write_advantages(self.cache, counted(samples), self.config.ppo, coefficient)
        self.agreement.check(step, statistics, self.cache, counted(samples))
        if self.config.ppo.kl.placement != "none" and statistics.samples:
            self.kl.observe(statistics.kl_per_response, statistics.samples)
        return StepOutcome(
            step, samples, statistics, kl_coefficient=coefficient, advantage_s=time.monotonic() - started
        )  # fmt: skip

    # ------------------------------------------------------------ UPDATE and PUBLISH

    async def begin(self, step: int) -> None:
        """From here on nobody that starts is granted weights, and nobody is told to apply any.

        An engine that was granted them before and takes memory of the trainer's GPU at present is waited for: what it
        finds free there must not be what the update needs.
        """
        self.publisher.begun(step)
        manifest, limit = self.publisher.manifest, self.config.rollout.vllm.start_timeout
        late = await self.members.until_started_on(manifest.gpu, limit) if manifest is not None else []
        if late:
            names = ", ".join(member.name for member in late)
            log.warning(
                "step %d: the update begins although %s still starts on the trainer's GPU after %.0f s "
                "(rollout.vllm.start_timeout): memory may be short", step, names, limit,
            )  # fmt: skip

    async def sleep(self, outcome: StepOutcome) -> None:
        """Every engine gives its KV cache back, where it is in the way of the update."""
        manifest = self.publisher.manifest
        gpu = gpu_present() or (manifest is not None and bool(manifest.gpu))
        if not sleeps(self.config, gpu):
            return
        started = time.monotonic()
        asked = [self._sleep(outcome.step, member) for member in self.members.of_role("rollout")]
        asleep = [slept for slept in await asyncio.gather(*asked) if slept is not None]
        outcome.timings["sleep_s"] = time.monotonic() - started
        awake_bytes = max((slept.used_before_bytes for slept in asleep), default=0)
        asleep_bytes = max((slept.used_after_bytes for slept in asleep), default=0)
        if awake_bytes:  # 0 on CPU, where nobody measures it
            outcome.timings |= {
                "engine_used_awake_gib": awake_bytes / 2**30, "engine_used_asleep_gib": asleep_bytes / 2**30
            }  # fmt: skip

    async def _sleep(self, step: int, member: Member) -> Slept | None:
        """None for a replica that died: its memory is free as well. Raises LeaseLost."""
        limit = self.config.timeouts.update
        try:
            done = await self.dispatcher.submit("rollout", "UPDATE", step, Sleep(), limit, member=member)
        except LeaseLost as lost:
            if lost.kind != "dead":
                raise
            log.warning("step %d: %s", step, lost)
            return None
        return result_of(done, Slept)

    async def update(self, outcome: StepOutcome, while_updating: Callable[[], None]) -> None:
        """Once engines sleep, the critic learns beside the policy, each from the same samples in the same order.

        What a learner loses by dying before the other is done is repeated.
        """
        self.phase = "UPDATE"
        await self.begin(outcome.step)
        await self.sleep(outcome)
        behind: Sequence[Role] = self.learners.roles
        while behind:
            async with asyncio.TaskGroup() as group:
                for role in behind:
                    group.create_task(self._update(role, outcome))
                await asyncio.sleep(0)  # the leases are out: there is time now
                while_updating()
                while_updating = _nothing
            behind = self.learners.behind()

    async def _update(self, role: Role, outcome: StepOutcome) -> None:
        refs, step = [sample.ref for sample in counted(outcome.samples)], outcome.step
        task = UpdateCritic(refs=refs) if role == "critic" else UpdatePolicy(
            refs=refs, version=step, kl_coefficient=outcome.kl_coefficient, skip=step <= self.config.critic.warmup_steps
        )  # fmt: skip
        done = await self.learners.update(role, task)
        metrics = result_of(done, Updated).metrics
        if role == "critic":
            outcome.critic = metrics
        else:
            outcome.policy = metrics

    async def publish(self, outcome: StepOutcome) -> bool:
        """False where a learner died meanwhile, so that the update must be repeated."""
        self.phase = "PUBLISH"
        started = time.monotonic()
        self.learners.saving.save(outcome.step, last=outcome.step == self.config.run.steps)
        try:
            if self.publisher.version != outcome.step and not self.learners.behind():
                found = self.publisher.version
                raise RunFailed(f"the trainer finished step {outcome.step} but committed policy@{found}")
            await self.publisher.publish()
        except SteppedBack as gone:
            log.warning("step %d: %s", outcome.step, gone)
        if self.learners.behind():
            return False
        outcome.publish_s = time.monotonic() - started
        outcome.timings |= self._published()
        return True

    def _published(self) -> dict[str, float]:
        facts = self.publisher.last
        if facts is None:
            return {}
        timings = {
            "weights_held_s": facts.held_s, "weights_proved_s": facts.proved_s,
            "weights_copied_bytes": float(facts.copied_bytes), "weights_aliased": float(facts.aliased),
            "weights_copied": float(facts.copied),
        }  # fmt: skip
        if facts.device_used_bytes:
            timings["engine_used_woken_gib"] = facts.device_used_bytes / 2**30
        return timings

    # ------------------------------------------------------------ CHECKPOINT

    async def save(self, name: str) -> Saved:
        """Has the trainer save the published policy under ``name``. Raises LeaseLost, for example for a full disk."""
        self.phase = "CHECKPOINT"
        task, limit = SavePolicy(name=name, version=self.publisher.version), self.config.timeouts.checkpoint
        done = await self.learners.work("trainer", "CHECKPOINT", task, limit)
        return result_of(done, Saved)


def _nothing() -> None:
    """There is no more to prepare."""


async def with_response(batch: Sequence[Sample]) -> list[Sample]:
    """Waits until every sample of a micro-batch has ended; returns those that have a response.

    Samples whose scoring failed stay in: when that is known depends on timing, and the batch must not.
    """
    for sample in batch:
        await sample.ended.wait()
    return [sample for sample in batch if sample.finished is not None]
