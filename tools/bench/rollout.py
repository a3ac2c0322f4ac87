"""The rollout service with engine vllm against vLLM by itself: the same prompts, lengths, sampling and device."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
import uvloop
from transformers import AutoConfig, AutoModelForCausalLM

from common import bus, config_loading
from common.config import Config
from common.devices import export_cuda, gpu_uuid
from common.messages import (
    Ack,
    ApplyWeights,
    Done,
    Failed,
    Generate,
    Generated,
    GenerateItem,
    Hello,
    Lease,
    Manifest,
    Message,
    Ready,
    Sampling,
    SlotRef,
    Stop,
    WeightsApplied,
    WeightsGranted,
    WeightsWanted,
    Welcome,
)  # fmt: skip
from common.model import DTYPES, canary_ids
from common.run_files import RunDirectory, SharedDirectory
from common.run_lock import RunLock
from common.token_cache import Geometry, TokenCache
from common.tokenizer import load_tokenizer
from common.weights.memory import WeightMemory
from common.weights.writer import WeightWriter
from services.holder.buffers import Buffers
from tools.bench import rollout_bare as bare
from tools.bench.actors import Actor, note
from tools.bench.record import ROOT, BenchError
from tools.bench.shapes import SHAPES, model_directory, randomize
from tools.launch import ServiceSpec, service_environment

START_LIMIT_S = 300.0
ROUND_LIMIT_S = 180.0
ROUNDS = 5
WARM_UP = 2
POLL_S = 1.0
EPOCH = 1
Heard = TypeVar("Heard", bound=Message)
Answer = TypeVar("Answer", Done, WeightsApplied)


@dataclass(frozen=True)
class Load:
    """What is generated in one round."""

    shape: str
    prompts: int
    responses: int
    prompt_tokens: int
    new_tokens: int
    rows: int
    kv_mib: int

    @property
    def samples(self) -> int:
        return self.prompts * self.responses


GPU_LOAD = Load("7b", 64, 8, 1024, 256, 128, 16384)
CPU_LOAD = Load("small", 32, 4, 16, 48, 32, 256)


def figures() -> dict[str, float]:
    """Rounds of prompts x responses of fixed length, temperature 1, seeds and logprobs; the two take turns, so that
    what else the host does meets both, and two turns warm up. service_*: the rollout service's process, from the
    lease's sending to its Done, tokens and logprobs then being in the token cache. bare_*: AsyncLLM of the same vLLM
    with the same settings on random weights of its own. Medians; the ratio is the median of each turn's. On a GPU
    Qwen2.5-7B's shape in bfloat16, both with the compiled model out of vLLM's cache, and 128 rows, so that the GPU sets
    the pace: many rows of a small model wait for Python in vLLM's own process, whose speed was seen to change by 40 %
    within a minute on a host with neighbours. On CPU a small shape in float32.
    """
    load = GPU_LOAD if torch.cuda.is_available() else CPU_LOAD
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory = model_directory(load.shape, root)
        config = bench_config(load, directory, root)
        if torch.cuda.is_available():
            note("vLLM by itself starts once, so that neither of the two has to compile the model")
            with bare_engine(config, load, directory, root):
                pass
        turns = uvloop.run(_turns(config, load, directory, root))[WARM_UP:]
    return {
        "service_tok_s": median([turn.service for turn in turns]), "bare_tok_s": median([turn.bare for turn in turns]),
        "service_to_bare_ratio": median([turn.service / turn.bare for turn in turns]),
        "service_to_bare_ratio_min": min(turn.service / turn.bare for turn in turns),
        "service_to_bare_ratio_max": max(turn.service / turn.bare for turn in turns),
        "samples_per_round": float(load.samples), "prompt_tokens": float(load.prompt_tokens),
        "new_tokens": float(load.new_tokens),
    }  # fmt: skip


@contextmanager
def bare_engine(config: Config, load: Load, directory: Path, root: Path) -> Generator[Actor]:
    threads = {"OMP_NUM_THREADS": str(config.rollout.threads)}
    with Actor("tools.bench.rollout_bare", root / "bare.log", threads) as actor:
        order = bare.Start(
            str(directory), config.model.dtype, load.prompt_tokens + load.new_tokens, load.rows, load.kv_mib,
            torch.cuda.is_available(), config.run.seed,
        )  # fmt: skip
        actor.ask(order, bare.Started, START_LIMIT_S)
        yield actor


def prompts(load: Load) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    random = np.random.default_rng(1)
    vocabulary = SHAPES[load.shape].vocabulary
    return [random.integers(5, vocabulary - 5, load.prompt_tokens).astype(np.int32) for _ in range(load.prompts)]


def bench_config(load: Load, directory: Path, root: Path) -> Config:
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    settings = [
        f"model.path={directory}", f"model.dtype={dtype}", "rollout.engine=vllm", f"rollout.rows={load.rows}",
        f"prompts.max_tokens={load.prompt_tokens}", f"rollout.max_new_tokens={load.new_tokens}",
        f"rollout.vllm.kv_cache_mib={load.kv_mib}", f"run.name=bench-{uuid.uuid4().hex[:8]}",
        f"run.directory={root}", "rollout.sleep=never",
    ]  # fmt: skip
    return config_loading.load_config("tiny", settings)


@dataclass(frozen=True)
class Turn:
    """Tokens a second of either's round."""

    service: float
    bare: float


