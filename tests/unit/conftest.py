"""What the tests of the token cache share, and those of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.token_cache import COLUMNS, TokenCache
from tests.unit.token_cache_support import attach, create, shared_path
from tests.unit.weights_support import set_path


@pytest.fixture
def cache() -> Iterator[TokenCache]:
    """A new token cache."""
    with shared_path() as path, create(path) as cache:
        yield cache


@pytest.fixture
def writer(cache: TokenCache) -> Iterator[TokenCache]:
    """Another mapping of the same token cache, which may write every column."""
    with attach(cache.path, frozenset(COLUMNS)) as writer:
        yield writer


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a weight set may be made."""
    with set_path() as path:
        yield path
