"""Engine ``vllm``: AsyncLLM in this process, the model in a process of its own, on the trainer's weights.

    RolloutService --requests, token IDs--> AsyncLLM (thread) --ZeroMQ--> EngineCore: scheduler, KV cache, model
                   <--each sample as it ends--

The engine holds version v from the moment the trainer has committed it (alias), or has copied it (copy). Before it
draws a token from v it is awake, its prefix cache is empty, and its receipt is with the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from common.config import Config
from common.messages import Manifest, Receipt, Sampling, Slept
from common.weights.header import WeightsError
from services.rollout.engines.interface import EngineDead, EngineError, Request, Response
from services.rollout.engines.sampling import sample_seed
from services.rollout.engines.vllm.adapter import lora_request
from services.rollout.engines.vllm.arguments import (
    BLOCKS,
    EXTENSION,
    PROBE_MORE,
    engine_arguments,
    gpu_free_bytes,
    kv_cache_bytes,
    max_model_len,
    sampling_arguments,
    set_environment,
)  # fmt: skip
from services.rollout.engines.vllm.host import LoopThread, Overdue, cancelled, last_lines, log_size, output_into
from services.rollout.engines.vllm.loader import LoadOrder
from services.rollout.engines.vllm.samples import Finished, next_finished, response_of
from services.rollout.engines.vllm.worker import Answer, EngineFacts

log = logging.getLogger("rollout.vllm")

SLEEPING = ("weights", "kv_cache")
"""vLLM's names of what sleep takes and ``apply_weights`` gives back, in this order."""
CLOSE_LIMIT_S = 2.0


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine runs and where its process writes its log."""

    source: Path
    device: torch.device
    log: Path
    sleeps: bool
    gpu: str = ""
    """UUID of the device; empty on CPU."""


class VLLMEngine:
    """Implements ``Engine``. Not thread-safe; one a process."""

    def __init__(
        self, config: Config, eos_ids: frozenset[int], place: EnginePlace, order: LoadOrder,
        on_death: Callable[[str], None] = log.error, extension: str = EXTENSION,
    ) -> None:  # fmt: skip
        """``extension`` names a subclass of ``WorkerExtension``. Raises EngineDead, or EngineError for a setting."""
        self.config = config
        self.on_death = on_death
        self.closing = False
        self.eos_ids = eos_ids
        self.place = place
        self.identity = order.manifest.identity
        self.asleep: list[str] = []
        self.requests = 0
        self.lora = None if order.manifest.adapter is None else lora_request()
        self.thread = LoopThread("vllm")
        set_environment(place.device, config.rollout.threads)
        self.log_start = log_size(place.log)
        order = msgspec.structs.replace(order, service=os.getpid())
        free = gpu_free_bytes(place.gpu) if place.gpu and not config.rollout.vllm.kv_cache_mib else 0
        kv_bytes = kv_cache_bytes(config, place.source, free)
        arguments = engine_arguments(config, place.source, order, place.device, kv_bytes, place.sleeps, extension)
        self.llm = self._started(arguments)
        self.block = self._block()
        self.facts = msgspec.json.decode(self.call_worker("quartet_start"), type=EngineFacts)
        try:
            self.thread.when_ended(self.facts.pid, self._died)
        except ProcessLookupError:
            raise EngineDead(self._last_words("died")) from None
        log.info(
            "vLLM engine (pid %d) runs on %s by %s%s; KV cache %.2f GiB", self.facts.pid, place.device,
            self.facts.transport, f" ({self.facts.why_copy})" if self.facts.why_copy else "", kv_bytes / 2**30,
        )  # fmt: skip

    def _started(self, arguments: dict[str, Any]) -> AsyncLLM:
        limit = self.config.rollout.vllm.start_timeout
        try:
            with output_into(self.place.log):
                return self.thread.run(self._start(arguments), limit)
        except Overdue:
            problem = f"did not start within {limit:.0f} s (rollout.vllm.start_timeout)"
            raise EngineDead(self._last_words(problem)) from None
        except Exception as error:  # vLLM raises what it likes; its own log has the cause
            raise EngineDead(self._last_words(f"did not start: {type(error).__name__}: {error}")) from error
        finally:
            logging.getLogger("vllm").setLevel(logging.ERROR)  # of this process alone: vLLM sets it anew at its start

    def _block(self) -> int:
        """Tokens of a KV block, as the engine's process has told; the probe of the prefix cache depends on it."""
        found, expected = int(self.llm.vllm_config.cache_config.block_size), BLOCKS[self.place.device.type]
        if found != expected:
            self.close()
            raise EngineError(
                f"vLLM keeps the KV cache of this model in blocks of {found} tokens, expected {expected}: engine vllm "
                "could not show that its prefix cache is empty after an update; use rollout.engine = 'torch'"
            )
        return found

    @staticmethod
    async def _start(arguments: dict[str, Any]) -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def _died(self) -> None:
        """Also while there is nothing to do: the replica ends at once, not when the next work comes."""
        if not self.closing:
            self.on_death(self._last_words("died"))

    def _last_words(self, problem: str) -> str:
        lines = last_lines(self.place.log, self.log_start)
        return f"the vLLM engine {problem}; the end of its log, {self.place.log}:\n{lines}"

    def call_worker(self, method: str, *arguments: Any) -> Any:
        """Calls the worker extension. Raises EngineDead with the engine's last words."""
        return self._run(self.llm.collective_rpc(method, None, arguments))[0]

    def _ask_worker(self, method: str, *arguments: Any) -> Answer:
        """Raises WeightsError where the worker answers that the weights are torn or of another version."""
        answer = msgspec.json.decode(self.call_worker(method, *arguments), type=Answer)
        if answer.problem:
            raise WeightsError(answer.problem)
        return answer

    def _run(self, job: Any) -> Any:
        limit = self.config.timeouts.update
        try:
            return self.thread.run(job, limit)
        except EngineDeadError as error:
            raise EngineDead(self._last_words("died")) from error
        except Overdue:
            raise EngineDead(self._last_words(f"has not answered within {limit:.0f} s (timeouts.update)")) from None
        except EngineError:
            raise
        except Exception as error:  # vLLM passes on what its process raised as an Exception with its text
            raise EngineDead(self._last_words(f"failed: {type(error).__name__}: {error}")) from error

    # ------------------------------------------------------------ weights

    def apply_weights(self, manifest: Manifest) -> Receipt:
        """Weights first, then the KV cache, then the proof: nothing is sampled in between.

        Raises WeightsError where the version was torn or overtaken meanwhile. What the engine holds may then be torn
        too: nothing may be generated until the next version has been applied.
        """
        if manifest.identity != self.identity:
            raise EngineDead(
                f"the trainer's weights moved from memory {self.identity} to {manifest.identity}; an engine is bound "
                "to the memory it was built on: start this replica again"
            )
        self._wake("weights")
        applied = self._ask_worker("quartet_apply", manifest.version)
        self._wake("kv_cache")
        if not self._run(self.llm.reset_prefix_cache()):
            raise EngineError("vLLM could not empty its prefix cache: samples are still being generated")
        stale, logprobs = self._run(self._probe_and_canary(manifest.canary_ids))
        found = self._ask_worker("quartet_receipt", manifest.version, applied.copied_bytes, applied.held).receipt
        assert found is not None, "an answer without a problem to quartet_receipt has one"
        # Added here, since JSON knows no NaN: a canary of NaN must reach the coordinator and be refused there.
        return msgspec.structs.replace(found, canary_logprobs=tuple(logprobs), stale_tokens=stale)

    def _wake(self, tag: str) -> None:
        if tag in self.asleep:
            self._run(self.llm.wake_up([tag]))
            self.asleep.remove(tag)

    def canary(self, ids: tuple[int, ...]) -> list[float]:
        """Logprobs of ids[1:] under the weights as they are."""
        return self._run(self._probe_and_canary(ids))[1]

    async def _probe_and_canary(self, ids: tuple[int, ...]) -> tuple[int, list[float]]:
        """Returns how many tokens of a probe the prefix cache knew, and the logprobs of ids[1:] computed afresh.

        The probe is the canary backwards, so that it shares no block with it: what is found of it in the cache was
        left by the probe of an older version.
        """
        probe = [ids[-1 - index % len(ids)] for index in range(self.block + PROBE_MORE)]
        one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        checked = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        found, answer = await asyncio.gather(self._complete(probe, one), self._complete(list(ids), checked))
        logprobs = [float(value) for value in answer.prompt_logprobs.logprobs]
        if len(logprobs) != len(ids) - 1:
            raise EngineError(f"vLLM gave {len(logprobs)} logprobs for the {len(ids) - 1} tokens of the canary")
        return int(found.num_cached_tokens or 0), logprobs

    async def _complete(self, ids: list[int], how: SamplingParams) -> Any:
        self.requests += 1
        last: Any = None
        prompt, number = TokensPrompt(prompt_token_ids=ids), f"q{self.requests}"
        async for output in self.llm.generate(prompt, how, number, lora_request=self.lora):
            last = output
        if last is None or not last.finished:
            raise EngineError("vLLM ended a request without finishing it")
        return last

    def sleep(self) -> Slept:
        """Gives the KV cache's memory back, and that of weights of the engine's own (transport copy): those that the
        next version overwrites are dropped, those that vLLM loads anew wait in this host's memory, since vLLM may keep
        beside them what only they tell. Shared weights (alias) are never vLLM's to give back.

        On CPU vLLM has no sleep; nothing there is shared with a GPU's other services either.
        """
        before = self.call_worker("quartet_memory")[1]
        if self.place.sleeps and self.place.device.type == "cuda":
            self._run(self.llm.sleep(level=1 if self.facts.reloads else 2))
            self.asleep = list(SLEEPING)
        return Slept(used_before_bytes=before, used_after_bytes=self.call_worker("quartet_memory")[1])

    # ------------------------------------------------------------ generation

    def generate(self, requests: Sequence[Request], sampling: Sampling, step: int) -> Generator[list[Response]]:
        for request in requests:
            self._require_fits(request, sampling)
        finished: Finished = queue.SimpleQueue()
        task = self.thread.start(self._generate_all(requests, sampling, step, finished))
        left = len(requests)
        try:
            while left:
                responses = self._next(finished)
                left -= len(responses)
                yield responses
        finally:
            self._run(cancelled(task))  # an update must not meet what is left of it in the engine

    def _require_fits(self, request: Request, sampling: Sampling) -> None:
        length, room = len(request.prompt_ids), max_model_len(self.config)
        if length == 0 or length + sampling.max_new_tokens > room:
            raise EngineError(
                f"sample {request.sample}: a prompt of {length} tokens and {sampling.max_new_tokens} new ones do not "
                f"fit rollout.vllm.max_model_len = {room}"
            )

    def _next(self, finished: Finished) -> list[Response]:
        limit = self.config.timeouts.generate
        try:
            return next_finished(finished, limit)
        except queue.Empty:
            raise EngineDead(self._last_words(f"finished no sample within {limit:.0f} s (timeouts.generate)")) from None
        except EngineDeadError as error:
            raise EngineDead(self._last_words("died")) from error

    async def _generate_all(
        self, requests: Sequence[Request], sampling: Sampling, step: int, finished: Finished
    ) -> None:
        """Every request at once; vLLM admits what fits. A failure ends them all and is handed to the waiting side."""

        async def one(request: Request) -> None:
            seed = sample_seed(sampling.seed, step, request.sample)
            how = SamplingParams(
                **sampling_arguments(sampling, self.eos_ids, seed), output_kind=RequestOutputKind.FINAL_ONLY
            )
            output = await self._complete(request.prompt_ids.tolist(), how)
            finished.put(response_of(request, output.outputs[0]))

        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(one(request))
        except BaseExceptionGroup as errors:
            finished.put(errors.exceptions[0])

    def close(self) -> None:
        self.closing = True
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # its client reports the end asked for here as an error
        self.llm.shutdown(timeout=CLOSE_LIMIT_S)
