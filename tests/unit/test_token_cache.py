"""Token cache within one process: prompts and their eviction, slots, generations and quarantine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import SlotRef
from common.token_cache import COLUMNS, CacheError, SampleScalars, TokenCache, prompt_key
from common.token_cache.layout import PAGE
from tests.unit.token_cache_support import (
    FINGERPRINT,
    GEOMETRY,
    LAYOUT,
    RUN,
    create,
    key,
    lease,
    shared_path,
)


@pytest.mark.parametrize("length", [1, 7, 33])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_a_prompt_comes_back_as_it_was_put(cache: TokenCache, length: int, dtype: type) -> None:
    ids = np.arange(100, 100 + length).astype(dtype)
    cache.put_prompt(key("p"), ids)
    for found in (cache.get_prompt(key("p")), cache.get_prompt(key("p"), copy=True)):
        assert found is not None
        assert found.dtype == np.int32
        assert found.tolist() == ids.tolist()
    assert (cache.hits, cache.misses) == (2, 0)


def test_an_unknown_prompt_is_a_miss(cache: TokenCache) -> None:
    assert cache.get_prompt(key("nothing")) is None
    assert (cache.hits, cache.misses) == (0, 1)


def test_prompt_key_depends_on_every_part_and_on_where_one_ends() -> None:
    keys = {
        prompt_key(*parts)
        for parts in [("ab", "c", "f"), ("a", "bc", "f"), ("ab", "c", "g"), ("ab", "", "cf"), ("", "ab", "cf")]
    }
    assert len(keys) == 5
    assert {len(digest) for digest in keys} == {16}
    assert prompt_key("ab", "c", "f") in keys


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (list(range(34)), "has 34 tokens, expected at most 33; raise prompts.max_tokens"),
        ([], "at least one token"),
        ([[1, 2]], re.escape("shape (1, 2)")),
        ([1.0], "float64, expected integers"),
        ([3, -1], "token id -1, expected at least 0"),
        ([2**31], f"token id {2**31}, expected at most"),
    ],
)
def test_a_wrong_prompt_is_refused_by_name(cache: TokenCache, ids: list[int], expected: str) -> None:
    with pytest.raises(CacheError, match=expected) as caught:
        cache.put_prompt(key("p"), ids)
    assert str(cache.path) in str(caught.value)
    assert key("p").hex() in str(caught.value)
    assert cache.get_prompt(key("p")) is None


def test_a_wrong_key_and_other_ids_under_the_same_key_are_refused(cache: TokenCache) -> None:
    cache.put_prompt(key("p"), [1, 2, 3])
    cache.put_prompt(key("p"), [1, 2, 3])
    with pytest.raises(CacheError, match=r"stored with other token ids \(3 of them\) than those given \(2\)"):
        cache.put_prompt(key("p"), [1, 2])
    with pytest.raises(CacheError, match="has 3 bytes, expected 16"):
        cache.put_prompt(b"abc", [1])


@pytest.mark.parametrize("adopted", [False, True])
def test_eviction_takes_the_least_recently_used(cache: TokenCache, adopted: bool) -> None:
    for number in range(4):
        cache.put_prompt(key(number), [number])
    cache.get_prompt(key(0))
    cache.put_prompt(key(1), [1])
    if adopted:
        cache.close()
        cache = TokenCache.adopt(cache.path, run=RUN, fingerprint=FINGERPRINT)
    cache.put_prompt(key(4), [4])
    assert [number for number in range(5) if cache.get_prompt(key(number)) is not None] == [0, 1, 3, 4]


def test_eviction_never_takes_a_pinned_prompt(cache: TokenCache) -> None:
    cache.put_prompt(key("held"), [1, 2, 3])
    first, second = cache.allocate(key("held")), cache.allocate(key("held"))
    for number in range(20):
        cache.put_prompt(key(number), [number])
    cache.free(first)
    for number in range(20, 40):
        cache.put_prompt(key(number), [number])
    assert cache.prompt_ids(second).tolist() == [1, 2, 3]
    cache.free(second)
    for number in range(40, 44):
        cache.put_prompt(key(number), [number])
    assert cache.get_prompt(key("held")) is None


def test_a_table_of_pinned_prompts_is_full(cache: TokenCache) -> None:
    for number in range(4):
        cache.put_prompt(key(number), [number])
        cache.allocate(key(number))
    with pytest.raises(CacheError, match=r"all 4 prompt entries are held by slots; raise cache\.prompts"):
        cache.put_prompt(key(4), [4])
    assert cache.check() == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "allocate", "free", "adopt"]), st.integers(0, 9)), max_size=60)
)
def test_any_sequence_of_operations_keeps_what_it_must(operations: list[tuple[str, int]]) -> None:
    """Against a model: what is stored is right, what is pinned stays, and the file is consistent throughout."""
    with shared_path() as path:
        cache = create(path)
        held: list[tuple[SlotRef, int]] = []
        for operation, number in operations:
            pinned = {other for _, other in held}
            stored = cache.get_prompt(key(number)) is not None
            assert stored or number not in pinned
            if operation == "put" and (stored or len(pinned) < 4):
                cache.put_prompt(key(number), [number] * (number + 1))
                assert cache.get_prompt(key(number)) is not None
            elif operation == "allocate" and stored and cache.free_slots:
                held.append((cache.allocate(key(number)), number))
            elif operation == "free" and held:
                cache.free(held.pop(number % len(held))[0])
            elif operation == "adopt":
                cache.close()
                cache = TokenCache.adopt(cache.path, run=RUN, fingerprint=FINGERPRINT)
            for ref, other in held:
                assert cache.prompt_ids(ref).tolist() == [other] * (other + 1)
            assert cache.check() == []
        assert sorted(cache.leased(), key=lambda ref: ref.slot) == sorted(
            (ref for ref, _ in held), key=lambda r: r.slot
        )
        cache.close()


def test_a_leased_slot_starts_empty(cache: TokenCache, writer: TokenCache) -> None:
    for _ in range(2):
        (ref,) = lease(cache, 1, length=GEOMETRY.max_response_tokens)
        for name in COLUMNS:
            column = writer.column(name, ref)
            assert not column.any()
            column[:] = 1
        cache.set_scalars(ref, reward=1.5, state=3, finish_reason="stop", sample=4, step=5, version_high=2)
        cache.free(ref)
    (ref,) = lease(cache, 1)
    assert cache.scalars(ref) == SampleScalars(3, 0, "", 0, 0, 0, 0, 0, 0.0)
    assert ref == SlotRef(0, 5)


def test_scalars_come_back_and_others_stay(cache: TokenCache) -> None:
    one, two = lease(cache, 2)
    cache.set_scalars(one, response_length=1027, finish_reason="length", version_low=3, version_high=4)
    cache.set_scalars(one, state=7, sample=8, step=9, reward=-0.25)
    assert cache.scalars(one) == SampleScalars(3, 1027, "length", 3, 4, 7, 8, 9, -0.25)
    assert cache.scalars(two) == SampleScalars(3, 0, "", 0, 0, 0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_length", 1028),
        ("response_length", -1),
        ("finish_reason", "eos"),
        ("prompt_length", 3),
        ("generation", 3),
        ("sample", 1.5),
        ("step", 2**31),
        ("reward", "high"),
    ],
)
def test_a_wrong_scalar_is_refused_and_nothing_is_set(cache: TokenCache, name: str, value: object) -> None:
    (ref,) = lease(cache, 1)
    before = cache.scalars(ref)
    with pytest.raises(CacheError, match=rf"slot 0: {name} .*cannot be set"):
        cache.set_scalars(ref, **{"state": 1, name: value})  # type: ignore[arg-type]
    assert cache.scalars(ref) == before


ACCESSES: dict[str, Callable[[TokenCache, SlotRef], object]] = {
    "prompt_ids": lambda cache, ref: cache.prompt_ids(ref),
    "column": lambda cache, ref: cache.column("values", ref),
    "response": lambda cache, ref: cache.response("values", ref),
    "views": lambda cache, ref: cache.views("values", [ref]),
    "rows": lambda cache, ref: cache.rows("values", [ref], 4),
    "write_rows": lambda cache, ref: cache.write_rows("rewards", [ref], np.zeros((1, 4), np.float32)),
    "scalars": lambda cache, ref: cache.scalars(ref),
    "set_scalars": lambda cache, ref: cache.set_scalars(ref, state=1),
    "free": lambda cache, ref: cache.free(ref),
    "quarantine": lambda cache, ref: cache.quarantine(ref),
    "release": lambda cache, ref: cache.release(ref),
}


@pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES.keys())
def test_a_stale_reference_is_refused(cache: TokenCache, access: Callable[[TokenCache, SlotRef], object]) -> None:
    _, ref = lease(cache, 2)
    cache.free(ref)
    with pytest.raises(CacheError, match="slot 1: the reference has generation 1, the slot has 2 and is free"):
        access(cache, ref)
    assert cache.allocate(key("p")) == SlotRef(1, 3)
    with pytest.raises(CacheError, match="slot 1: the reference has generation 1, the slot has 3 and is leased again"):
        access(cache, ref)
    for slot in (-1, 6):
        with pytest.raises(CacheError, match=rf"slot {slot} does not exist; expected 0 to 5"):
            access(cache, SlotRef(slot, 1))
    with pytest.raises(CacheError, match="slot 5: the reference has generation 0"):
        access(cache, SlotRef(5, 0))


def test_one_stale_reference_among_many_is_named(cache: TokenCache) -> None:
    refs = lease(cache, 4)
    cache.free(refs[2])
    with pytest.raises(CacheError, match="slot 2: the reference has generation 1, the slot has 2"):
        cache.rows("values", refs, 1)


def test_slots_run_out_and_the_prompt_stays_unpinned(cache: TokenCache) -> None:
    refs = lease(cache, 6)
    assert cache.free_slots == 0
    cache.put_prompt(key("other"), [1])
    with pytest.raises(CacheError, match=r"no free slot: 6 leased, 0 in quarantine, of 6; raise cache\.slots"):
        cache.allocate(key("other"))
    cache.free(refs[3])
    assert cache.allocate(key("p")) == SlotRef(3, 3)
    assert cache.check() == []


def test_allocating_for_a_prompt_that_was_not_put_is_refused(cache: TokenCache) -> None:
    with pytest.raises(CacheError, match="is not in the cache; put_prompt"):
        cache.allocate(key("nothing"))
    assert cache.free_slots == 6


def test_a_quarantined_slot_is_not_handed_out_until_released(cache: TokenCache) -> None:
    refs = lease(cache, 6)
    cache.quarantine(refs[1])
    assert (cache.free_slots, cache.quarantined) == (0, 1)
    with pytest.raises(CacheError, match="no free slot: 5 leased, 1 in quarantine"):
        cache.allocate(key("p"))
    with pytest.raises(CacheError, match="slot 1 is in quarantine; release"):
        cache.free(refs[1])
    with pytest.raises(CacheError, match="slot 2 is not in quarantine; free"):
        cache.release(refs[2])
    assert cache.in_quarantine() == [refs[1]]
    assert cache.leased() == [refs[0], *refs[2:]]
    assert cache.prompt_ids(refs[1]).tolist() == [5, 6, 7]
    cache.release(refs[1])
    assert (cache.free_slots, cache.quarantined) == (1, 0)
    assert cache.allocate(key("p")) == SlotRef(1, 3)


def test_memory_is_taken_by_leases_and_given_back(cache: TokenCache) -> None:
    cache.put_prompt(key("p"), [5, 6, 7])
    empty = os.stat(cache.path).st_blocks * 512
    assert empty <= LAYOUT.fixed_end + PAGE
    refs = lease(cache, 5)
    assert os.stat(cache.path).st_blocks * 512 == empty + 5 * LAYOUT.stride
    cache.quarantine(refs[0])
    cache.release(refs[0])
    for ref in refs[1:]:
        cache.free(ref)
    assert os.stat(cache.path).st_blocks * 512 == empty
