"""A saved state with every kind of byte of its files damaged: it is refused, or what is loaded is what was saved.

Each damage is tried twice: as it is, and with checksums that were made to fit, as somebody could who may write to the
directory. Then other numbers may be loaded, but nothing else may happen.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from pathlib import Path

import torch

from common.checkpoints.files import CHECKSUMS, CheckpointError, seal
from common.checkpoints.reader import StateReader
from common.checkpoints.writer import write_state
from tools.fuzz.damage import Damaged, damages
from tools.fuzz.isolation import try_all
from tools.fuzz.report import Result, Tally

COUNTED = {"step": 3, "updates": 7}
MEMORY_BYTES = 16 << 30
"""Address space of the process that reads: damage may make a reader ask for any amount."""
SLOW_S = 5.0


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "weights/embed": torch.randn(3, 4, generator=generator),
        "moments/embed": torch.randn(3, 4, generator=generator).to(torch.bfloat16),
        "random": torch.arange(16, dtype=torch.uint8),
    }


def _sizes(size: int) -> tuple[int, ...]:
    return 0, 1, size // 2, size - 1, size + 1


class StateTrial:
    """A small state in memory, saved by this process."""

    def __init__(self, step: int) -> None:
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fuzz-quartet-"))
        self.state = self.folder / "trainer"
        self.saved = tensors()
        self.digest = write_state(self.state, self.saved, COUNTED).digest
        self.files = [Damaged(path) for path in sorted(self.state.iterdir())]
        self.cases = [
            (file, case, resealed)
            for file in self.files
            for case in damages([("bytes", range(0, file.size, step))], _sizes(file.size))
            for resealed in (False, True)
            if not (resealed and file.path.name == CHECKSUMS)
        ]

    def __len__(self) -> int:
        return len(self.cases)

    def name(self, number: int) -> str:
        file, case, resealed = self.cases[number]
        return f"case {number}, {file.path.name}{' resealed' if resealed else ''}, {case.name}"

    def attempt(self, number: int, tally: Tally) -> None:
        file, case, resealed = self.cases[number]
        try:
            changed = file.damage(case)
            if resealed:
                (self.state / CHECKSUMS).rename(self.folder / CHECKSUMS)
                seal(self.state)
            outcome = self._read(tally, number, "" if resealed else self.digest, must_be_right=not resealed)
            if outcome == "right" and changed and not resealed and file.path.name != CHECKSUMS:
                tally.fail(self.name(number), "a file that was altered is taken for whole")
            tally.outcomes[f"{'resealed: ' if resealed else ''}{outcome}"] += 1
        finally:
            if resealed:
                (self.folder / CHECKSUMS).replace(self.state / CHECKSUMS)
            file.restore()

    def _read(self, tally: Tally, number: int, digest: str, must_be_right: bool) -> str:
        found = {name: torch.zeros_like(tensor) for name, tensor in self.saved.items()}
        try:
            reader = StateReader(self.state, digest)
            reader.load(found)
        except CheckpointError:
            return "refused"
        right = reader.counters == COUNTED and all(
            torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in self.saved.items()
        )
        if not right and must_be_right:
            tally.fail(self.name(number), f"other data are loaded than were saved: {reader.counters}, {found}")
        return "right" if right else "other numbers"

    def close(self) -> None:
        for file in self.files:
            file.close()
        shutil.rmtree(self.folder)


def fuzz_checkpoints(seed: int = 0, step: int = 1) -> Result:
    """Every damage of every ``step``-th byte of every file."""
    tally = Tally("checkpoints", seed, SLOW_S)
    try_all(lambda: StateTrial(step), tally)
    return tally.result()
