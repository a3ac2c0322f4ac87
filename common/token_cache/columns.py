"""Views of the slots' columns."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.token_cache.layout import COLUMNS, CacheError, Layout, width

Column = npt.NDArray[Any]


class Columns:
    """Every column as one strided array [slots, width]: from a read-only mapping, and where it may be written."""

    def __init__(
        self, readable: mmap.mmap, writable: mmap.mmap, layout: Layout, path: Path, writes: frozenset[str]
    ) -> None:
        self._path = path
        self._read = {name: _strided(readable, layout, name) for name in COLUMNS}
        self._write = {name: _strided(writable, layout, name) for name in writes}
        self._best = {**self._read, **self._write}

    def row(self, name: str, slot: int) -> Column:
        """One slot's whole column, [width]."""
        try:
            return self._best[name][slot]
        except KeyError:
            raise unknown_column(self._path, name) from None

    def views(self, name: str, slots: npt.NDArray[np.intp], lengths: npt.NDArray[np.int32]) -> list[Column]:
        """The first ``lengths[i]`` entries of each slot."""
        if name not in self._best:
            raise unknown_column(self._path, name)
        column = self._best[name]
        return [column[slot, :length] for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True)]

    def rows(self, name: str, slots: npt.NDArray[np.intp], length: int) -> Column:
        """The first ``length`` entries of each slot, [len(slots), length], read-only."""
        column = self._within(self._read, name, length)
        if len(slots) and bool((np.diff(slots) == 1).all()):
            return column[slots[0] : slots[-1] + 1, :length]
        gathered = column[slots, :length]
        gathered.flags.writeable = False
        return gathered

    def write_rows(self, name: str, slots: npt.NDArray[np.intp], given: npt.ArrayLike) -> None:
        """Writes the first ``given.shape[1]`` entries of each slot."""
        values = np.asarray(given)
        if values.ndim != 2 or values.shape[0] != len(slots):
            raise CacheError(
                f"{self._path}: column {name}: values have shape {values.shape}, expected [{len(slots)}, length]"
            )
        if name in self._read and name not in self._write:
            mine = ", ".join(sorted(self._write)) or "none"
            raise CacheError(f"{self._path}: column {name} is read-only in this process; it may write: {mine}")
        column = self._within(self._write, name, values.shape[1])
        if not np.can_cast(values.dtype, column.dtype, "same_kind"):
            raise CacheError(f"{self._path}: column {name}: values are {values.dtype}, expected {column.dtype}")
        column[slots, : values.shape[1]] = values

    def _within(self, columns: dict[str, Column], name: str, length: int) -> Column:
        column = columns.get(name)
        if column is None:
            raise unknown_column(self._path, name)
        if not 0 <= length <= column.shape[1]:
            raise CacheError(f"{self._path}: column {name}: length {length}, expected 0 to {column.shape[1]}")
        return column

    def close(self) -> None:
        """Lets go of the mappings; views that were handed out keep them alive."""
        for columns in (self._read, self._write, self._best):
            columns.clear()


def require_known(path: Path, names: Iterable[str]) -> None:
    """``CacheError`` for the first name that is no column's."""
    for name in names:
        if name not in COLUMNS:
            raise unknown_column(path, name)


def unknown_column(path: Path, name: str) -> CacheError:
    """The error for a column that does not exist."""
    from difflib import get_close_matches  # only an error needs it

    near = get_close_matches(name, COLUMNS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(COLUMNS)}"
    return CacheError(f"{path}: no column {name!r}; {hint}")


def _strided(mapping: mmap.mmap, layout: Layout, name: str) -> Column:
    dtype = COLUMNS[name]
    return np.ndarray(
        (layout.geometry.slots, width(name, layout.geometry)),
        dtype,
        mapping,
        layout.bodies + layout.columns[name],
        (layout.stride, dtype.itemsize),
    )
