"""What the rollout service expects of an engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.messages import FinishReason, Manifest, Receipt, Sampling, Slept


class EngineError(ValueError):
    """The engine cannot run this model or request; the message says what to change."""


class EngineDead(Exception):
    """The engine is gone, and with it this replica; the message holds the engine's own last words."""


@dataclass(frozen=True)
class Request:
    """One sample to generate: ``prompt_ids`` int32 [prompt length]; ``sample`` decides row and random numbers."""

    index: int
    sample: int
    prompt_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Response:
    """A finished sample: ``ids`` int32 [n], end token included; ``logprobs`` float32 [n] as drawn from."""

    index: int
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason


class Engine(Protocol):
    """Generates with one version of the policy's weights at a time."""

    def apply_weights(self, manifest: Manifest) -> Receipt:
        """Runs on this version from now on, awake; the receipt proves it.

        Raises WeightsError where the version is torn or overtaken: until the next is applied the engine holds none.
        """
        ...

    def sleep(self) -> Slept:
        """Gives back the memory of the KV cache, and of weights that the engine would copy anew, until weights are
        applied again."""
        ...

    def close(self) -> None: ...

    def generate(self, requests: Sequence[Request], sampling: Sampling, step: int) -> Generator[list[Response]]:
        """Yields responses the moment they end; closed before its end, it leaves no request in the engine."""
        ...
