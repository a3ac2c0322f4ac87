"""What it costs a service to find out that its config is bad, and what the light services import."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.record import BenchError

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 15
LIMIT_S = 60.0
BYTECODE = str(Path(tempfile.gettempdir()) / "quartet-bench-bytecode")

PARSE = "import common.config; from common.config_loading import load_config; load_config('tiny')"
HEAVY = "import json, sys; print(json.dumps([name in sys.modules for name in ('torch', 'transformers', 'numpy')]))"
SERVICES = {"coordinator": "services.coordinator.service", "reward": "services.reward.service"}


def figures() -> dict[str, float]:
    """Wall time of a whole fresh Python process, median of 15 after one unmeasured, which leaves bytecode behind as
    the first start of an installed package does: one that does nothing (`python_start_ms`), and one that imports
    common.config and parses the preset tiny (`import_config_ms`). The
    `..._imported` figures are 1 where a fresh process that did just that has the package in sys.modules.
    """
    torch, _, numpy = imported(PARSE)
    found = {
        "python_start_ms": wall_ms("pass"),
        "import_config_ms": wall_ms(PARSE),
        "torch_imported": float(torch),
        "numpy_imported": float(numpy),
    }
    for name, module in SERVICES.items():
        torch, transformers, _ = imported(f"import {module}")
        found[f"{name}_torch_imported"] = float(torch)
        found[f"{name}_transformers_imported"] = float(transformers)
    return found


def run(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=LIMIT_S,
        env=environment | {"PYTHONPYCACHEPREFIX": BYTECODE},
    )  # fmt: skip
    if done.returncode != 0:
        raise BenchError(f"`python -c {code!r}` failed with exit code {done.returncode}:\n{done.stderr}")
    return done.stdout


def wall_ms(code: str) -> float:
    run(code)
    times: list[float] = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run(code)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def imported(code: str) -> tuple[bool, bool, bool]:
    """Whether torch, transformers and numpy are loaded after ``code``."""
    torch, transformers, numpy = json.loads(run(f"{code}\n{HEAVY}"))
    return torch, transformers, numpy
