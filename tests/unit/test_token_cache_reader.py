"""Token cache: a reader that the writer overtakes between two reads of the same walk."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import cast

import pytest

from common.token_cache.prompt_index import PromptIndex
from tests.unit.token_cache_support import LAYOUT, create, shared_path


class Overtaken:
    """A table of the index before whose first read the writer gets its turn."""

    def __init__(self, table: memoryview[int], turn: Callable[[], None]) -> None:
        self.table = table
        self.turn: Callable[[], None] | None = turn

    def __getitem__(self, entry: int) -> int:
        turn, self.turn = self.turn, None
        if turn is not None:
            turn()
        return self.table[entry]

    def __len__(self) -> int:
        return len(self.table)

    def release(self) -> None:
        self.table.release()


def in_chain(chain: int, number: int) -> bytes:
    return bytes([chain, *[0] * 14, number])


@pytest.mark.parametrize("table", ["nexts", "lengths"])
def test_a_walk_that_is_overtaken_looks_again(table: str) -> None:
    """Chain 0 is young -> pinned. While the reader is at young, its entry goes to another prompt of chain 1."""
    pinned, young = in_chain(0, 1), in_chain(0, 2)
    with shared_path() as path, create(path) as cache, path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        index = PromptIndex(mapping, mapping, LAYOUT, path)
        cache.put_prompt(pinned, [1, 1])
        cache.allocate(pinned)
        cache.put_prompt(young, [2, 2, 2])
        cache.put_prompt(in_chain(2, 3), [3])
        cache.put_prompt(in_chain(3, 4), [4])
        turn = Overtaken(getattr(index, table), lambda: cache.put_prompt(in_chain(1, 5), [5] * 7))
        setattr(index, table, cast("memoryview[int]", turn))
        if table == "nexts":
            found = index.find(pinned, copy=False)
            assert found is not None
            assert found.tolist() == [1, 1]
        else:
            assert index.find(young, copy=True) is None
            found = index.find(in_chain(1, 5), copy=True)
            assert found is not None
            assert found.tolist() == [5] * 7
        assert turn.turn is None
        del found
        index.close()
