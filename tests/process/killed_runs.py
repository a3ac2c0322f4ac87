"""Whole runs with deaths in them: how they are started, compared with an undisturbed one, and timed."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from tests.process.traps import PLAN, Plan, Trap, mark_of
from tests.process.whole_runs import SMALL, Ended, WaitUntil, WholeRun

KILLED_UP = Path(__file__).with_name("killed_up.py")
RUN_WITHIN_S = 240.0
RECOVERY_S = 10.0
"""Longest time from a death to the next progress, on two cores that the run has for itself."""
LEAST_SHARE = 0.2
SEVEN = (
    "run.steps=7", "prompts.per_step=32", "rollout.rows=32", "eval.rows=32", "eval.every=3", "reward.batch_size=8",
    "ppo.kl.controller=adaptive", "ppo.kl.horizon=300",
    "rollout.device=cpu", "trainer.device=cpu", "critic.device=cpu", "checkpoint.snapshot_every=1",
)  # fmt: skip
"""Seven steps of 32 samples, evaluated before the first and after the third, sixth and last; the KL
coefficient moves, so that it too must come back."""


@dataclass(frozen=True)
class Outcome:
    """All of a run that depends on the seed alone."""

    samples: bytes
    values: list[tuple[int, dict[str, float]]]
    weights: bytes


def outcome(run: WholeRun) -> Outcome:
    weights = (run.files.checkpoints / "final" / "model.safetensors").read_bytes()
    return Outcome(run.files.samples.read_bytes(), [(line.step, line.values) for line in run.metrics()], weights)


def assert_same(found: Outcome, wanted: Outcome) -> None:
    """Bit for bit; says first what differs, since the bytes say nothing to a reader."""
    assert [step for step, _ in found.values] == [step for step, _ in wanted.values]
    assert found.values == wanted.values
    assert found.samples == wanted.samples
    assert found.weights == wanted.weights


class KilledRun(WholeRun):
    """A run whose services are real, and killed where its traps say."""

    def __init__(self, folder: Path, wait_until: WaitUntil) -> None:
        super().__init__(folder, wait_until)
        self.plan = folder / "plan"
        self.traps: Sequence[Trap] = ()

    def start_killed(self, traps: Sequence[Trap], *overrides: str, resume: bool = False) -> subprocess.Popen[str]:
        """``quartet up`` of the small run, seven steps long unless ``overrides`` say otherwise."""
        self.traps = (*self.traps, *(trap for trap in traps if trap not in self.traps))
        self.plan.mkdir(exist_ok=True)
        (self.plan / PLAN).write_bytes(msgspec.json.encode(Plan(run=self.name, traps=list(traps))))
        place = [sys.executable, str(KILLED_UP), str(self.plan), *(["--resume"] if resume else [])]
        return self.command(*place, f"run.name={self.name}", *SMALL, *SEVEN, *overrides)

    def finish(self, process: subprocess.Popen[str]) -> Ended:
        """Waits for the end. What services log is shown where that does not come."""
        try:
            out, err = process.communicate(timeout=RUN_WITHIN_S)
        except subprocess.TimeoutExpired:
            print(self.status(), self.sprung(), *self.last_lines(), sep="\n")
            raise
        if process.returncode > 0:
            print(self.sprung(), *self.last_lines(), err, sep="\n")
        return Ended(process.returncode, out, err)

    def sprung(self) -> list[str]:
        return [trap.name for trap in self.traps if mark_of(self.plan, trap)]

    def last_lines(self) -> list[str]:
        logs = sorted(self.files.logs.glob("*.log"))
        return [f"{path.name}: {line}" for path in logs for line in path.read_text().splitlines()[-25:]]

    def deaths(self) -> list[tuple[str, str, float]]:
        """(trap, victim, Unix time) of every process that a trap killed, the first first."""
        marks = [(trap, mark) for trap in self.traps if (mark := mark_of(self.plan, trap)) is not None]
        return [(trap.name, victim, mark.time) for trap, mark in marks for victim in mark.pids]

    def ledger_rows(self, query: str) -> list[tuple[object, ...]]:
        ledger = sqlite3.connect(self.files.ledger)
        try:
            return ledger.execute(query).fetchall()
        finally:
            ledger.close()


class Machine:
    """How much of the machine a run had: what others compute meanwhile stretches all of its times."""

    def __init__(self) -> None:
        self.before = self._look()

    def share(self) -> float:
        """Part of the cores' time since the beginning that others left. Call when all of the run's processes ended."""
        elapsed, busy, own = (now - then for now, then in zip(self._look(), self.before, strict=True))
        return max(LEAST_SHARE, 1.0 - max(0.0, busy - own) / elapsed)

    def own(self) -> float:
        """CPU seconds of the run's processes."""
        return self._look()[2] - self.before[2]

    def _look(self) -> tuple[float, float, float]:
        """Seconds of all cores together: elapsed, busy, and used by this process's descendants that have ended."""
        # user, nice, system, idle, iowait, irq, softirq, steal (proc(5))
        ticks = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        second = os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        return sum(ticks) / second, (sum(ticks) - idle) / second, own.ru_utime + own.ru_stime


