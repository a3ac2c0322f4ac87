"""Whole runs of real services through ``python -m tools up``: preset tiny, cut down to seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.processes import registered
from common.records import SampleRecord, Status, StepMetrics, Summary
from common.run_files import RunDirectory, SharedDirectory
from tools.clean import clean

FUNCTIONS = Path(__file__).resolve().parents[1] / "functions"
MARK = "QUARTET_TEST_RUN"
"""An environment variable that every process of a run inherits, whoever starts it."""
ENDS_WITHIN = 60.0
GONE_WITHIN = 10.0
SMALL = (
    "run.steps=2", "prompts.per_step=16", "rollout.rows=16", "rollout.prefill_rows=16", "eval.rows=16", "log.samples=0",
    "trainer.mini_batch=16", "trainer.micro_batch=8", "trainer.optimizer.warmup_steps=1",
    "critic.mini_batch=16", "critic.micro_batch=8", "critic.optimizer.warmup_steps=1",
)  # fmt: skip
ENDLESS = ("run.steps=1000000", "eval.rows=0")
WaitUntil = Callable[..., None]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class WholeRun:
    """One run by name, in a folder of its own that is also its working directory. It may be started again."""

    def __init__(self, folder: Path, wait_until: WaitUntil) -> None:
        self.name = f"test-{uuid.uuid4().hex[:10]}"
        self.folder = folder
        self.wait_until = wait_until
        self.files = RunDirectory(folder / "runs" / self.name)
        self.shared = SharedDirectory.of_run(self.name)
        self.started: list[subprocess.Popen[str]] = []

    # ------------------------------------------------------------ commands

    def command(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command in the run's folder."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, MARK: self.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def start(self, *overrides: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        """``quartet up`` of the small run, under ``prefix``."""
        settings = [part for override in (*SMALL, *overrides) for part in ("--set", override)]
        return self.command(*prefix, sys.executable, "-m", "tools", "up", "tiny", "--name", self.name, *settings)

    def quartet(self, *arguments: str) -> Ended:
        return finish(self.command(sys.executable, "-m", "tools", *arguments))

    def complete(self, *overrides: str, prefix: Sequence[str] = ()) -> Ended:
        return finish(self.start(*overrides, prefix=prefix))

    # ------------------------------------------------------------ what it is doing

    def reach(self, step: int, phase: str = "") -> None:
        """Waits until the run works on this step or a later one (in this phase)."""

        def holds() -> bool:
            status = self.status()
            return status is not None and status.step >= step and phase in ("", status.phase)

        self.wait_until(holds, f"step {step} {phase}", ENDS_WITHIN)

    def status(self) -> Status | None:
        try:
            return msgspec.json.decode(self.shared.status.read_bytes(), type=Status)
        except FileNotFoundError:
            return None

    def pid(self, service: str, replica: int = 0) -> int:
        """Process id of a service, from the run's process list."""
        (entry,) = {
            entry.pid
            for entry in registered(self.shared.processes)
            if (entry.service, entry.replica) == (service, replica)
        }
        return entry

    def processes(self) -> list[int]:
        """Every living process that this run or its commands started, children of services included."""
        mark = f"{MARK}={self.name}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in environment(pid)]

    def assert_nothing_left(self, within: float = 1.0) -> None:
        """No process, and no socket, cache or weights in memory; the kernel gets a moment to end what it has killed."""
        self.wait_until(lambda: not self.processes(), "the end of every process of the run", within)
        assert not self.shared.path.exists()

    # ------------------------------------------------------------ what it wrote

    def summary(self) -> Summary:
        return msgspec.json.decode(self.files.summary.read_bytes(), type=Summary)

    def metrics(self) -> list[StepMetrics]:
        """The lines of steps and evaluations."""
        return [msgspec.json.decode(line, type=StepMetrics) for line in self.files.metrics.read_bytes().splitlines()]

    def steps(self) -> list[StepMetrics]:
        """The lines of steps alone."""
        return [line for line in self.metrics() if "eval/rows" not in line.values]

    def samples(self) -> list[SampleRecord]:
        return [msgspec.json.decode(line, type=SampleRecord) for line in self.files.samples.read_bytes().splitlines()]

    def log(self, service: str, replica: int = 0) -> str:
        return self.files.log(service, replica).read_text()

    def close(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.started:
            if process.stdout is not None and not process.stdout.closed:
                process.communicate(timeout=GONE_WITHIN)
        clean(self.name)


def finish(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=ENDS_WITHIN)
    return Ended(process.returncode, out, err)


def environment(pid: int) -> list[bytes]:
    """A process's variables; none for one that is dead or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
