"""One benchmark's result as it is printed and kept: figures, and what is needed to read them later."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import Struct

from common.versions import library_versions
from tools.bench import BENCHES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
COMMAND_LIMIT_S = 10.0


class BenchError(Exception):
    """The benchmark could not be measured; the message says why."""


class Host(Struct, frozen=True):
    """The machine, without anything that says whose it is."""

    cores: int
    cpu: str
    memory_gib: float


class BenchRecord(Struct, frozen=True):
    """A result. ``notes`` is the measuring function's docstring: what was measured and how."""

    bench: str
    commit: str
    date: str
    host: Host
    gpu: str | None
    versions: dict[str, str]
    command: str
    figures: dict[str, float]
    notes: str


def measure(name: str) -> BenchRecord:
    """Runs the named benchmark of ``BENCHES``."""
    module, _, function = BENCHES[name].partition(":")
    figures: Callable[[], dict[str, float]] = getattr(importlib.import_module(module), function)
    measured = figures()
    return BenchRecord(
        bench=name,
        commit=commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        host=host(),
        gpu=gpu(),
        versions={"python": platform.python_version(), **library_versions(), "uvloop": metadata.version("uvloop")},
        command=shlex.join(["quartet", *sys.argv[1:]]),
        figures={key: round(value, 4) for key, value in measured.items()},
        notes=" ".join((function_doc(figures)).split()),
    )


def function_doc(function: Callable[..., object]) -> str:
    return function.__doc__ or ""


def save(record: BenchRecord) -> Path:
    """Writes ``tools/bench/results/<bench>-<date>.json``, one of the same day is replaced."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{record.bench}-{record.date}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    return path


def lines(record: BenchRecord) -> list[str]:
    """A result for a person to read."""
    width = max((len(name) for name in record.figures), default=0)
    return [record.bench, *(f"  {name:<{width}}  {value:,.6g}" for name, value in record.figures.items())]


def output_of(*command: str) -> str:
    """What a command prints; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, cwd=ROOT, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """The commit that was measured, ``+changes`` where the working tree differs from it.

    Where there is no repository, as in an image, ``QUARTET_COMMIT`` says it.
    """
    found = output_of("git", "rev-parse", "--short=12", "HEAD")
    changes = "+changes" if output_of("git", "status", "--porcelain") else ""
    return (found or os.environ.get("QUARTET_COMMIT", "unknown")) + changes


def host() -> Host:
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Host(
        cores=len(os.sched_getaffinity(0)),
        cpu=cpu.group(1) if cpu else platform.machine(),
        memory_gib=round(memory / 2**30, 1),
    )


def gpu() -> str | None:
    return output_of("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader") or None
