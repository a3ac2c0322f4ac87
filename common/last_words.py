"""What a replica says of the error that ends it."""

from __future__ import annotations

from common.models import ModelError
from common.service import ReplicaError
from common.token_cache import CacheError
from common.tokenizer import TokenizerError
from common.weights.header import WeightsError

CLEAR = (ReplicaError, CacheError, ModelError, TokenizerError, WeightsError)
"""Errors whose message says all; any other is logged with its traceback."""


def is_clear(error: BaseException) -> bool:
    return isinstance(error, CLEAR)


def reason_of(error: BaseException) -> str:
    """In one line; of an error that is not clear its type too."""
    return str(error) if is_clear(error) else f"{type(error).__name__}: {error}"
