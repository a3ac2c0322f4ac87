"""Token cache: columns, rows, views, and who may write what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.token_cache import COLUMNS, CacheError, TokenCache
from tests.unit.token_cache_support import (
    attach,
    create,
    key,
    lease,
    shared_path,
)


@pytest.fixture
def path() -> Iterator[Path]:
    with shared_path() as path:
        yield path


@pytest.mark.parametrize("length", [1, 501, 1027])
def test_every_column_of_every_slot_has_its_own_memory(cache: TokenCache, writer: TokenCache, length: int) -> None:
    refs = lease(cache, 6, length)
    order = {name: number for number, name in enumerate(COLUMNS)}
    for ref in refs:
        for name, number in order.items():
            writer.column(name, ref)[:] = 16 * ref.slot + number
    for ref in refs:
        for name, number in order.items():
            whole, response = cache.column(name, ref), cache.response(name, ref)
            wide = 1 if name == "bootstrap_value" else 1027
            assert (whole.shape, whole.dtype) == ((wide,), COLUMNS[name])
            assert response.shape == (min(length, wide),)
            assert (whole == 16 * ref.slot + number).all()
            assert np.array_equal(cache.views(name, [ref])[0], response)
    assert cache.prompt_ids(refs[5]).tolist() == [5, 6, 7]
    assert [problem for problem in cache.check() if "response_mask" not in problem] == []


@pytest.mark.parametrize("slots", [[0, 1, 2, 3, 4, 5], [3], [5, 3, 4], [1, 3, 5], [2, 2], []])
@pytest.mark.parametrize("length", [1, 77, 1027])
def test_rows_gather_slots_in_the_order_asked_for(
    cache: TokenCache, writer: TokenCache, slots: list[int], length: int
) -> None:
    refs = lease(cache, 6, 1027)
    values = np.random.default_rng(1).integers(0, 1000, (6, 1027), np.int32)
    writer.write_rows("response_ids", refs, values)
    found = cache.rows("response_ids", [refs[slot] for slot in slots], length)
    assert found.shape == (len(slots), length)
    assert np.array_equal(found, values[slots, :length])
    with pytest.raises(ValueError, match="read-only"):
        found[:] = 0


def test_write_rows_writes_what_it_was_given_and_no_more(cache: TokenCache, writer: TokenCache) -> None:
    refs = lease(cache, 4, 1027)
    writer.write_rows("values", [refs[2], refs[0]], np.array([[1, 2, 3], [4, 5, 6]], np.float64))
    writer.write_rows("bootstrap_value", refs, np.arange(4, dtype=np.float32)[:, None])
    assert cache.rows("values", refs, 4).tolist() == [[4, 5, 6, 0], [0] * 4, [1, 2, 3, 0], [0] * 4]
    assert cache.rows("bootstrap_value", refs, 1).tolist() == [[0], [1], [2], [3]]


def test_wrong_columns_shapes_and_types_are_refused(cache: TokenCache, writer: TokenCache) -> None:
    refs = lease(cache, 2)
    with pytest.raises(CacheError, match="no column 'reward'; did you mean 'rewards'"):
        cache.column("reward", refs[0])
    with pytest.raises(CacheError, match="no column 'xyz'; expected one of response_ids"):
        cache.views("xyz", refs)
    with pytest.raises(CacheError, match="no column 'prompt_ids'"):
        attach(cache.path, frozenset({"prompt_ids"}))
    with pytest.raises(CacheError, match="column values: length 1028, expected 0 to 1027"):
        cache.rows("values", refs, 1028)
    with pytest.raises(CacheError, match="column bootstrap_value: length 2, expected 0 to 1"):
        writer.write_rows("bootstrap_value", refs, np.zeros((2, 2), np.float32))
    with pytest.raises(CacheError, match=r"values have shape \(3, 1\), expected \[2, length\]"):
        writer.write_rows("values", refs, np.zeros((3, 1), np.float32))
    with pytest.raises(CacheError, match="column response_ids: values are float32, expected int32"):
        writer.write_rows("response_ids", refs, np.zeros((2, 1), np.float32))
    with pytest.raises(CacheError, match="column values is read-only in this process; it may write: advantages, ret"):
        cache.write_rows("values", refs, np.zeros((2, 1), np.float32))


def test_only_the_columns_asked_for_can_be_written(cache: TokenCache) -> None:
    (ref,) = lease(cache, 1, 4)
    with attach(cache.path, frozenset({"values", "bootstrap_value"})) as critic:
        for name in COLUMNS:
            for view in (critic.column(name, ref), critic.response(name, ref), critic.views(name, [ref])[0]):
                if name in {"values", "bootstrap_value"}:
                    view[:] = 2
                    assert (cache.response(name, ref) == 2).all()
                else:
                    with pytest.raises(ValueError, match="read-only"):
                        view[:] = 2
                    with pytest.raises(ValueError, match="WRITEABLE"):
                        view.flags.writeable = True
        for ids in (critic.prompt_ids(ref), critic.get_prompt(key("p")), cache.prompt_ids(ref)):
            assert ids is not None
            with pytest.raises(ValueError, match="WRITEABLE"):
                ids.flags.writeable = True


def test_only_the_creator_may_change_prompts_slots_and_scalars(cache: TokenCache, writer: TokenCache) -> None:
    (ref,) = lease(cache, 1)
    for call in (
        lambda: writer.put_prompt(key("q"), [1]),
        lambda: writer.allocate(key("p")),
        lambda: writer.free(ref),
        lambda: writer.quarantine(ref),
        lambda: writer.release(ref),
        lambda: writer.set_scalars(ref, state=1),
        lambda: writer.free_slots,
        writer.leased,
    ):
        with pytest.raises(CacheError, match="only the coordinator, its creator, may do that"):
            call()


def test_views_outlive_a_closed_cache_which_refuses_everything_else(path: Path) -> None:
    cache = create(path)
    (ref,) = lease(cache, 1)
    ids, rewards = cache.prompt_ids(ref), cache.column("rewards", ref)
    cache.close()
    cache.close()
    rewards[:] = 3
    assert ids.tolist() == [5, 6, 7]
    for call in (lambda: cache.get_prompt(key("p")), lambda: cache.column("rewards", ref), cache.check):
        with pytest.raises(CacheError, match="is closed"):
            call()
    with attach(path) as reader:
        assert (reader.column("rewards", ref) == 3).all()
