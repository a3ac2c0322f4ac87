"""What the tests of engine ``vllm`` share: a trainer's policy and a real engine on it, and what both compute."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.config_loading import load_config
from common.messages import Manifest, Proof, Receipt, Sampling
from common.model import canary_ids, canary_logprobs, load_causal_lm, token_logprobs
from common.models import resolve_model
from common.weights.receipts import problem
from common.weights.writer import WeightWriter
from services.rollout.engines.interface import EngineError, Request, Response
from services.rollout.engines.vllm.engine import EnginePlace, VLLMEngine
from services.rollout.engines.vllm.loader import LoadOrder
from tests.process.vllm_probe import PROBE
from tests.unit.model_support import CPU, full_logits

CLOSE = 1e-4
"""Nats by which engine and trainer may differ in float32."""
SMALL_ENGINE = (
    "rollout.engine=vllm", "rollout.device=cpu", "rollout.rows=16", "rollout.max_new_tokens=8", "prompts.max_tokens=80",
)  # fmt: skip
WIDE = {"hidden_size": 128, "intermediate_size": 96, "max_position_embeddings": 128}
"""Sizes of random models whose attention heads of 32 numbers vLLM's CPU kernels take."""


def greedy(max_new: int = 8) -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=max_new, greedy=True)


def sampled(max_new: int = 8, temperature: float = 0.8) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=max_new, seed=3)


def prompts(count: int, length: int = 5, vocabulary: int = 97) -> list[Request]:
    """Prompts of their own, each of another length."""
    return [
        Request(i, i, np.random.default_rng(i).integers(3, vocabulary, length + i % 7).astype(np.int32))
        for i in range(count)
    ]


class CountingEngine(VLLMEngine):
    """Notes how many tokens of each prompt came out of the prefix cache; ``fail_after`` so many requests one fails."""

    from_cache: tuple[int, ...] = ()
    fail_after = 0
    ended = 0
    failed = threading.Event()

    async def _complete(self, ids: list[int], how: Any) -> Any:
        output = await super()._complete(ids, how)
        self.from_cache += (int(output.num_cached_tokens or 0),)
        self.ended += 1
        if self.ended == self.fail_after:
            asyncio.get_running_loop().call_later(0.2, self.failed.set)  # the others have been cancelled by then
            raise EngineError(f"request {self.ended} fails as the test asks")
        return output


class EnginePair:
    """A trainer's policy and an engine on it."""

    def __init__(self, config: Config, folder: Path, change: Callable[[Any], None] | None = None) -> None:
        """``change`` is made to the trainer's model before its weights are shared."""
        self.config = config
        self.folder = folder
        self.model: Any = load_causal_lm(config.model, CPU)
        if change is not None:
            change(self.model)
        self.writer = WeightWriter(folder / "policy", "policy", self.model, version=0)
        self.canary = canary_ids(self.model.config.vocab_size)
        self.version = 0
        self.random = torch.Generator().manual_seed(5)
        self.log = folder / "engine.log"
        source = resolve_model(config.model.path)
        order = LoadOrder(self.commit(), None, config.weights.transport, config.weights.bucket_mib)
        place = EnginePlace(source, CPU, self.log, False)
        self.engine = CountingEngine(config, frozenset({2}), place, order, extension=PROBE)

    # ------------------------------------------------------------ weights

    def commit(self) -> Manifest:
        return self.writer.commit(self.version, self.canary)

    def begin(self) -> None:
        self.version += 1
        self.writer.begin(self.version)

    @torch.no_grad()
    def write(self) -> None:
        """Changes every parameter by far more than an optimizer step would."""
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=self.random) * 0.02)

    def update(self) -> tuple[Manifest, Proof]:
        self.begin()
        self.write()
        return self.committed()

    def committed(self) -> tuple[Manifest, Proof]:
        manifest = self.commit()
        return manifest, self.writer.prove(canary_logprobs(self.model, self.canary))

    def apply(self) -> Receipt:
        """The engine's receipt of the version committed last, which must be right."""
        manifest, proof = self.committed()
        receipt = self.engine.apply_weights(manifest)
        assert problem(manifest, proof, receipt) == ""
        return receipt

    def spoil(self, name: str, index: int, change: float) -> None:
        """Changes one element of the engine's own parameter or buffer, after each version taken over, until mended."""
        self.engine.call_worker("quartet_test_spoil", name, index, change)

    def mend(self) -> None:
        self.engine.call_worker("quartet_test_mend")

    # ------------------------------------------------------------ generation

    def samples(self, requests: Sequence[Request], how: Sampling) -> dict[int, Response]:
        batches = list(self.engine.generate(requests, how, self.version))
        found = {response.index: response for batch in batches for response in batch}
        assert sorted(found) == sorted(request.index for request in requests)
        return found

    def trainers_logprobs(self, request: Request, response: Response, temperature: float) -> torch.Tensor:
        """What the trainer computes for a response, by one forward pass."""
        logits = full_logits(self.model, request.prompt_ids, response.ids)
        return token_logprobs(logits, torch.from_numpy(response.ids).long(), temperature)

    def worst_difference(self, requests: Sequence[Request], how: Sampling) -> float:
        """Largest difference between engine's and trainer's logprobs over all tokens of fresh samples, in nats."""
        found = self.samples(requests, how)
        worst = 0.0
        for request in requests:
            response = found[request.index]
            expected = self.trainers_logprobs(request, response, how.temperature)
            worst = max(worst, float((expected - torch.from_numpy(response.logprobs)).abs().max()))
        return worst

    def require_greedy(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """The engine's greedy tokens, each of which must be the trainer's own choice."""
        found = self.samples(requests, greedy())
        for request in requests:
            response = found[request.index]
            chosen = full_logits(self.model, request.prompt_ids, response.ids).argmax(-1)
            assert response.ids.tolist() == chosen.tolist()
        return {index: response.ids.tolist() for index, response in found.items()}

    def require_same_computing(self) -> None:
        """Over three updates: the receipt's canary, sampled tokens' logprobs and greedy tokens are the trainer's."""
        tokens: list[dict[int, list[int]]] = []
        for _ in range(3):
            self.update()
            receipt = self.apply()
            _, proof = self.committed()
            assert receipt.canary_logprobs == pytest.approx(proof.canary_logprobs, abs=CLOSE)
            assert self.worst_difference(prompts(12), sampled()) < CLOSE
            tokens.append(self.require_greedy(prompts(12)))
        assert tokens[0] != tokens[1] != tokens[2], "the updates changed nothing: nothing is tested"


@contextmanager
def engine_pair(*overrides: str, change: Callable[[Any], None] | None = None) -> Generator[EnginePair]:
    """Starts an engine for preset tiny's settings under the overrides; ends it and leaves nothing."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-quartet-vllm-"))
    try:
        pair = EnginePair(load_config("tiny", [*SMALL_ENGINE, *overrides]), folder, change)
        try:
            yield pair
        finally:
            pair.engine.close()
    finally:
        shutil.rmtree(folder)
