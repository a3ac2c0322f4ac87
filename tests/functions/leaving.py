"""User functions that start processes which outlive their call."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any


def sandbox(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """Starts a process in a session and with an environment of its own, as code sandboxes do, and waits for ever."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True, env={"PATH": os.environ["PATH"]})
    Path("sandbox.tmp").write_text(str(process.pid))
    Path("sandbox.tmp").rename("sandbox")
    while True:
        signal.pause()


def twice(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """Forks, and returns in both processes: first in the copy, whose scores are wrong."""
    if (copy := os.fork()) == 0:
        return [-1.0] * len(responses)
    os.waitpid(copy, 0)
    return [1.0] * len(responses)
