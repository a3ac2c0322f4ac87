"""Soak: an endless small run on the CPU, one of whose services is killed every so many seconds, and what it came to.

    python -m tools.soak --minutes 30 --every 20 --seed 1

At the end the run is stopped and its records are compared with each other (``tools/soak_checks.py``). Prints one JSON
object; exit code 0 if nothing is wrong, 1 otherwise. The run's files stay where ``--keep`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from common.processes import is_alive, registered
from common.records import Status
from common.run_files import RunDirectory, SharedDirectory
from tools.clean import clean
from tools.soak_checks import Memory, check_cache, check_records, check_slots, is_stopped

SERVICES = ("coordinator", "rollout", "reward", "critic", "trainer")
SMALL = (
    "run.steps=1000000", "prompts.per_step=16", "rollout.rows=16", "rollout.prefill_rows=16", "reward.batch_size=8",
    "trainer.mini_batch=16", "trainer.micro_batch=8", "trainer.optimizer.warmup_steps=1", "critic.mini_batch=16",
    "critic.micro_batch=8", "critic.optimizer.warmup_steps=1", "eval.rows=16", "eval.every=25", "log.samples=0",
    "rollout.device=cpu", "trainer.device=cpu", "critic.device=cpu", "checkpoint.snapshot_every=1",
)  # fmt: skip
SAMPLES_PER_STEP = 16
LOOK_S = 0.1
MEMORY_S = 1.0
STANDS_S = 10.0
"""Longest wait for a process to obey SIGSTOP."""
STANDS_POLL_S = 0.001
START_S, STEP_S, STOP_S = 300.0, 180.0, 60.0
SETTLED_STEPS = 8
"""Steps from one look at the slots to the next: no sample is leased for so long."""


class SoakFailed(Exception):
    """The run ended, or stood still; its files say why."""


class Soak:
    """One run under ``quartet up``, from its start to its end."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.name = f"soak-{os.getpid()}"
        self.files = RunDirectory(folder / "runs" / self.name)
        self.shared = SharedDirectory.of_run(self.name)
        self.random = random.Random(seed)
        self.memory = Memory()
        self.kills: Counter[str] = Counter()
        self.seconds_to_a_step: list[float] = []
        self.problems: list[str] = []
        self.cache_checks = 0
        self.started = time.monotonic()
        self.measured = 0.0

    def start(self) -> None:
        settings = [part for override in SMALL for part in ("--set", override)]
        command = [sys.executable, "-m", "tools", "up", "tiny", "--name", self.name, *settings]
        with (self.folder / "up.log").open("wb") as log:
            self.up = subprocess.Popen(
                command, cwd=self.folder, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.until_step(2, START_S)

    # ------------------------------------------------------------ while it runs

    def step(self) -> int:
        """The step under way; 0 where there is no coordinator yet."""
        try:
            return msgspec.json.decode(self.shared.status.read_bytes(), type=Status).step
        except FileNotFoundError:
            return 0

    def look(self) -> None:
        """Raises SoakFailed where the run has ended."""
        if self.up.poll() is not None:
            raise SoakFailed(f"the run ended with code {self.up.returncode}: see {self.folder / 'up.log'}")
        if time.monotonic() - self.measured >= MEMORY_S:
            self.measured = time.monotonic()
            for service, pid in self.pids().items():
                self.memory.measure(service, pid, self.measured - self.started)

    def pids(self) -> dict[str, int]:
        listed = registered(self.shared.processes)
        return {entry.service: entry.pid for entry in listed if is_alive(entry) and entry.service in SERVICES}

    def until_step(self, step: int, limit: float) -> None:
        """Waits until the run works on this step; raises SoakFailed at the limit."""
        deadline = time.monotonic() + limit
        while self.step() < step:
            self.look()
            if time.monotonic() > deadline:
                raise SoakFailed(f"no step {step} within {limit:.0f} s; the run is in step {self.step()}")
            time.sleep(LOOK_S)

    def until_time(self, moment: float) -> None:
        while time.monotonic() < moment:
            self.look()
            time.sleep(min(LOOK_S, max(0.0, moment - time.monotonic())))

    def kill_one(self) -> None:
        """SIGKILL to a random service; returns when a step has begun and ended after that."""
        service = self.random.choice(SERVICES)
        pid = self.pids().get(service)
        if pid is None:  # it is about to be started again, by itself: a death that nobody caused
            self.problems.append(f"no {service} lives in step {self.step()}")
            return
        step, killed = self.step(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.kills[service] += 1
        self.until_step(step + 1, STEP_S)
        self.seconds_to_a_step.append(time.monotonic() - killed)
        self.until_step(step + 2, STEP_S)
        self.check_cache(f"after the death of {service} in step {step}")

    def run(self, minutes: float, every: float) -> None:
        """Kills until the time is over. A kill waits until a step has ended since the one before."""
        end = self.started + 60.0 * minutes
        due = time.monotonic() + every
        while due < end:
            self.until_time(due)
            self.kill_one()
            due = max(due + every, time.monotonic())
        self.until_time(end)

    @contextmanager
    def still(self) -> Generator[None]:
        """Within, the coordinator, which alone changes the token cache's tables, stands still."""
        coordinator = self.pids().get("coordinator")
        if coordinator is None:
            raise SoakFailed(f"no coordinator lives in step {self.step()}")
        os.kill(coordinator, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + STANDS_S
            while not is_stopped(coordinator):
                if time.monotonic() > deadline:
                    raise SoakFailed(f"the coordinator (process {coordinator}) does not obey SIGSTOP")
                time.sleep(STANDS_POLL_S)
            yield
        finally:
            os.kill(coordinator, signal.SIGCONT)

    def check_cache(self, when: str) -> None:
        self.cache_checks += 1
        self.problems += [f"{when}: {found}" for found in check_cache(self.shared.tokens, self.name, self.still)]

    def copy_slots(self, number: int) -> Path:
        """The token cache at one moment."""
        copy = self.folder / f"tokens-{number}"
        with self.still():
            shutil.copyfile(self.shared.tokens, copy)
        return copy

    def stop(self) -> int:
        """SIGINT to the supervisor; returns its exit code. Raises SoakFailed where it does not end."""
        self.up.send_signal(signal.SIGINT)
        try:
            return self.up.wait(STOP_S)
        except subprocess.TimeoutExpired as error:
            raise SoakFailed(f"the run did not stop within {STOP_S:.0f} s") from error

    def close(self) -> None:
        if self.up.poll() is None:
            self.up.kill()
            self.up.wait(STOP_S)
        clean(self.name)


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))}


