"""How much memory and disk a run's model takes, by the headers of its files: no tensor is read."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from common.config import Config
from common.config_values import learner_roles
from common.models import ModelError, resolve_model

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What transformers loads, the first that is there: one file, or those that an index names."""
LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
WEIGHT = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight in ``model.dtype``, whatever the files' own type is."""
STATE = {"float32": 4 + 4 + 4, "bfloat16": 2 + 4 + 4 + 4}
"""Bytes of a weight in a saved state: itself, its float32 master where it is not float32, two moments of AdamW."""


class Tensor(Struct, frozen=True):
    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[int, int]


class Index(Struct, frozen=True):
    weight_map: dict[str, str]


def model_bytes(config: Config) -> int:
    """Of the weights as services load them. Raises ModelError where they are missing or a file is damaged."""
    return model_elements(config) * WEIGHT[config.model.dtype]


def state_bytes(config: Config) -> int:
    """Of a saved state of all learners, about; adapters (LoRA) are small. Raises ModelError like ``model_bytes``."""
    learners = len(learner_roles(config)) - (config.model.lora.rank > 0)
    return model_elements(config) * STATE[config.model.dtype] * learners


def model_elements(config: Config) -> int:
    """Numbers in the model. Raises ModelError, naming the file, where they cannot be told."""
    try:
        return sum(map(file_elements, weight_files(resolve_model(config.model.path))))
    except OSError as problem:
        raise ModelError(f"model.path: {problem.filename}: {problem.strerror}") from problem


def weight_files(directory: Path) -> list[Path]:
    """The files of which a model consists; others beside them, such as the same weights in another format, do not
    count. Raises ModelError for an index that is damaged, OSError for one that cannot be read."""
    index = directory / INDEX
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names = msgspec.json.decode(index.read_bytes(), type=Index).weight_map.values()
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise _damaged(index, f"it is no index of weights ({problem})") from problem
    return [directory / name for name in sorted(set(names))]


def file_elements(file: Path) -> int:
    """Numbers in a safetensors file: 8 bytes with the length of a header, little-endian, the header, the data.

    Raises ModelError where the header is damaged or the data are not all there, OSError where it cannot be read.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise _damaged(file, f"its {size} bytes do not begin with a header of safetensors")
        header = opened.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = [msgspec.json.decode(entry, type=Tensor) for entry in entries.values()]
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise _damaged(file, f"its header cannot be read ({problem})") from problem
    wanted = 8 + length + max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if size != wanted:
        raise _damaged(file, f"it has {size} bytes, its header says {wanted}")
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _damaged(file: Path, how: str) -> ModelError:
    return ModelError(f"model.path: {file} is damaged: {how}; fetch the model again")


def held_bytes(folder: Path) -> int:
    """Memory that the regular files below a folder take; 0 where it is missing or closed. Sparse files (the token
    cache) take what has been written. What goes meanwhile, as in a live run, is left out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(parent, name))
            except (FileNotFoundError, PermissionError):
                continue
            total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total
