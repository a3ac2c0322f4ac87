"""What the coordinator writes down: metrics.jsonl, samples.jsonl, status.json, the ledger's steps, and summary.json."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import msgspec
import numpy as np

from common.config import Config
from common.messages import Done, Hosted, Phase, Role, Saved, Slept
from common.records import SampleRecord, ServiceStatus, Status, StepMetrics, Summary, append_line, write_whole
from common.run_files import RunDirectory, SharedDirectory
from common.token_cache import TokenCache
from common.tokenizer import TextTokenizer
from services.coordinator.batch_advantages import BatchStatistics
from services.coordinator.busy import BusyClock
from services.coordinator.ledger import EvaluationRecord, Ledger, RecordSizes, StepRecord
from services.coordinator.sample import Sample
from services.coordinator.step import StepOutcome
from services.coordinator.unscored import reason

log = logging.getLogger("report")


@dataclass
class Totals:
    """Figures over the whole run."""

    started: float = field(default_factory=time.monotonic)
    started_unix: float = field(default_factory=time.time)
    earlier_s: float = 0.0
    """Seconds that earlier coordinators took for the steps that count."""
    steps: int = 0
    samples: int = 0
    masked: int = 0
    rewards: list[float | None] = field(default_factory=list[float | None])
    """Of each step; None where no sample could be scored."""
    accuracies: list[float | None] = field(default_factory=list[float | None])
    """Of each evaluation; None likewise."""
    phase_s: dict[str, float] = field(default_factory=dict[str, float])
    idle_s: float = 0.0
    step_s: float = 0.0
    trained_model: str | None = None
    hits: dict[str, int] = field(default_factory=dict[str, int])
    misses: dict[str, int] = field(default_factory=dict[str, int])


class Reporter:
    """Writes records; everything that depends on the clock is kept apart from what depends on the seed alone."""

    def __init__(
        self, config: Config, digest: str, files: RunDirectory, shared: SharedDirectory, cache: TokenCache,
        tokenizer: TextTokenizer, ledger: Ledger,
    ) -> None:  # fmt: skip
        self.config = config
        self.digest = digest
        self.files = files
        self.shared = shared
        self.cache = cache
        self.tokenizer = tokenizer
        self.ledger = ledger
        self.clock = BusyClock()
        self.totals = Totals()
        self.memory: dict[str, int] = {}
        self.last: StepMetrics | None = None

    def done(self, role: Role, phase: Phase, done: Done) -> None:
        """Takes in every finished lease.

        Falling asleep is work of a service, but no part of the update itself; exporting memory to one that starts is
        part of no step.
        """
        if not isinstance(done.result, Hosted):
            self.clock.add("SLEEP" if isinstance(done.result, Slept) else phase, done.started, done.ended)
        self.totals.hits[role] = self.totals.hits.get(role, 0) + done.cache_hits
        self.totals.misses[role] = self.totals.misses.get(role, 0) + done.cache_misses
        self.memory[role] = max(self.memory.get(role, 0), done.memory_bytes)

    # ------------------------------------------------------------ a step

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """The first ``log.samples`` samples of a step as text; call while their slots are still leased."""
        chosen = samples[: self.config.log.samples or len(samples)]
        for sample in chosen:
            response = self.cache.response("response_ids", sample.ref).tolist() if sample.finished else []
            append_line(
                self.files.samples,
                SampleRecord(
                    step=step, sample=sample.index, origin=sample.prompt.row.origin, prompt=sample.prompt.text,
                    response=self.tokenizer.decode(response), ground_truth=sample.prompt.row.ground_truth,
                    reward=sample.score.reward if sample.score else None,
                    accuracy=sample.score.accuracy if sample.score else None,
                    finish_reason=sample.finished.finish_reason if sample.finished else "",
                    response_length=sample.length, masked=bool(sample.masked),
                    version_low=sample.finished.version_low if sample.finished else -1,
                    version_high=sample.finished.version_high if sample.finished else -1,
                ),
            )  # fmt: skip

    def write_step(
        self, outcome: StepOutcome, started: float, ended: float, position: tuple[int, int], kl_coefficient: float
    ) -> StepRecord:
        """``position`` and ``kl_coefficient`` are those with which the next step begins."""
        masked = sum(bool(sample.masked) for sample in outcome.samples)
        values: dict[str, float] = {
            **measured(outcome.statistics), "masked": masked, "kl_coefficient": outcome.kl_coefficient,
            **{f"policy/{name}": value for name, value in outcome.policy.items()},
            **{f"critic/{name}": value for name, value in outcome.critic.items()},
        }  # fmt: skip
        values = finite(outcome.step, values)
        reward = values.get("reward")
        phases = self._phases(outcome, started, ended)
        timings = self._timings(outcome, phases, started, ended)
        self.last = StepMetrics(step=outcome.step, values=values, timings=timings)
        append_line(self.files.metrics, self.last)
        record = StepRecord(
            step=outcome.step, version=outcome.step, samples=len(outcome.samples), masked=masked, position=position,
            kl_coefficient=kl_coefficient, sizes=self.sizes(), reward=reward, step_s=timings["step_s"],
            idle_s=timings["idle_s"], phase_s=phases,
        )  # fmt: skip
        self.ledger.step_done(record)
        self._add(record)
        self._tell(outcome, ended - started)
        return record

    def sizes(self) -> RecordSizes:
        """How long the record files are now."""
        metrics, samples = self.files.metrics, self.files.samples
        return RecordSizes(*(path.stat().st_size if path.exists() else 0 for path in (metrics, samples)))

    def cut(self, sizes: RecordSizes) -> None:
        """Takes back what was written since: it is about to be repeated."""
        for path, size in ((self.files.metrics, sizes.metrics), (self.files.samples, sizes.samples)):
            if path.exists():
                os.truncate(path, size)

    def recount(self) -> None:
        """Takes the totals from the ledger, which has been taken back, or which earlier coordinators wrote."""
        old = self.totals
        self.totals = Totals(started=old.started, started_unix=old.started_unix)
        for record in self.ledger.steps():
            self._add(record)
        self.totals.accuracies = [record.accuracy for record in self.ledger.evaluations()]
        self.totals.earlier_s = self.totals.step_s
        self.totals.hits, self.totals.misses, self.last = old.hits, old.misses, None

    def _add(self, record: StepRecord) -> None:
        totals = self.totals
        totals.steps += 1
        totals.samples += record.samples
        totals.masked += record.masked
        totals.rewards.append(record.reward)
        totals.idle_s += record.idle_s
        totals.step_s += record.step_s
        for phase, seconds in record.phase_s.items():
            totals.phase_s[phase] = totals.phase_s.get(phase, 0.0) + seconds

    def _tell(self, outcome: StepOutcome, seconds: float) -> None:
        statistics = outcome.statistics
        if not statistics.samples:
            log.warning(
                "step %d: none of %d samples could be scored, so that nothing was learned; the first: %s",
                outcome.step, len(outcome.samples), reason(outcome.samples),
            )  # fmt: skip
            return
        log.info(
            "step %d/%d reward %.4f accuracy %.3f kl %.4f length %.1f in %.2f s",
            outcome.step, self.config.run.steps, statistics.reward, statistics.accuracy, statistics.kl,
            statistics.response_length, seconds,
        )  # fmt: skip

    def _phases(self, outcome: StepOutcome, started: float, ended: float) -> dict[str, float]:
        """Seconds per phase in which a service computed for it."""
        self.clock.add("PUBLISH", ended - outcome.publish_s, ended)
        phases = self.clock.phase_seconds(started, ended)
        phases["ADVANTAGE"] = outcome.advantage_s
        return phases

    def _timings(
        self, outcome: StepOutcome, phases: dict[str, float], started: float, ended: float
    ) -> dict[str, float]:
        """``idle_s``: seconds in which no service computed (the coordinator's overhead)."""
        idle = ended - started - self.clock.busy_seconds(started, ended)
        self.clock.forget_before(ended)
        timings = {f"{phase}_s": seconds for phase, seconds in phases.items()}
        timings |= {f"memory_{role}_gib": used / 2**30 for role, used in self.memory.items()}
        timings |= outcome.timings
        rate = len(outcome.samples) / (ended - started)
        return timings | {
            "step_s": ended - started,
            "idle_s": idle,
            "samples_per_s": rate,
            "retries": float(outcome.retries),
        }

    # ------------------------------------------------------------ checkpoints, evaluations, status, summary

    def policy_saved(self, step: int, saved: Saved, seconds: float) -> None:
        """Notes where the policy of a step lies. It is saved between two steps, so no step's timings hold it."""
        self.totals.trained_model = saved.path
        self.totals.phase_s["CHECKPOINT"] = self.totals.phase_s.get("CHECKPOINT", 0.0) + seconds
        self.ledger.event("checkpoint", f"step {step}: {saved.path}")
        log.info("policy after step %d: %s, %.1f MiB in %.1f s", step, saved.path, saved.nbytes / 2**20, seconds)

    def write_evaluation(self, step: int, samples: Sequence[Sample], seconds: float) -> float | None:
        """Records an evaluation; its means are over the samples that could be scored, and there are none without.

        Returns the accuracy.
        """
        scored = [sample.score for sample in samples if sample.score]
        values: dict[str, float] = {"eval/rows": len(samples), "eval/masked": len(samples) - len(scored)}
        accuracy = None
        if scored:
            accuracy = float(np.mean([score.accuracy for score in scored]))
            values |= {"eval/accuracy": accuracy, "eval/reward": float(np.mean([score.reward for score in scored]))}
        values = finite(step, values)
        self.totals.accuracies.append(accuracy)
        append_line(self.files.metrics, StepMetrics(step=step, values=values, timings={"eval_s": seconds}))
        self.ledger.evaluation_done(EvaluationRecord(step, accuracy, self.sizes()))
        text = "not measured: none could be scored," if accuracy is None else f"{accuracy:.4f}"
        log.info("evaluation after step %d: accuracy %s on %d rows in %.1f s", step, text, len(samples), seconds)
        return accuracy

    def write_status(self, step: int, phase: str, services: list[ServiceStatus]) -> None:
        last, totals = self.last, self.totals
        rate = last.timings["samples_per_s"] if last else None
        left = (self.config.run.steps - totals.steps) * totals.step_s / totals.steps if totals.steps else None
        status = Status(
            run=self.config.run.name, pid=os.getpid(), epoch=self.ledger.epoch, step=step, steps=self.config.run.steps,
            phase=phase, started=totals.started_unix, reward=last.values.get("reward") if last else None,
            accuracy=last.values.get("accuracy") if last else None, kl=last.values.get("kl") if last else None,
            samples_per_s=rate, left_s=left, services=services, run_directory=str(self.files.path.resolve()),
        )  # fmt: skip
        write_whole(self.shared.status, msgspec.json.encode(status))

    def hit_ratio(self) -> float:
        """Share of prompt reads, over all roles, that found the tokens in the cache."""
        hits = sum(self.totals.hits.values()) + self.cache.hits
        misses = sum(self.totals.misses.values()) + self.cache.misses
        return hits / max(hits + misses, 1)

    def write_summary(self, finished: bool, without_ground_truth: int, too_long: int) -> None:
        """``without_ground_truth`` and ``too_long`` count the rows that were skipped."""
        totals = self.totals
        summary = Summary(
            run=self.config.run.name, finished=finished, steps=totals.steps, samples=totals.samples,
            masked_samples=totals.masked, accuracy_first=totals.accuracies[0] if totals.accuracies else None,
            accuracy_last=totals.accuracies[-1] if len(totals.accuracies) > 1 else None,
            reward_first=totals.rewards[0] if totals.rewards else None,
            reward_last=totals.rewards[-1] if totals.rewards else None,
            wall_s=totals.earlier_s + time.monotonic() - totals.started,
            phase_s=totals.phase_s, coordinator_overhead_ratio=totals.idle_s / max(totals.step_s, 1e-9),
            cache_hit_ratio=self.hit_ratio(), config_digest=self.digest, epoch=self.ledger.epoch,
            rows_without_ground_truth=without_ground_truth, rows_too_long=too_long,
            trained_model=totals.trained_model,
        )  # fmt: skip
        write_whole(self.files.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def finite(step: int, values: dict[str, float]) -> dict[str, float]:
    """The figures without NaN and infinity, which JSON does not have and no mean or chart can use; told in the log."""
    odd = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if odd:
        log.warning("step %d: left out of metrics.jsonl, since not finite: %s", step, ", ".join(odd))
    return {name: value for name, value in values.items() if math.isfinite(value)}


def measured(statistics: BatchStatistics) -> dict[str, float]:
    """The figures of a step by name; no means where no sample counts: they would be zeros that nobody measured."""
    if statistics.samples:
        return asdict(statistics)
    return {"samples": statistics.samples, "tokens": statistics.tokens}
