"""From Quartet's config to vLLM's engine arguments."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig
from vllm.third_party import pynvml

from common.config import Config, ModelConfig
from common.messages import Sampling
from common.model import DTYPES
from services.rollout.engines.interface import EngineError
from services.rollout.engines.vllm.adapter import lora_arguments
from services.rollout.engines.vllm.loader import LOAD_FORMAT, ORDER, LoadOrder

BLOCKS = {"cuda": 16, "cpu": 32}
"""Tokens of a KV block; on CPU vLLM wants multiples of 32."""
LARGEST_BLOCK = max(BLOCKS.values())
PROBE_MORE = 2
"""By how much the prompt that shows a stale prefix cache is longer than a block: only whole blocks are found again, and
never the last token."""
MIB = 1 << 20
STARTUP_UTILIZATION = 0.01
"""vLLM refuses to start where less than this share of the GPU is free, although the KV cache is given in bytes."""
EXTENSION = "services.rollout.engines.vllm.worker.WorkerExtension"

ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy this process's threads and sockets
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other services share the cores
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at its first use; training samples with temperature only
    "TRITON_F32_DEFAULT": "ieee",  # float32 stays float32, as in the trainer: attention would multiply in TF32
}


def set_environment(device: torch.device, threads: int) -> None:
    """Sets what vLLM reads from the environment, for this process and the engine's; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if device.type == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(device.index or 0)


def visible_devices(index: int) -> str:
    """CUDA_VISIBLE_DEVICES with this process's GPU ``index`` first: vLLM takes the first, and maps memory of others.

    Raises EngineError where the setting shows no such GPU; as in CUDA, an empty or negative entry ends the list.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = given.split(",") if given is not None else [str(number) for number in range(torch.cuda.device_count())]
    names = list(takewhile(lambda name: name and not name.startswith("-"), (entry.strip() for entry in entries)))
    if index >= len(names):
        shown = "there are" if given is None else f"CUDA_VISIBLE_DEVICES = {given!r} shows"
        raise EngineError(f"rollout.device: the engine is to run on GPU {index}, but {shown} {len(names)}")
    return ",".join([names[index], *names[:index], *names[index + 1 :]])


def gpu_free_bytes(uuid: str) -> int:
    """Free memory of a GPU, asked of the driver: a CUDA context of this process would itself take some.

    Raises EngineError where the driver does not tell, such as of a part of a GPU (MIG) in some containers.
    """
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise EngineError(
            f"the driver does not tell how much memory of GPU {uuid} is free ({error}): set rollout.vllm.kv_cache_mib "
            "to the size of the KV cache"
        ) from error


def max_num_seqs(config: Config) -> int:
    return config.rollout.vllm.max_num_seqs or config.rollout.rows


def max_model_len(config: Config) -> int:
    wanted = config.rollout.vllm.max_model_len or config.prompts.max_tokens + config.rollout.max_new_tokens
    return max(wanted, LARGEST_BLOCK + PROBE_MORE + 1)


def batched_tokens(config: Config, on_gpu: bool) -> int:
    """``rollout.vllm.max_num_batched_tokens``, 0 where vLLM chooses. Raises EngineError where it is too small for CPU.

    On CPU no prompt is computed in pieces: vLLM 0.32 then turns the sample's random generator back to where it was
    before the piece, which generators on CPU cannot do, and its engine dies. So a whole sample must fit.
    """
    given, longest = config.rollout.vllm.max_num_batched_tokens, max_model_len(config)
    if given and given < longest and not on_gpu:
        raise EngineError(
            f"rollout.vllm.max_num_batched_tokens = {given}, expected at least {longest}, the length of the longest "
            "sample (rollout.vllm.max_model_len, or prompts.max_tokens + rollout.max_new_tokens): on CPU vLLM cannot "
            "compute a prompt of a sample with a seed in pieces. Raise it, or set 0, vLLM's own choice"
        )
    return given


def kv_bytes_per_token(source: Path, model: ModelConfig) -> int:
    """Keys and values of one token in all layers."""
    whole: Any = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=model.trust_remote_code)
    text, dtype = whole.get_text_config(), DTYPES[model.dtype]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head * dtype.itemsize


def kv_cache_bytes(config: Config, source: Path, free_bytes: int) -> int:
    """``rollout.vllm.kv_cache_mib`` resolved. ``free_bytes`` of the GPU bound it; 0 on CPU, where nothing does."""
    vllm = config.rollout.vllm
    if vllm.kv_cache_mib:
        return vllm.kv_cache_mib * MIB
    blocks = -(-max_model_len(config) // LARGEST_BLOCK) + 1
    tokens = (max_num_seqs(config) + 2) * blocks * LARGEST_BLOCK
    wanted = tokens * kv_bytes_per_token(source, config.model)
    return min(wanted, int(vllm.gpu_memory_utilization * free_bytes)) if free_bytes else wanted


def engine_arguments(
    config: Config, source: Path, order: LoadOrder, device: torch.device, kv_bytes: int, sleeps: bool,
    extension: str = EXTENSION,
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of ``AsyncEngineArgs``. ``extension`` names the class that vLLM mixes into its worker.

    Raises EngineError as ``batched_tokens`` does.
    """
    vllm, on_gpu = config.rollout.vllm, device.type == "cuda"
    arguments: dict[str, Any] = {
        "model": str(source),
        "skip_tokenizer_init": True,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "max_model_len": max_model_len(config),
        "block_size": BLOCKS[device.type],
        "max_num_seqs": max_num_seqs(config),
        "kv_cache_memory_bytes": kv_bytes,
        "gpu_memory_utilization": STARTUP_UTILIZATION,
        "enable_prefix_caching": vllm.prefix_caching,
        "enable_chunked_prefill": on_gpu,  # see batched_tokens
        "enforce_eager": not (vllm.graphs and on_gpu),
        "enable_sleep_mode": sleeps and on_gpu,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "generation_config": "vllm",
        "load_format": LOAD_FORMAT,
        "model_loader_extra_config": {ORDER: msgspec.json.encode(order).decode()},
        "worker_extension_cls": extension,
        **lora_arguments(order.manifest.adapter),
    }
    if tokens := batched_tokens(config, on_gpu):
        arguments["max_num_batched_tokens"] = tokens
    return arguments


def sampling_arguments(sampling: Sampling, eos_ids: frozenset[int], seed: int) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams`` for one sample, all but the kind of output."""
    return {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": None if sampling.greedy else seed,
        "max_tokens": sampling.max_new_tokens,
        "ignore_eos": True,  # the model's own end token would end samples that the trainer takes for unfinished
        "stop_token_ids": sorted(eos_ids),
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }
