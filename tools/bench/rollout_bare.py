"""vLLM by itself, for ``quartet bench rollout``: its own weights, its own loader, Quartet's environment variables."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, Literal

from msgspec import Struct

from services.rollout.engines.vllm.arguments import ENVIRONMENT
from tools.bench.actors import Order, say, serve


class Start(Order, frozen=True):
    directory: str
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int
    max_num_seqs: int
    kv_mib: int
    graphs: bool
    seed: int


class Round(Order, frozen=True):
    """Every prompt so many times, to the full length. Prompts are rotated at each round, so none is cached."""

    prompts: list[list[int]]
    responses: int
    new_tokens: int
    seed: int


class Started(Struct, frozen=True):
    pass


class Finished(Struct, frozen=True):
    tokens: int
    seconds: float


class Bare:
    """The engine between orders."""

    def __init__(self, order: Start) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.order = order
        self.rounds = 0
        self.loop = asyncio.new_event_loop()
        self.engine: Any = self.loop.run_until_complete(self.start(order))

    @staticmethod
    async def start(order: Start) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments: dict[str, Any] = {} if order.graphs else {"block_size": 32}
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=order.directory, skip_tokenizer_init=True, dtype=order.dtype, load_format="dummy",
                max_model_len=order.max_model_len, max_num_seqs=order.max_num_seqs,
                kv_cache_memory_bytes=order.kv_mib << 20, gpu_memory_utilization=0.01, generation_config="vllm",
                enforce_eager=not order.graphs, logprobs_mode="processed_logprobs", disable_log_stats=True,
                seed=order.seed, **arguments,
            )
        )  # fmt: skip

    async def round(self, order: Round) -> Finished:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        number, self.rounds = self.rounds, self.rounds + 1

        async def one(index: int, ids: list[int]) -> int:
            how = SamplingParams(
                temperature=1.0, max_tokens=order.new_tokens, ignore_eos=True, logprobs=0, flat_logprobs=True,
                seed=(order.seed * 1_000_003 + number) * 100_003 + index, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            last: Any = None
            async for output in self.engine.generate(TokensPrompt(prompt_token_ids=ids), how, f"{number}-{index}"):
                last = output
            return len(last.outputs[0].token_ids)

        rotated = [ids[-number:] + ids[:-number] if number else ids for ids in order.prompts]
        started = time.monotonic()
        copies = [ids for ids in rotated for _ in range(order.responses)]
        lengths = await asyncio.gather(*(one(index, ids) for index, ids in enumerate(copies)))
        return Finished(sum(lengths), time.monotonic() - started)


engines: list[Bare] = []


def carry_out(order: Start | Round) -> None:
    if isinstance(order, Start):
        engines.append(Bare(order))
        say(Started())
    else:
        say(engines[0].loop.run_until_complete(engines[0].round(order)))


if __name__ == "__main__":
    serve(Start | Round, carry_out)
    for bare in engines:
        bare.engine.shutdown()