@dataclass(frozen=True)
class Recovery:
    """What a death cost. Times in seconds."""

    trap: str
    victim: str
    started: bool
    """Whether there had been any progress before."""
    stall: float
    """Longest time without progress of anybody, from the death until the victim's successor has done work."""
    back: float
    """From the death until then."""


def recoveries(run: KilledRun) -> list[Recovery]:
    """From the run's own ledger: progress is work that was answered and weights that were committed.

    What restores a state is no progress. Leases of steps that were rewound are not in the ledger any more, so that the
    time until the run has got on again counts.
    """
    done = [
        (float(str(ended)), float(str(given)), str(role))
        for ended, given, role in run.ledger_rows(
            "SELECT ended, given, role FROM leases WHERE state = 'done' AND task != 'RestoreState'"
        )
    ]
    (last,) = [float(str(time)) for (time,) in run.ledger_rows("SELECT max(time) FROM events WHERE kind = 'end'")]
    committed = [float(str(time)) for (time,) in run.ledger_rows("SELECT time FROM versions")]
    moments = sorted([ended for ended, _, _ in done] + committed + [last])
    found: list[Recovery] = []
    for trap, victim, death in run.deaths():
        service = victim.rpartition("-")[0]
        if service == "coordinator":
            back = min((moment for moment in moments if moment > death), default=last)
        else:
            back = min((ended for ended, given, role in done if role == service and given > death), default=last)
        points = [death, *(moment for moment in moments if death < moment < back), back]
        stall = max(after - before for before, after in pairwise(points))
        found.append(Recovery(trap, victim, moments[0] < death, stall, back - death))
    return found


def survive(
    new_run: Callable[[], KilledRun], traps: Sequence[Trap], wanted: Outcome, *overrides: str,
    within: float = RECOVERY_S,
) -> KilledRun:  # fmt: skip
    """A run with these deaths ends as the undisturbed one did; says what each death cost.

    After each it must get on again ``within`` so many seconds, of a machine that it has for itself.
    """
    run, machine = new_run(), Machine()
    ended = run.finish(run.start_killed(traps, *overrides))
    assert ended.code == 0, ended.err
    assert run.sprung() == [trap.name for trap in traps]
    assert ended.err.count("killed by SIGKILL, started again") == len(run.deaths())
    assert_same(outcome(run), wanted)
    assert run.summary().masked_samples == 0
    assert "Traceback" not in "".join(path.read_text() for path in run.files.logs.iterdir())
    run.assert_nothing_left()
    costs, share = recoveries(run), machine.share()
    for cost in costs:
        print(f"{cost.trap:36} {cost.victim:14} stall {cost.stall:5.2f} s  back {cost.back:6.2f} s")
    cpu = machine.own()
    print(f"{len(costs)} deaths, {cpu:.0f} s of CPU, others left {share:.0%} of the machine")
    assert [cost for cost in costs if cost.started and cost.stall > within / share] == []
    return run
