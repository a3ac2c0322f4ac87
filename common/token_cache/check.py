"""Finds damage in a token cache's file without backing any of its holes with memory."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.token_cache.header import INDEX_VERSION, read_header
from common.token_cache.layout import COLUMNS, FINISH_REASONS, PAGE, SLOT_RECORD, CacheError, Layout

Table = npt.NDArray[Any]


class _File:
    """The tables as copies, read with ``pread``."""

    def __init__(self, path: Path, fd: int, layout: Layout) -> None:
        self.path = path
        self.fd = fd
        self.layout = layout
        n = layout.geometry.prompts
        self.slots = self.read(layout.slot_table, layout.geometry.slots, SLOT_RECORD)
        self.version = int(self.read(INDEX_VERSION, 1, np.dtype(np.uint64))[0])
        self.sequences = self.read(layout.sequences, n, np.dtype(np.uint64))
        self.keys = self.read(layout.keys, n, np.dtype("V16"))
        self.lengths = self.read(layout.lengths, n, np.dtype(np.int32))
        self.nexts = self.read(layout.nexts, n, np.dtype(np.int32))
        self.heads = self.read(layout.heads, layout.buckets, np.dtype(np.int32))
        self.pins = self.read(layout.pins, n, np.dtype(np.int32))
        self.checksums = self.read(layout.checksums, n, np.dtype(np.uint32))
        self.whole = (self.sequences != 0) & (self.sequences % 2 == 0) & (self.lengths != 0)

    def read(self, offset: int, count: int, dtype: np.dtype[Any]) -> Table:
        return np.frombuffer(os.pread(self.fd, count * dtype.itemsize, offset), dtype)


def problems(path: Path, fd: int) -> list[str]:
    """Every problem found, one sentence each: path, slot or prompt entry, what was expected and what was found."""
    try:
        layout = Layout.of(read_header(path, fd).geometry)
    except CacheError as error:
        return [str(error)]
    file = _File(path, fd, layout)
    found = [text for look in (_memory, _prompts, _chains, _pins, _slots) for text in look(file)]
    return [f"{path}: {text}" for text in found]


def _memory(file: _File) -> list[str]:
    layout = file.layout
    leased = int((file.slots["generation"] % 2 == 1).sum())
    prompts = int(file.whole.nonzero()[0].max(initial=-1)) + 1
    prompt_pages = prompts * 4 * layout.geometry.max_prompt_tokens // PAGE
    expected = layout.fixed_end + prompt_pages * PAGE + leased * layout.stride
    found = os.fstat(file.fd).st_blocks * 512
    if found >= expected:
        return []
    return [f"{found} bytes are backed, expected at least {expected} for {leased} leased slots and {prompts} prompts"]


def _prompts(file: _File) -> list[str]:
    most = file.layout.geometry.max_prompt_tokens
    found = [
        f"prompt entry {entry}: its put was cut short (sequence {file.sequences[entry]}, expected even)"
        for entry in np.flatnonzero(file.sequences % 2 == 1).tolist()
    ]
    for entry in np.flatnonzero(file.whole).tolist():
        length = int(file.lengths[entry])
        if not 1 <= length <= most:
            found.append(f"prompt entry {entry}: length {length}, expected 1 to {most}")
            continue
        ids = file.read(file.layout.prompt_ids + 4 * most * entry, length, np.dtype(np.int32))
        checksum, expected = zlib.crc32(ids.tobytes()), int(file.checksums[entry])
        if checksum != expected:
            found.append(f"prompt entry {entry}: checksum of its ids {checksum:#010x}, expected {expected:#010x}")
    return found


def _chains(file: _File) -> list[str]:
    if file.version % 2:
        return [f"prompt index: a change was cut short (version {file.version}, expected even)"]
    prompts = file.layout.geometry.prompts
    seen: set[int] = set()
    for bucket in np.flatnonzero(file.heads).tolist():
        link = int(file.heads[bucket])
        while link:
            entry = link - 1
            if not 0 <= entry < prompts:
                return [f"prompt index: chain {bucket} leads to entry {entry}, expected 0 to {prompts - 1}"]
            if entry in seen:
                return [f"prompt index: entry {entry} is reached twice, the second time by chain {bucket}"]
            own = int.from_bytes(file.keys[entry].tobytes()[:8], "little") & (file.layout.buckets - 1)
            if own != bucket:
                return [f"prompt index: entry {entry} hangs in chain {bucket}, expected {own} by its key"]
            seen.add(entry)
            link = int(file.nexts[entry])
    lost = sorted(set(np.flatnonzero(file.whole).tolist()) - seen)
    return [f"prompt entry {entry}: is in no chain of the index, so no reader finds it" for entry in lost]


def _pins(file: _File) -> list[str]:
    leased = file.slots["generation"] % 2 == 1
    held = file.slots["prompt"][leased]
    prompts = file.layout.geometry.prompts
    expected = np.bincount(held[(held >= 0) & (held < prompts)], minlength=prompts)
    wrong = np.flatnonzero((file.pins != expected) & (file.sequences % 2 == 0)).tolist()
    return [f"prompt entry {n}: {file.pins[n]} pins, expected {expected[n]}, the number of its slots" for n in wrong]


def _slots(file: _File) -> list[str]:
    found: list[str] = []
    for slot, record in enumerate(file.slots):
        if int(record["generation"]) % 2:
            found += [f"slot {slot}: {text}" for text in [*_scalars(file, record), *_columns(file, slot, record)]]
        else:
            found += _free_body(file, slot)
    return found


def _scalars(file: _File, record: Any) -> list[str]:
    geometry = file.layout.geometry
    found: list[str] = []
    entry, length, reason = int(record["prompt"]), int(record["response_length"]), int(record["finish_reason"])
    if not (0 <= entry < geometry.prompts and file.whole[entry]):
        found.append(f"refers to prompt entry {entry}, which holds no prompt")
    elif record["prompt_length"] != file.lengths[entry]:
        found.append(f"prompt_length {record['prompt_length']}, expected {file.lengths[entry]} as its prompt entry")
    if not 0 <= length <= geometry.max_response_tokens:
        found.append(f"response_length {length}, expected 0 to {geometry.max_response_tokens}")
    if reason >= len(FINISH_REASONS):
        found.append(f"finish_reason code {reason}, expected 0 to {len(FINISH_REASONS) - 1}")
    if record["version_low"] > record["version_high"]:
        found.append(f"version_low {record['version_low']} is above version_high {record['version_high']}")
    return found


def _columns(file: _File, slot: int, record: Any) -> list[str]:
    found: list[str] = []
    length = min(max(int(record["response_length"]), 0), file.layout.geometry.max_response_tokens)
    for name, dtype in COLUMNS.items():
        start = file.layout.bodies + slot * file.layout.stride + file.layout.columns[name]
        values = file.read(start, 1 if name == "bootstrap_value" else length, dtype)
        if name == "response_ids":
            wrong, expected = values < 0, "at least 0"
        elif name == "response_mask":
            wrong, expected = values > 1, "0 or 1"
        else:
            wrong, expected = ~np.isfinite(values), "a finite number"
        if wrong.any():
            position = int(wrong.argmax())
            found.append(f"{name}[{position}] is {values[position]}, expected {expected}")
    return found


def _free_body(file: _File, slot: int) -> list[str]:
    start = file.layout.bodies + slot * file.layout.stride
    try:
        data = os.lseek(file.fd, start, os.SEEK_DATA)
    except OSError:
        # ENXIO: nothing but holes up to the end of the file.
        return []
    if data >= start + file.layout.stride:
        return []
    return [f"slot {slot}: is free, but memory at offset {data} was not given back: someone used a stale reference"]
