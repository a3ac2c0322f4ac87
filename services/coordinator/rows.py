"""Rows of prompts: JSONL and parquet files, and problems that reasoning-gym generates.

Every row of a file is looked at once, when the run starts, so that a broken one is named before anything else starts.
Afterwards rows are read again one by one, by index: only their places are kept in memory.
"""

from __future__ import annotations

import array
import bisect
import importlib
import itertools
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from common.config import Config, PromptsConfig, ReasoningGymConfig
from common.config_loading import embedded_file
from common.config_values import evaluation_rows
from services.coordinator.row import Record, Row, RowError, Skipped, encoded, keep, no_prompt, parse_row

Split = Literal["train", "eval"]

_GYM_SEED_STRIDE = 1_000_003
"""Item i of a reasoning-gym dataset is drawn with seed + i, so seeds must lie further apart than a dataset is long."""


class RowSource(Protocol):
    """One file's usable rows, by index."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> Row:
        """The row at this index."""
        ...


class Rows:
    """The usable rows of all files, in the order of the config."""

    def __init__(self, sources: Sequence[RowSource], skipped: Skipped, limit: int | None = None) -> None:
        self._sources = sources
        self._ends = list(itertools.accumulate(len(source) for source in sources))
        total = self._ends[-1] if self._ends else 0
        self._length = total if limit is None else min(total, limit)
        self.skipped = skipped

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        which = bisect.bisect_right(self._ends, index)
        return self._sources[which].row(index - (self._ends[which - 1] if which else 0))


def load_rows(config: Config, split: Split) -> Rows:
    """Looks at all rows of a split; no rows at all for ``eval`` where the run does not evaluate.

    Raises RowError for a file that is missing, empty or broken, for a row that is no JSON object or has no prompt, for
    one without its ground truth if ``prompts.missing_ground_truth`` is ``error``, and if no row is left to use.
    """
    limit = evaluation_rows(config) if split == "eval" else None
    skipped = Skipped()
    if limit == 0:
        return Rows([], skipped)
    prompts = config.prompts
    if prompts.source == "reasoning_gym":
        key, names = "prompts.reasoning_gym", [prompts.reasoning_gym.task]
        sources: list[RowSource] = [_GeneratedRows(config, split, skipped)]
    else:
        key, names = ("prompts.train", prompts.train) if split == "train" else ("eval.data", config.eval.data)
        sources = [_open(name, prompts, skipped) for name in names]
    rows = Rows(sources, skipped, limit)
    if not len(rows):
        raise RowError(f"{key}: no usable row in {', '.join(names) or 'no file'}: {skipped}")
    return rows


def _open(name: str, prompts: PromptsConfig, skipped: Skipped) -> RowSource:
    kind = _ParquetRows if name.endswith(".parquet") else _JsonRows
    try:
        return kind(name, prompts, skipped)
    except OSError as error:
        raise RowError(f"{name}: cannot be read: {error.strerror or error}") from error


class _JsonRows:
    """A JSONL file, mapped; the place of every usable line is kept."""

    def __init__(self, name: str, prompts: PromptsConfig, skipped: Skipped) -> None:
        self._name = name
        self._fields = prompts.fields
        self._starts = array.array("Q")
        self._lines = array.array("Q")
        empty = True
        with open(embedded_file(name), "rb") as file:
            start = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    empty = False
                    row = self._parse(line, number)
                    if keep(row, prompts, skipped):
                        self._starts.append(start)
                        self._lines.append(number)
                start += len(line)
            if empty:
                raise RowError(f"{name}: the file is empty; expected one JSON object a line")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        start = self._starts[index]
        end = self._map.find(b"\n", start)
        return self._parse(self._map[start : end if end >= 0 else len(self._map)], self._lines[index])

    def _parse(self, line: bytes, number: int) -> Row:
        origin = f"{self._name}:{number}"
        try:
            line = line.removeprefix(b"\xef\xbb\xbf")
            msgspec.json.decode(line)  # raw values are only skimmed; this looks at every character of them
            record = msgspec.json.decode(line, type=Record)
        except msgspec.MsgspecError as error:
            raise RowError(f"{origin}: not a JSON object in UTF-8: {error}") from None
        return parse_row(record, self._fields, origin)


class _ParquetRows:
    """A parquet file, read through a memory map; only the columns that the config names."""

    def __init__(self, name: str, prompts: PromptsConfig, skipped: Skipped) -> None:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
        self._name = name
        self._fields = prompts.fields
        fields = self._fields
        named = (fields.prompt, fields.ground_truth, "ground_truth", fields.source, fields.metadata)
        wanted = {part for field in named for part in (field, field.partition(".")[0])}
        try:
            path = embedded_file(name)
            present: list[str] = parquet.read_schema(path, memory_map=True).names
            self._table: Any = parquet.read_table(
                path, columns=[column for column in present if column in wanted], memory_map=True
            )
        except arrow.ArrowException as error:
            raise RowError(f"{name}: not a parquet file: {error}") from None
        if not len(self._table):
            raise RowError(f"{name}: the file has no rows")
        if not self._table.num_columns:
            raise RowError(no_prompt(name, fields.prompt, present))
        self._kept = array.array("Q")
        for number, record in enumerate(self._records()):
            row = parse_row(record, fields, f"{name}:{number + 1}")
            if keep(row, prompts, skipped):
                self._kept.append(number)

    def __len__(self) -> int:
        return len(self._kept)

    def row(self, index: int) -> Row:
        number = self._kept[index]
        values: dict[str, Any] = self._table.slice(number, 1).to_pylist()[0]
        return parse_row(encoded(values, f"{self._name}:{number + 1}"), self._fields, f"{self._name}:{number + 1}")

    def _records(self) -> Iterator[Record]:
        number = 0
        for batch in self._table.to_batches(max_chunksize=1024):
            for values in batch.to_pylist():
                number += 1
                yield encoded(values, f"{self._name}:{number}")


class _GeneratedRows:
    """Problems of reasoning-gym. Held-out problems are the same for every seed, and training leaves them out."""

    def __init__(self, config: Config, split: Split, skipped: Skipped) -> None:
        gym = config.prompts.reasoning_gym
        held_out = _generate(gym, 0, evaluation_rows(config)) if evaluation_rows(config) else []
        entries = held_out
        if split == "train":
            seed = _GYM_SEED_STRIDE * (config.run.seed + 1) % 2**31
            known = {entry["question"] for entry in held_out}
            entries = [entry for entry in _generate(gym, seed, gym.size) if entry["question"] not in known]
            if not entries:
                raise RowError(
                    f"prompts.reasoning_gym: all {gym.size} problems of {gym.task!r} are among the {len(held_out)} "
                    "held-out ones; lower eval.rows, or choose options with more different problems"
                )
        rows = (_generated(entry, gym.task, f"{gym.task}-{split}:{index}") for index, entry in enumerate(entries))
        self._rows = [row for row in rows if keep(row, config.prompts, skipped)]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return self._rows[index]


def _generate(gym: ReasoningGymConfig, seed: int, size: int) -> list[dict[str, Any]]:
    library: Any = importlib.import_module("reasoning_gym")
    try:
        return list(library.create_dataset(gym.task, seed=seed, size=size, **gym.options))
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise RowError(
            f"prompts.reasoning_gym: reasoning-gym refuses task {gym.task!r} with options {gym.options}: {error}"
        ) from error


def _generated(entry: dict[str, Any], task: str, origin: str) -> Row:
    record = encoded({"answer": entry["answer"], "metadata": entry["metadata"]}, origin)
    return Row(
        prompt=entry["question"],
        ground_truth=record["answer"],
        metadata=record["metadata"],
        source=task,
        origin=origin,
    )
