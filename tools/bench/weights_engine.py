"""The rollout's part of ``quartet bench weights``: engine vllm on the writer's weights."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct

from common.config import Config
from common.config_loading import load_config
from common.devices import gpu_uuid
from common.messages import CudaHandle, Manifest, Receipt, Sampling, Slept
from common.weights.header import WeightsError
from common.weights.reader import Wanted
from services.rollout.engines.interface import Request
from services.rollout.engines.vllm.engine import EnginePlace, VLLMEngine
from services.rollout.engines.vllm.loader import LoadOrder
from services.rollout.engines.vllm.worker import Answer, EngineFacts
from tools.bench.actors import Order, say, serve
from tools.bench.peak_extension import PEAK

PROMPT_TOKENS = 24
COPIES = 7


class Start(Order, frozen=True):
    """Build the engine; answered by Started."""

    directory: str
    device: str
    overrides: list[str]
    manifest: Manifest
    handle: CudaHandle | None
    transport: Wanted
    log: str


class Apply(Order, frozen=True):
    version: int


class Copy(Order, frozen=True):
    """Copy the committed version several times; answered by Copied."""

    version: int


class Generate(Order, frozen=True):
    """Random prompts; greedy or with temperature 1. Answered by Samples."""

    count: int
    max_new_tokens: int
    greedy: bool
    vocabulary: int


class Sleep(Order, frozen=True):
    pass


class Canary(Order, frozen=True):
    pass


class Started(Struct, frozen=True):
    facts: EngineFacts
    start_s: float


class Applied(Struct, frozen=True):
    """``done`` is time.monotonic()."""

    receipt: Receipt
    done: float


class Copied(Struct, frozen=True):
    median_ms: float
    nbytes: int
    peak_extra_bytes: int


class Samples(Struct, frozen=True):
    prompts: list[list[int]]
    responses: list[list[int]]
    logprobs: list[list[float]]


class Logprobs(Struct, frozen=True):
    values: list[float]


class Slumber(Struct, frozen=True):
    memory: Slept
    seconds: float


class Engine:
    """The state between orders."""

    def __init__(self, order: Start) -> None:
        self.config: Config = load_config("tiny", ["rollout.engine=vllm", *order.overrides])
        self.manifest = order.manifest
        device = torch.device(order.device)
        gpu = gpu_uuid(device.index) if device.type == "cuda" else ""
        place = EnginePlace(Path(order.directory), device, Path(order.log), True, gpu)
        load = LoadOrder(order.manifest, order.handle, order.transport, self.config.weights.bucket_mib)
        started = time.monotonic()
        self.engine = VLLMEngine(self.config, frozenset(), place, load, extension=PEAK)
        say(Started(self.engine.facts, time.monotonic() - started))

    def apply(self, order: Apply) -> Applied:
        receipt = self.engine.apply_weights(self._at(order.version))
        return Applied(receipt, time.monotonic())

    def _at(self, version: int) -> Manifest:
        return msgspec.structs.replace(self.manifest, version=version)

    def copy(self, order: Copy) -> Copied:
        times: list[float] = []
        nbytes = 0
        self.engine.call_worker("quartet_bench_peak")
        for _ in range(COPIES):
            started = time.monotonic()
            answer = msgspec.json.decode(self.engine.call_worker("quartet_apply", order.version), type=Answer)
            if answer.problem:
                raise WeightsError(answer.problem)
            nbytes = answer.copied_bytes
            times.append((answer.held - started) * 1e3)
        return Copied(sorted(times)[COPIES // 2], nbytes, self.engine.call_worker("quartet_bench_peak"))

    def generate(self, order: Generate) -> Samples:
        random = np.random.default_rng(1)
        prompts = [random.integers(5, order.vocabulary - 5, PROMPT_TOKENS).astype(np.int32) for _ in range(order.count)]
        sampling = Sampling(temperature=1.0, max_new_tokens=order.max_new_tokens, greedy=order.greedy, seed=5)
        requests = [Request(index, index, ids) for index, ids in enumerate(prompts)]
        found = [answer for batch in self.engine.generate(requests, sampling, 1) for answer in batch]
        return Samples(
            [prompts[answer.index].tolist() for answer in found], [answer.ids.tolist() for answer in found],
            [answer.logprobs.tolist() for answer in found],
        )  # fmt: skip


engines: list[Engine] = []


def carry_out(order: Start | Apply | Copy | Generate | Sleep | Canary) -> None:
    match order:
        case Start():
            engines.append(Engine(order))
        case Apply():
            say(engines[0].apply(order))
        case Copy():
            say(engines[0].copy(order))
        case Generate():
            say(engines[0].generate(order))
        case Sleep():
            started = time.monotonic()
            slept = engines[0].engine.sleep()
            say(Slumber(slept, time.monotonic() - started))
        case Canary():
            say(Logprobs(engines[0].engine.canary(engines[0].manifest.canary_ids)))


if __name__ == "__main__":
    serve(Start | Apply | Copy | Generate | Sleep | Canary, carry_out)
