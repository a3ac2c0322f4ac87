"""What a replica says of the error that ends it."""

from __future__ import annotations

from common.models import ModelError
from common.service import WRONG, ReplicaError, WrongSetup
from common.token_cache import CacheError
from common.tokenizer import TokenizerError
from common.weights.header import WeightsError

CLEAR = (ReplicaError, CacheError, ModelError, TokenizerError, WeightsError)
"""Errors whose message says all; any other is logged with its traceback."""


LASTING = (WrongSetup, ModelError, TokenizerError)
"""Errors that would be there again if the replica were started again."""


def exit_code(error: BaseException) -> int:
    return WRONG if isinstance(error, LASTING) else 1


def is_clear(error: BaseException) -> bool:
    return isinstance(error, CLEAR)


def reason_of(error: BaseException) -> str:
    """In one line; of an error that is not clear its type too."""
    return str(error) if is_clear(error) else f"{type(error).__name__}: {error}"
