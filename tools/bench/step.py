"""Coordinator overhead: the share of a step in which no service computes, on whole runs of real processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import msgspec

from common.records import StepMetrics, Summary
from common.run_files import RunDirectory
from tools.bench.record import ROOT, BenchError

STEPS = 12
WARM_UP = 2
LIMIT_S = 600.0
PHASES = ("GENERATE", "SCORE", "EVALUATE", "UPDATE", "PUBLISH")


def figures() -> dict[str, float]:
    """A run of preset tiny without evaluation; means over its steps but the first two. coordinator_overhead_ratio is
    the share of a step's wall time in which neither rollout, reward, critic nor trainer computes."""
    with tempfile.TemporaryDirectory() as directory:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        command = [
            sys.executable, "-m", "tools", "up", "tiny", "--name", name, "--set", f"run.steps={STEPS}",
            "--set", f"run.directory={directory}", "--set", "eval.rows=0",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)
        if done.returncode != 0:
            raise BenchError(f"the run of preset tiny failed with code {done.returncode}: {done.stderr[-2000:]}")
        files = RunDirectory(Path(directory) / name)
        steps = [msgspec.json.decode(line, type=StepMetrics) for line in files.metrics.read_bytes().splitlines()]
        summary = msgspec.json.decode(files.summary.read_bytes(), type=Summary)
    timings = [step.timings for step in steps if "step_s" in step.timings][WARM_UP:]
    total = sum(timing["step_s"] for timing in timings)
    means = {f"{phase.lower()}_ms": _mean_ms(timings, f"{phase}_s") for phase in PHASES}
    return {
        "coordinator_overhead_ratio": sum(timing["idle_s"] for timing in timings) / total,
        "step_ms": total / len(timings) * 1e3,
        "samples_per_s": sum(timing["samples_per_s"] for timing in timings) / len(timings),
        "cache_hit_ratio": summary.cache_hit_ratio,
        **means,
    }


def _mean_ms(timings: list[dict[str, float]], key: str) -> float:
    return sum(timing[key] for timing in timings) / len(timings) * 1e3
