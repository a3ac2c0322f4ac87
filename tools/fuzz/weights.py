"""A weight set on CPU with its state page damaged, cut or grown: it is refused, or it is what was committed."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from pathlib import Path

from common.weights.header import HEADER_BYTES, WeightsError, WeightState, read_state, require_clean, write_state
from common.weights.memory import map_file
from tools.fuzz.damage import Damaged, damages
from tools.fuzz.isolation import try_all
from tools.fuzz.report import Result, Tally

VERSION = 7
STATE_BYTES = 24
"""Magic, layout, state, version; the rest of the page is not read."""
NBYTES = HEADER_BYTES + 4096
SLOW_S = 2.0


class WeightsTrial:
    """A set that is CLEAN(7), and one that is WRITING(8)."""

    def __init__(self, step: int) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fuzz-quartet-"))
        self.files = [self._file(WeightState.CLEAN, VERSION), self._file(WeightState.WRITING, VERSION + 1)]
        ends = (0, 1, STATE_BYTES - 1, STATE_BYTES, HEADER_BYTES - 1, HEADER_BYTES, NBYTES - 1, NBYTES + 1, 2 * NBYTES)
        regions = [("state", range(STATE_BYTES)), ("unused", range(STATE_BYTES, HEADER_BYTES, 64 * step))]
        self.cases = [(file, case) for file in self.files for case in damages(regions, ends)]

    def _file(self, state: WeightState, version: int) -> Damaged:
        path = self.folder / state.name.lower()
        path.write_bytes(bytes(NBYTES))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), HEADER_BYTES) as page:
            write_state(page, state, version)
        return Damaged(path)

    def __len__(self) -> int:
        return len(self.cases)

    def name(self, number: int) -> str:
        file, case = self.cases[number]
        return f"case {number}, {file.path.name}, {case.name}"

    def attempt(self, number: int, tally: Tally) -> None:
        file, case = self.cases[number]
        try:
            changed = file.damage(case)
            accepted = self._clean(file.path)
            mapped = self._mapped(file.path)
            sound = file.path.name == "clean" and not (changed and case.region == "state") and case.size < 0
            if accepted and not sound and not (case.size >= STATE_BYTES and file.path.name == "clean"):
                tally.fail(self.name(number), f"is taken for CLEAN({VERSION}): {read_state(file.path)}")
            if mapped and case.size >= 0:
                tally.fail(self.name(number), "is mapped with another size")
            if sound and not (accepted and mapped):
                tally.fail(self.name(number), "is refused although it is sound")
            tally.outcomes["accepted" if accepted and mapped else "refused"] += 1
        finally:
            file.restore()

    def _clean(self, path: Path) -> bool:
        try:
            require_clean(path, VERSION)
        except WeightsError:
            return False
        return True

    def _mapped(self, path: Path) -> bool:
        try:
            map_file(path, NBYTES)
        except WeightsError:
            return False
        return True

    def close(self) -> None:
        for file in self.files:
            file.close()
        shutil.rmtree(self.folder)


def fuzz_weights(seed: int = 0, step: int = 1) -> Result:
    """Every damage of every byte that is read."""
    tally = Tally("weights", seed, SLOW_S)
    try_all(lambda: WeightsTrial(step), tally)
    return tally.result()
