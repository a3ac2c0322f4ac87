"""The token cache: prompts and responses as token IDs in POSIX shared memory, read by every service without a copy."""

from __future__ import annotations

from common.token_cache.cache import TokenCache
from common.token_cache.columns import Column
from common.token_cache.layout import COLUMNS, COORDINATOR_WRITES, CacheError, Geometry, prompt_key
from common.token_cache.slots import SampleScalars, ScalarFields

__all__ = [
    "COLUMNS",
    "COORDINATOR_WRITES",
    "CacheError",
    "Column",
    "Geometry",
    "SampleScalars",
    "ScalarFields",
    "TokenCache",
    "prompt_key",
]
