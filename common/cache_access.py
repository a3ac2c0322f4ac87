"""How a replica comes to the run's token cache."""

from __future__ import annotations

from pathlib import Path

from common.service import Assignment
from common.token_cache import TokenCache


def attach_cache(assignment: Assignment, fingerprint: str, writes: frozenset[str] = frozenset()) -> TokenCache:
    """Attaches to the run's cache; ``fingerprint`` is that of the tokenizer this replica has loaded."""
    return TokenCache.attach(Path(assignment.cache_path), run=assignment.run, fingerprint=fingerprint, writes=writes)


def take_counts(cache: TokenCache) -> tuple[int, int]:
    """Hits and misses since the last call."""
    hits, misses = cache.hits, cache.misses
    cache.hits = cache.misses = 0
    return hits, misses
