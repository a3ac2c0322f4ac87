"""Takes most of a small /dev/shm when it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Path("/dev/shm/filler").write_bytes(bytes(7 << 20))


def score(
    prompts: Sequence[str], responses: Sequence[str], ground_truths: Sequence[str], metadata: Sequence[object]
) -> list[float]:
    return [0.0 for _ in responses]
