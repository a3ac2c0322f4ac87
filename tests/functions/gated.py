"""A scorer that says who scores, and then waits until its test lets it go."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

LIMIT_S = 50.0


def exact(prompts: list[str], responses: list[str], ground_truths: list[Any], metadata: list[Any]) -> list[float]:
    """The built-in ``exact_match``, as soon as the file ``go`` is in the working directory."""
    Path(f"scoring-{os.getppid()}").touch()
    deadline = time.monotonic() + LIMIT_S
    while not Path("go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the test did not let the scorer go")
        time.sleep(0.02)  # the interval of a poll with a deadline
    return [float(response.strip() == truth) for response, truth in zip(responses, ground_truths, strict=True)]