async def _turns(config: Config, load: Load, directory: Path, root: Path) -> list[Turn]:
    shared = SharedDirectory.of_run(config.run.name)
    order = bare.Round([ids.tolist() for ids in prompts(load)], load.responses, load.new_tokens, config.run.seed)
    turns: list[Turn] = []
    with ExitStack() as stack:
        lock = RunLock.acquire(shared)
        stack.callback(lock.remove_directory)
        bench = Coordinator(config, load, directory, shared)
        stack.callback(bench.close)
        await bench.start()
        note("the rollout service is ready; vLLM by itself starts beside it")
        actor = stack.enter_context(bare_engine(config, load, directory, root))
        for number in range(WARM_UP + ROUNDS):
            service = await bench.round(number)
            alone = await asyncio.to_thread(actor.ask, order, bare.Finished, ROUND_LIMIT_S)
            turns.append(Turn(service, alone.tokens / alone.seconds))
            note(f"turn {number}: service {service:.0f}, bare {turns[-1].bare:.0f} tokens/s")
        bench.send(Stop(epoch=EPOCH, reason="measured"))
    return turns


class Coordinator:
    """Plays coordinator, trainer and holder to one real rollout service."""

    def __init__(self, config: Config, load: Load, directory: Path, shared: SharedDirectory) -> None:
        self.config, self.load, self.shared = config, load, shared
        self.files = RunDirectory(Path(config.run.directory) / config.run.name)
        self.files.logs.mkdir(parents=True)
        tokenizer = load_tokenizer(directory)
        self.cache = TokenCache.create(
            shared.tokens, run=config.run.name, fingerprint=tokenizer.fingerprint,
            geometry=Geometry(
                slots=load.samples, max_prompt_tokens=load.prompt_tokens, max_response_tokens=load.new_tokens,
                prompts=load.prompts,
            ),
        )  # fmt: skip
        self.buffers = Buffers()
        self.manifest = self._write(directory)
        self.router = bus.Router(shared.endpoint)
        self.work = 0
        command = [sys.executable, "-P", "-m", "services.rollout", "--run", config.run.name]
        with self.files.log("rollout", 0).open("wb") as log:
            environment = service_environment(ServiceSpec("rollout", 0, config.rollout.threads))
            self.service = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log, env=environment)

    def _write(self, directory: Path) -> Manifest:
        """Random weights in memory that this process hosts itself."""
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        settings = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with device:
            model = AutoModelForCausalLM.from_config(settings, dtype=DTYPES[self.config.model.dtype]).eval()
        randomize(model, settings.num_hidden_layers)

        def allocate(nbytes: int) -> tuple[WeightMemory, bool]:
            buffer, created = self.buffers.obtain("policy", nbytes, device)
            return WeightMemory(buffer, bytes(buffer[:16].tolist()).hex(), gpu_uuid(0)), created

        path = self.shared.weights / "policy"
        writer = WeightWriter(path, "policy", model, 0, allocate if device.type == "cuda" else None)
        return writer.commit(0, canary_ids(settings.vocab_size))

    async def start(self) -> None:
        """Returns when the service holds version 0."""
        await self.hear(Hello)
        self.send(
            Welcome(
                epoch=EPOCH, run=self.config.run.name, cache_path=str(self.shared.tokens),
                run_directory=str(self.files.path.resolve()), shm_directory=str(self.shared.path),
                config=config_loading.to_json(self.config),
            )
        )  # fmt: skip
        wanted = await self.hear(WeightsWanted)
        handle = None
        if self.manifest.gpu:
            handle = export_cuda(self.buffers.obtain("policy", self.manifest.nbytes, torch.device("cuda", 0))[0])
        self.send(WeightsGranted(epoch=EPOCH, request=wanted.request, handle=handle, manifest=self.manifest))
        note("the rollout service has asked for weights; its engine starts")
        await self.hear(Ready)
        self.send(ApplyWeights(epoch=EPOCH, work=self._next(), manifest=self.manifest))
        await self.answer(WeightsApplied)

    async def round(self, number: int) -> float:
        refs = self._slots(number)
        items = [GenerateItem(ref=ref, sample=index) for index, ref in enumerate(refs)]
        sampling = Sampling(temperature=1.0, max_new_tokens=self.load.new_tokens, seed=self.config.run.seed)
        started = time.monotonic()
        task = Generate(items=items, sampling=sampling, version=0)
        self.send(
            Lease(
                epoch=EPOCH, work=self._next(), step=number, phase="GENERATE", deadline_s=ROUND_LIMIT_S, task=task
            )
        )  # fmt: skip
        done = await self.answer(Done)
        elapsed = time.monotonic() - started
        if not isinstance(done.result, Generated):
            raise BenchError(f"round {number} was answered by {done.result!r}, expected Generated")
        tokens = done.result.tokens
        for ref in refs:
            self.cache.free(ref)
        return tokens / elapsed

    def _slots(self, number: int) -> list[SlotRef]:
        """New prompts in each round: nothing may come out of the prefix cache of the one before."""
        refs: list[SlotRef] = []
        for index, ids in enumerate(prompts(self.load)):
            key = f"{number:04d}{index:012d}".encode()
            self.cache.put_prompt(key, np.roll(ids, number))
            refs += [self.cache.allocate(key) for _ in range(self.load.responses)]
        return refs

    def _next(self) -> int:
        self.work += 1
        return self.work

    # ------------------------------------------------------------ the bus

    def send(self, message: Message) -> None:
        self.router.send(self.peer, message)

    async def answer(self, kind: type[Answer]) -> Answer:
        """To the last work; it is acknowledged, and repetitions of answers to earlier work are passed over."""
        while (heard := await self.hear(kind)).work != self.work:
            continue
        self.send(Ack(epoch=EPOCH, work=self.work))
        return heard

    async def hear(self, kind: type[Heard]) -> Heard:
        """The next message of a kind. Raises BenchError where the service fails or says nothing in time."""
        try:
            return await asyncio.wait_for(self._hear(kind), START_LIMIT_S)
        except TimeoutError:
            raise BenchError(f"no {kind.__name__} within {START_LIMIT_S:.0f} s: {self._log()}") from None

    async def _hear(self, kind: type[Heard]) -> Heard:
        while True:
            try:
                self.peer, message = await asyncio.wait_for(self.router.receive(), POLL_S)
            except TimeoutError:
                if self.service.poll() is not None:
                    raise BenchError(f"the rollout service ended: {self._log()}") from None
                continue
            if isinstance(message, Failed):
                raise BenchError(f"the rollout service failed: {message.message}; {self._log()}")
            if isinstance(message, kind):
                return message

    def _log(self) -> str:
        return self.files.log("rollout", 0).read_text(errors="replace")[-2000:]

    def close(self) -> None:
        self.service.kill()
        self.service.wait(30)
        self.router.close()
        self.cache.close()
