"""A LoRA policy in a real vLLM engine on CPU: its updates arrive through memory, and its receipts prove them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.adapter import adapter_info, adapter_off, load_policy
from common.config import Config
from common.config_loading import load_config
from common.messages import Manifest, Proof, Receipt, Sampling
from common.model import canary_ids, canary_logprobs, token_logprobs
from common.models import resolve_model
from common.weights.header import WeightsError
from common.weights.names import adapter_tensors, is_adapter_tensor, without_adapter
from common.weights.receipts import OWN_COPY, problem
from common.weights.writer import WeightWriter
from services.rollout.engines.interface import Request, Response
from services.rollout.engines.vllm.engine import EnginePlace, VLLMEngine
from services.rollout.engines.vllm.loader import LoadOrder
from tests.process.adapter_spoiler import SPOILER

TEMPERATURE = 2.0
SAMPLING = Sampling(temperature=TEMPERATURE, max_new_tokens=6, seed=3)
CLOSE = 1e-4
"""Nats by which engine and trainer may differ in float32."""


@dataclass
class Pair:
    """A trainer's policy and an engine that runs on its memory."""

    config: Config
    policy: Any
    writer: WeightWriter
    engine: VLLMEngine
    canary: tuple[int, ...]
    version: int = 0
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def update(self) -> tuple[Manifest, Proof]:
        """Changes the adapter, A and B, by far more than an optimizer step would."""
        self.version += 1
        self.writer.begin(self.version)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=self.random) * 0.1)
        return self.committed()

    def committed(self) -> tuple[Manifest, Proof]:
        manifest = self.writer.commit(self.version, self.canary)
        return manifest, self.writer.prove(canary_logprobs(self.policy, self.canary))

    def spoil(self, name: str) -> None:
        self.engine.call_worker("quartet_test_spoil", name)

    def samples(self) -> list[tuple[Request, Response]]:
        requests = [Request(i, i, np.random.default_rng(i).integers(3, 90, 5 + i).astype(np.int32)) for i in range(12)]
        batches = self.engine.generate(requests, SAMPLING, self.version)
        return [(requests[response.index], response) for batch in batches for response in batch]

    @torch.no_grad()
    def trainers(self, request: Request, response: Response) -> torch.Tensor:
        """The trainer's logprobs of a response."""
        ids = torch.tensor([[*request.prompt_ids.tolist(), *response.ids.tolist()]])
        logits = self.policy(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
        return token_logprobs(logits, ids[0, len(request.prompt_ids) :], TEMPERATURE)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """One engine for all tests of this module: it takes 15 s to start."""
    settings = ["rollout.engine=vllm", "model.lora.rank=8", "model.lora.alpha=16", "rollout.device=cpu"]
    config = load_config("tiny", [*settings, "weights.transport=alias"])
    folder = Path(f"/dev/shm/test-quartet-lora-{os.getpid()}")
    folder.mkdir(mode=0o700)
    policy = load_policy(config.model, torch.device("cpu"), config.run.seed)
    writer = WeightWriter(folder / "policy", "policy", policy, version=0, adapter=adapter_info(config.model.lora))
    canary = canary_ids(policy.config.vocab_size)
    place = EnginePlace(resolve_model(config.model.path), torch.device("cpu"), folder / "engine.log", sleeps=False)
    order = LoadOrder(writer.commit(0, canary), None, config.weights.transport, config.weights.bucket_mib)
    try:
        engine = VLLMEngine(config, frozenset({2}), place, order, extension=SPOILER)
        yield Pair(config, policy, writer, engine, canary)
        engine.close()
    finally:
        shutil.rmtree(folder)


def canary_difference(proof: Proof, receipt: Receipt) -> float:
    pairs = zip(proof.canary_logprobs, receipt.canary_logprobs, strict=True)
    return max(abs(one - other) for one, other in pairs)


def test_the_engine_follows_every_update_of_the_adapter(pair: Pair) -> None:
    previous: tuple[float, ...] = ()
    for update in (pair.committed, pair.update, pair.update):
        manifest, proof = update()
        receipt = pair.engine.apply_weights(manifest)
        assert problem(manifest, proof, receipt) == ""
        assert canary_difference(proof, receipt) < CLOSE
        assert previous == () or max(np.abs(np.subtract(previous, proof.canary_logprobs))) > 0.1
        previous = proof.canary_logprobs
        worst = max(
            float((pair.trainers(request, response) - torch.from_numpy(response.logprobs)).abs().max())
            for request, response in pair.samples()
        )
        assert worst < CLOSE
    request, response = pair.samples()[0]
    with adapter_off(pair.policy):
        base = pair.trainers(request, response)
    assert (base - torch.from_numpy(response.logprobs)).abs().max() > 0.1, "the base alone computes something else"


def test_the_base_is_aliased_and_the_adapter_copied(pair: Pair) -> None:
    manifest, _ = pair.update()
    receipt = pair.engine.apply_weights(manifest)
    assert receipt.transport == "alias"
    offsets = dict(zip(manifest.tensors, receipt.offsets, strict=True))
    assert [offsets[entry] for entry in manifest.tensors if not is_adapter_tensor(entry.name)] == [
        entry.offset for entry in without_adapter(manifest).tensors
    ]
    assert {offsets[entry] for entry in adapter_tensors(manifest)} == {OWN_COPY}
    nbytes = [pair.writer.views[entry.name].nbytes for entry in adapter_tensors(manifest)]
    assert receipt.copied_bytes == sum(nbytes)
    assert receipt.unchecked == ()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.lora_A.weight",
        "model.layers.1.mlp.up_proj.lora_B.weight",
        "model.layers.1.mlp.down_proj.lora_A.weight",
    ],
)
def test_a_spoiled_adapter_is_named(pair: Pair, name: str) -> None:
    manifest, proof = pair.update()
    pair.spoil(name)
    assert problem(manifest, proof, pair.engine.apply_weights(manifest)).startswith(f"its tensor {name} has checksum")
    pair.spoil("")
    assert problem(manifest, proof, pair.engine.apply_weights(manifest)) == ""


def test_a_torn_adapter_is_refused(pair: Pair) -> None:
    """The engine takes no version over while the trainer writes; and lives on."""
    manifest, _ = pair.update()
    pair.writer.begin(pair.version + 1)
    with pytest.raises(WeightsError, match=r"WRITING\("):
        pair.engine.apply_weights(manifest)
    manifest, proof = pair.update()
    assert problem(manifest, proof, pair.engine.apply_weights(manifest)) == ""
