"""The head page of a shared weight set: which version lies there and whether it is whole (torch-free).

A set is CLEAN(v), or WRITING(v) from before the first write of an update to after its last. Whoever maps a set in
WRITING must not use it: its tensors are torn between v - 1 and v.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

MAGIC = b"QUARTETW"
LAYOUT = 1
HEADER_BYTES = 4096
IDENTITY_BYTES = 16
"""Random bytes at the start of a GPU buffer, which name it; its state page is a file of ``HEADER_BYTES``."""
_STATE = struct.Struct("<8sIIq")


class WeightState(IntEnum):
    CLEAN = 1
    WRITING = 2


class WeightsError(Exception):
    """A weight set is torn, foreign or not what the manifest says; the message names file, version and tensor."""


@dataclass(frozen=True)
class SetState:
    state: WeightState
    version: int


def write_state(buffer: mmap.mmap, state: WeightState, version: int) -> None:
    buffer[: _STATE.size] = _STATE.pack(MAGIC, LAYOUT, state, version)


def read_state(path: Path) -> SetState:
    """State of the set in a file. Raises WeightsError for a file that is no weight set of this layout."""
    try:
        with path.open("rb") as file:
            head = file.read(_STATE.size)
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: there is no such weight set: has its writer started?") from error
    if len(head) < _STATE.size:
        raise WeightsError(f"{path}: {len(head)} bytes, expected a weight set of at least {HEADER_BYTES}")
    magic, layout, state, version = _STATE.unpack(head)
    if magic != MAGIC or layout != LAYOUT:
        raise WeightsError(
            f"{path}: magic {magic!r} layout {layout}, expected {MAGIC!r} layout {LAYOUT}: not written by this version"
        )
    try:
        return SetState(WeightState(state), version)
    except ValueError as error:
        raise WeightsError(f"{path}: state {state}, expected one of {list(map(int, WeightState))}: damaged") from error


def require_clean(path: Path, version: int) -> None:
    """Raises WeightsError unless the set is CLEAN(version)."""
    found = read_state(path)
    if found.state is not WeightState.CLEAN or found.version != version:
        raise WeightsError(
            f"{path} is {found.state.name}({found.version}), expected CLEAN({version}): an update is under way or "
            "was cut short; restore the last committed version before using it"
        )
