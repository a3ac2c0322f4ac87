"""A trainer's and an engine's side of one weight set."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from common.messages import Manifest, Proof, Receipt, TensorEntry
from common.model import canary_logprobs
from common.weights.layout import dtype_from_name, model_tensors
from common.weights.memory import map_set
from common.weights.reader import Wanted, attach_model
from common.weights.receipts import problem
from common.weights.writer import WeightWriter
from tests.unit.model_support import MAX_NEW, MAX_PROMPT, VOCABULARY, random_model

CANARY = tuple(range(3, 11))
FUSED_FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
"""Families that engines fuse. Qwen2 has biases on q, k and v; Qwen3's small models are tied, Llama's here are not."""


@contextmanager
def set_path() -> Generator[Path]:
    """Where a weight set may lie: its folder does not exist yet."""
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        yield Path(directory, "weights", "policy")


def fused_model(family: str, **changes: Any) -> Any:
    """A random causal LM of two layers of one of ``FUSED_FAMILIES``, whose biases are not zero."""
    if family != "qwen2":
        return random_model(family, **changes)
    torch.manual_seed(7)
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": MAX_PROMPT + MAX_NEW,
        "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    model: Any = Qwen2ForCausalLM(Qwen2Config(**(fields | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.2)
    return model.eval()


def entry_end(entry: TensorEntry) -> int:
    """First byte after a tensor."""
    return entry.offset + torch.Size(entry.shape).numel() * dtype_from_name(entry.dtype).itemsize


class Pair:
    """A trainer's model and an engine's model of the same architecture, with different values until they share."""

    def __init__(self, path: Path, family: str = "llama", transport: Wanted = "auto", **changes: Any) -> None:
        self.model = fused_model(family, **changes)
        self.other = fused_model(family, **changes)
        with torch.no_grad():
            for parameter in self.other.parameters():
                parameter.zero_()
        self.values = {name: tensor.detach().clone() for name, tensor in model_tensors(self.model).items()}
        self.writer = WeightWriter(path, "policy", self.model, version=0)
        self.manifest = self.writer.commit(0, CANARY)
        self.proof = self.prove()
        self.reader = attach_model(self.other, self.manifest, map_set(self.manifest, None), transport, bucket_mib=1)

    def prove(self) -> Proof:
        return self.writer.prove(canary_logprobs(self.model, CANARY))

    def receipt(self, manifest: Manifest | None = None) -> Receipt:
        """The engine's, of what it applies now."""
        manifest = manifest or self.manifest
        applied = self.reader.apply(manifest)
        return self.reader.receipt(manifest, applied, canary_logprobs(self.other, CANARY))

    def problem(self, manifest: Manifest | None = None) -> str:
        """What is wrong with the engine by the writer's proof, which is older: of the moment of the commit."""
        return problem(manifest or self.manifest, self.proof, self.receipt(manifest))

    def write(self, version: int) -> None:
        """One optimizer step by the writer, not committed yet."""
        self.writer.begin(version)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.model(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits.square().mean().backward()
        optimizer.step()

    def step(self, version: int) -> Manifest:
        """One whole update by the writer."""
        self.write(version)
        manifest = self.writer.commit(version, CANARY)
        self.proof = self.prove()
        return manifest
