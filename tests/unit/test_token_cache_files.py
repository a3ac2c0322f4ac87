"""Token cache: files that are refused, and damage that check() finds."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.token_cache import CacheError, Geometry, TokenCache
from common.token_cache.header import Header, read_header
from common.token_cache.layout import SLOT_RECORD
from tests.unit.token_cache_support import (
    FINGERPRINT,
    GEOMETRY,
    LAYOUT,
    RUN,
    attach,
    create,
    key,
    lease,
    overwrite,
    shared_path,
)


@pytest.fixture
def path() -> Iterator[Path]:
    with shared_path() as path:
        yield path


def test_creating_over_an_existing_file_is_refused_and_leaves_it(cache: TokenCache) -> None:
    cache.put_prompt(key("p"), [1])
    with pytest.raises(CacheError, match="exists already"):
        create(cache.path)
    assert cache.get_prompt(key("p")) is not None
    assert os.listdir(cache.path.parent) == ["tokens"]


def test_a_geometry_larger_than_the_free_space_is_refused(path: Path) -> None:
    space = os.statvfs(path.parent)
    slots = 2 * space.f_bavail * space.f_frsize // LAYOUT.stride
    with pytest.raises(CacheError, match=r"needs .* GiB, but .* are free in ") as caught:
        create(path, Geometry(slots, 33, 1027, 4))
    for setting in ("cache.slots", "cache.prompts", "rollout.max_new_tokens", str(slots)):
        assert setting in str(caught.value)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("field", Geometry.__struct_fields__)
def test_a_geometry_of_nothing_is_refused(path: Path, field: str) -> None:
    numbers = {name: 0 if name == field else 1 for name in Geometry.__struct_fields__}
    with pytest.raises(CacheError, match=f"{field} is 0; expected at least 1"):
        create(path, Geometry(**numbers))


def test_the_smallest_geometry_works(path: Path) -> None:
    with create(path, Geometry(1, 1, 1, 1)) as cache:
        cache.put_prompt(key("a"), [3])
        cache.put_prompt(key("b"), [4])
        ref = cache.allocate(key("b"))
        cache.column("rewards", ref)[0] = 0.5
        cache.set_scalars(ref, response_length=1)
        assert cache.response("rewards", ref).tolist() == [0.5]
        assert cache.check() == []


@pytest.mark.parametrize(("run", "fingerprint"), [("", "f"), ("r" * 65, "f"), ("r", ""), ("r", "f" * 129)])
def test_names_that_do_not_fit_the_header_are_refused(path: Path, run: str, fingerprint: str) -> None:
    with pytest.raises(CacheError, match=r"(run|tokenizer fingerprint) '.*' has \d+ bytes; expected 1 to"):
        TokenCache.create(path, run=run, fingerprint=fingerprint, geometry=GEOMETRY)
    assert os.listdir(path.parent) == []


def shrunk_header(path: Path) -> None:
    """Another geometry under a right digest: only the file's size betrays it."""
    with path.open("r+b") as file:
        header = read_header(path, file.fileno())
        other = Header(Geometry(5, 33, 1027, 4), header.file_size, header.run, header.fingerprint, header.creator)
        file.write(other.pack(path))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "cannot be opened: No such file"),
    "empty": (lambda path: os.truncate(path, 0), r"not a token cache: magic is b''"),
    "header cut": (lambda path: os.truncate(path, 20), "truncated to 20 bytes"),
    "truncated": (lambda path: os.truncate(path, LAYOUT.file_size - 1), f"bytes, expected {LAYOUT.file_size} for"),
    "grown": (lambda path: os.truncate(path, LAYOUT.file_size + 1), f"bytes, expected {LAYOUT.file_size} for"),
    "magic": (lambda path: overwrite(path, 0, b"X"), "not a token cache"),
    "version": (lambda path: overwrite(path, 8, b"\x09"), "layout version 9, expected 1"),
    "slots": (lambda path: overwrite(path, 16, b"\x09"), "the header is damaged"),
    "geometry": (shrunk_header, r"expected \d+ for Geometry\(slots=5"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(path: Path, damage: str) -> None:
    create(path).close()
    spoil, expected = DAMAGES[damage]
    spoil(path)
    for call in (TokenCache.attach, TokenCache.adopt):
        with pytest.raises(CacheError, match=expected) as caught:
            call(path, run=RUN, fingerprint=FINGERPRINT)
        assert str(path) in str(caught.value)


def test_another_run_or_tokenizer_is_refused(cache: TokenCache) -> None:
    with pytest.raises(CacheError, match="belongs to run 'demo', expected 'other'"):
        TokenCache.attach(cache.path, run="other", fingerprint=FINGERPRINT)
    with pytest.raises(CacheError, match=r"tokenizer fingerprint 'tok-1', expected 'tok-2'.*model\.path"):
        TokenCache.attach(cache.path, run=RUN, fingerprint="tok-2")


def slot_field(slot: int, field: str) -> int:
    offsets = {name: offset for name, (_, offset, *_) in (SLOT_RECORD.fields or {}).items()}
    return LAYOUT.slot_table + slot * SLOT_RECORD.itemsize + offsets[field]


def body(slot: int, column: str) -> int:
    return LAYOUT.bodies + slot * LAYOUT.stride + LAYOUT.columns[column]


CORRUPTIONS: dict[str, tuple[int, bytes, str]] = {
    "prompt ids": (LAYOUT.prompt_ids + 4, b"\x63", "prompt entry 0: checksum of its ids"),
    "prompt length": (LAYOUT.lengths, b"\x63", "prompt entry 0: length 99, expected 1 to 33"),
    "prompt sequence": (LAYOUT.sequences, b"\x03", "prompt entry 0: its put was cut short"),
    "pins": (LAYOUT.pins, b"\x07", "prompt entry 0: 7 pins, expected 2"),
    "chain": (LAYOUT.nexts, b"\x01", "prompt index: entry 0 is reached twice"),
    "chain out": (LAYOUT.nexts, b"\x63", "leads to entry 98, expected 0 to 3"),
    "heads": (LAYOUT.heads, bytes(4 * LAYOUT.buckets), "prompt entry 0: is in no chain"),
    "key": (LAYOUT.keys, bytes([key("p")[0] ^ 1]), "prompt index: entry 0 hangs in chain"),
    "generation": (slot_field(1, "generation"), b"\x02", "slot 1: is free, but memory at offset"),
    "slot's prompt": (slot_field(1, "prompt"), b"\x03", "slot 1: refers to prompt entry 3, which holds no prompt"),
    "prompt_length": (slot_field(1, "prompt_length"), b"\x09", "slot 1: prompt_length 9, expected 3"),
    "response_length": (slot_field(1, "response_length"), b"\xff\xff", "slot 1: response_length 65535, expected 0 to"),
    "finish_reason": (slot_field(1, "finish_reason"), b"\x09", "slot 1: finish_reason code 9"),
    "versions": (slot_field(1, "version_low"), b"\x09", "slot 1: version_low 9 is above version_high 0"),
    "response ids": (body(1, "response_ids") + 8, b"\xff" * 4, r"slot 1: response_ids\[2\] is -1, expected at least 0"),
    "mask": (body(1, "response_mask") + 1, b"\x02", r"slot 1: response_mask\[1\] is 2, expected 0 or 1"),
    "values": (body(1, "values"), b"\xff" * 4, r"slot 1: values\[0\] is nan, expected a finite number"),
    "bootstrap": (body(1, "bootstrap_value"), b"\xff" * 4, r"slot 1: bootstrap_value\[0\] is nan"),
    "free slot": (body(4, "values"), b"\x01", "slot 4: is free, but memory at offset"),
    "header": (16, b"\x09", "the header is damaged"),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_check_finds_planted_corruption_and_takes_no_memory(
    cache: TokenCache, writer: TokenCache, corruption: str
) -> None:
    refs = lease(cache, 2, 9)
    writer.write_rows("response_ids", refs, np.ones((2, 9), np.int32))
    assert cache.check() == []
    offset, data, expected = CORRUPTIONS[corruption]
    overwrite(cache.path, offset, data)
    before = os.stat(cache.path).st_blocks
    found = cache.check()
    assert any(re.search(expected, problem) for problem in found), found
    assert all(problem.startswith(str(cache.path)) for problem in found)
    assert os.stat(cache.path).st_blocks == before
    with attach(cache.path) if corruption != "header" else cache as reader:
        assert reader.check() == found


def test_check_finds_a_slot_without_memory(cache: TokenCache) -> None:
    refs = lease(cache, 2)
    assert cache.check() == []
    with cache.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping.madvise(mmap.MADV_REMOVE, LAYOUT.bodies + refs[1].slot * LAYOUT.stride, LAYOUT.stride)
    assert any("bytes are backed, expected at least" in problem for problem in cache.check())


def test_reading_a_hole_takes_memory_unless_check_does_it(cache: TokenCache) -> None:
    """The fact for which ``check`` exists as it is: a mapping of a free slot takes pages when it is only read."""
    (ref,) = lease(cache, 1, 4)
    column = cache.column("values", ref)
    cache.free(ref)
    before = os.stat(cache.path).st_blocks
    assert cache.check() == []
    assert os.stat(cache.path).st_blocks == before
    assert not column.any()
    assert os.stat(cache.path).st_blocks > before
    assert "slot 0: is free, but memory" in cache.check()[0]
