"""The trainer's part of ``quartet bench weights``: a model of a shape, an optimizer that updates it in place."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from transformers import AutoConfig, AutoModelForCausalLM

from common.messages import CudaHandle, Manifest, Proof
from common.model import canary_ids, canary_logprobs, token_logprobs
from common.weights.checksum import tensor_checksums
from common.weights.layout import model_tensors, plan
from common.weights.memory import WeightMemory, map_buffer
from common.weights.placeholders import EmptyOnMeta
from common.weights.reader import synchronize
from common.weights.writer import WeightWriter
from tools.bench.actors import Order, say, serve
from tools.bench.shapes import randomize


class Size(Order, frozen=True):
    """How many bytes the set of this model will have."""

    directory: str
    dtype: str


class Build(Order, frozen=True):
    """Build the model and put it into the set's memory, or take over what an earlier writer left there."""

    directory: str
    dtype: str
    device: str
    path: str
    handle: CudaHandle | None
    created: bool


class Update(Order, frozen=True):
    """One optimizer step in place; answered by Committed at once and by Proved later."""


class Prove(Order, frozen=True):
    pass


class Compare(Order, frozen=True):
    """Recompute the logprobs of what the engine sampled."""

    prompts: list[list[int]]
    responses: list[list[int]]
    logprobs: list[list[float]]
    temperature: float


class Sized(Struct, frozen=True):
    nbytes: int


class Built(Struct, frozen=True):
    manifest: Manifest
    map_s: float


class Committed(Struct, frozen=True):
    """``optimizer_done`` and ``committed`` are time.monotonic()."""

    version: int
    optimizer_done: float
    committed: float


class Proved(Struct, frozen=True):
    proof: Proof
    at: float
    checksum_ms: float


class Compared(Struct, frozen=True):
    """Absolute differences in nats; ``gap`` is how much likelier than the engine's token the trainer's best one is."""

    mean: float
    largest: float
    greedy_equal_ratio: float
    gap: float


class Writer:
    """The state between orders."""

    def __init__(self) -> None:
        self.model: Any = None
        self.weights: WeightWriter | None = None
        self.canary: tuple[int, ...] = ()
        self.device = torch.device("cpu")

    def build(self, order: Build) -> Built:
        self.device = torch.device(order.device)
        config = AutoConfig.from_pretrained(order.directory, trust_remote_code=False)
        dtype = getattr(torch, order.dtype)
        torch.manual_seed(0)
        with self.device:
            if order.created:
                self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
                randomize(self.model, config.num_hidden_layers)
            else:
                with EmptyOnMeta():
                    self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        started = time.monotonic()
        allocate = None if order.handle is None else partial(self._map, order)
        self.weights = WeightWriter(Path(order.path), "policy", self.model, 0, allocate)
        self.canary = canary_ids(config.vocab_size)
        manifest = self.weights.commit(self.weights.version, self.canary)
        elapsed = time.monotonic() - started
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return Built(manifest, elapsed)

    @staticmethod
    def _map(order: Build, nbytes: int) -> tuple[WeightMemory, bool]:
        assert order.handle is not None
        return map_buffer(order.handle, nbytes), order.created

    def update(self) -> None:
        """SGD in place with random gradients: what matters here is that every parameter is written."""
        assert self.weights is not None
        version = self.weights.version + 1
        self.weights.begin(version)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        torch.optim.SGD(self.model.parameters(), lr=1e-4).step()
        synchronize(self.device)
        done = time.monotonic()
        self.weights.commit(version, self.canary)
        say(Committed(version, done, time.monotonic()))
        say(self.prove())
        self.model.zero_grad(set_to_none=True)

    def prove(self) -> Proved:
        assert self.weights is not None
        logprobs = canary_logprobs(self.model, self.canary)
        started = time.monotonic()
        proof = self.weights.prove(logprobs)
        return Proved(proof, time.monotonic(), (time.monotonic() - started) * 1e3)

    @torch.no_grad()
    def compare(self, order: Compare) -> Compared:
        difference: list[torch.Tensor] = []
        gaps: list[torch.Tensor] = []
        for prompt, response, logprobs in zip(order.prompts, order.responses, order.logprobs, strict=True):
            ids = torch.tensor([prompt + response], device=self.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            mine = token_logprobs(logits, ids[0, len(prompt) :], order.temperature)
            best = token_logprobs(logits, logits.argmax(-1), order.temperature)
            difference.append((mine.cpu() - torch.tensor(logprobs)).abs())
            gaps.append((best - mine).cpu())
        all_differences, all_gaps = torch.cat(difference), torch.cat(gaps)
        return Compared(
            float(all_differences.mean()), float(all_differences.max()), float((all_gaps == 0).float().mean()),
            float(all_gaps.max()),
        )  # fmt: skip


writer = Writer()


def carry_out(order: Size | Build | Update | Prove | Compare) -> None:
    match order:
        case Size():
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(order.directory, trust_remote_code=False)
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, order.dtype))
            say(Sized(plan(model_tensors(model))[1]))
        case Build():
            say(writer.build(order))
        case Update():
            writer.update()
        case Prove():
            assert writer.weights is not None
            tensor_checksums(list(writer.weights.views.values()))  # the first call compiles
            say(writer.prove())
        case Compare():
            say(writer.compare(order))


if __name__ == "__main__":
    serve(Size | Build | Update | Prove | Compare, carry_out)
