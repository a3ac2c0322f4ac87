"""What the tests of engine ``torch`` share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from common.config import Config
from common.messages import Sampling
from common.models import resolve_model
from services.rollout.engines.interface import Request, Response
from services.rollout.engines.torch import TorchEngine
from tests.unit.model_support import (
    MAX_NEW,
    MAX_PROMPT,
    PAD,
    random_ids,
)

LENGTHS = (1, 2, 15, 16, 17, 18, MAX_PROMPT)
NO_END: frozenset[int] = frozenset()
SOME_ENDS = frozenset(range(3, 14))
"""So many end tokens that sampled responses end early, at very different lengths."""


def plain_model(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve_model(path), dtype=torch.float32).eval()


def make_engine(config: Config, ends: Iterable[int] = NO_END) -> TorchEngine:
    return TorchEngine(config, frozenset(ends), PAD)


def greedy(max_new: int = MAX_NEW) -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=max_new, greedy=True)


def sampled(max_new: int = MAX_NEW, temperature: float = 1.0, seed: int = 11) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=max_new, seed=seed)


def request(sample: int, length: int | None = None, index: int | None = None) -> Request:
    """A prompt that belongs to the sample; lengths differ from sample to sample unless given."""
    length = 1 + (sample * 7) % MAX_PROMPT if length is None else length
    return Request(sample if index is None else index, sample, random_ids(sample, length))


def run(engine: TorchEngine, requests: Sequence[Request], how: Sampling, step: int = 3) -> dict[int, Response]:
    """Responses by index; each index is answered once."""
    found = [response for batch in engine.generate(requests, how, step) for response in batch]
    assert sorted(response.index for response in found) == sorted(item.index for item in requests)
    return {response.index: response for response in found}


def bits(responses: dict[int, Response]) -> dict[int, tuple[bytes, bytes, str]]:
    return {i: (r.ids.tobytes(), r.logprobs.tobytes(), r.finish_reason) for i, r in responses.items()}