def soak(minutes: float, every: float, seed: int, folder: Path) -> dict[str, object]:
    """Runs one soak in ``folder``; returns its facts. ``problems`` is empty where all is as it must be."""
    run = Soak(folder, seed)
    copies: list[Path] = []
    try:
        run.start()
        run.run(minutes, every)
        for number in (1, 2):
            run.check_cache("at the end")
            copies.append(run.copy_slots(number))
            run.until_step(run.step() + SETTLED_STEPS, STEP_S)
        code = run.stop()
        if code != 128 + signal.SIGINT:
            run.problems.append(f"the run ended with code {code}, expected {128 + signal.SIGINT}")
    except SoakFailed as error:
        run.problems.append(str(error))
    finally:
        run.close()
    records, wrong = check_records(run.files, SAMPLES_PER_STEP)
    slots, leaks = check_slots(copies, run.name)
    memory, grown = run.memory.growth(time.monotonic() - run.started)
    return {
        "minutes": round((time.monotonic() - run.started) / 60, 2), "every_s": every, "seed": seed,
        "kills": sum(run.kills.values()), "kills_by_service": dict(run.kills),
        "cache_checks": run.cache_checks,
        "slowest_step_after_a_kill_s": round(max(run.seconds_to_a_step, default=0.0), 2),
        **records, **slots, "memory": memory, "problems": [*run.problems, *wrong, *leaks, *grown],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one kill to the next (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of who is killed (default: 1)")
    parser.add_argument("--keep", type=Path, help="folder for the run's files, which is then not deleted")
    parsed = parser.parse_args(arguments)
    folder = parsed.keep or Path(tempfile.mkdtemp(prefix="quartet-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    facts = soak(parsed.minutes, parsed.every, parsed.seed, folder)
    print(json.dumps(facts, indent=2))
    if facts["problems"]:
        print(f"the run's files are in {folder}", file=sys.stderr)
        return 1
    if parsed.keep is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
