"""Loading models and computing per-token quantities with them (torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from common.config import ModelConfig
from common.devices import UUID_PREFIXES, gpu_index
from common.models import resolve_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CANARY_LENGTH = 16


def pick_device(wanted: str) -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU. Raises DeviceError for a UUID that is not seen here."""
    if wanted.startswith(UUID_PREFIXES):
        return torch.device("cuda", gpu_index(wanted))
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device("cuda", 0) if wanted == "cuda" else torch.device(wanted)


def set_up_torch(threads: int) -> None:
    """Pins the threads and asks for deterministic kernels: the same run gives the same bits on CPU.

    Also switches off the progress bars of loading and saving, which would land in a service's log.
    """
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    if not torch.cuda.is_available():  # and on a GPU float32 stays float32, as in the engine: TF32 is another policy
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory


def release_cached(device: torch.device) -> None:
    """Gives memory that torch keeps for later back to the GPU, where an engine that wakes up needs it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def model_directory(config: ModelConfig) -> Path:
    return resolve_model(config.path)


def loading(config: ModelConfig) -> dict[str, Any]:
    """How a model is loaded: from files that are there, weights from safetensors alone: no pickle is read.

    By code of transformers alone, unless ``model.trust_remote_code`` says otherwise.
    """
    return {
        "dtype": DTYPES[config.dtype], "attn_implementation": config.attention, "local_files_only": True,
        "trust_remote_code": config.trust_remote_code, "use_safetensors": True,
    }  # fmt: skip


def load_causal_lm(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The policy or reference as a causal LM, in eval mode (no dropout in PPO: old and new logprobs must compare)."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_directory(config), **loading(config))
    return model.to(device).eval()  # type: ignore[arg-type]


def load_backbone(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The transformer without its language-model head, for the critic."""
    model: PreTrainedModel = AutoModel.from_pretrained(model_directory(config), **loading(config))
    return model.to(device).eval()  # type: ignore[arg-type]


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability of each id under softmax(logits / temperature), in float32.

    logits [..., V] any float dtype, ids [...] int64 -> [...] float32.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scaled, dim=-1)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature). logits [..., V] -> [...] float32."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def canary_ids(vocabulary: int) -> tuple[int, ...]:
    """A fixed sequence of token IDs that trainer and engine both run through their weights."""
    return tuple((7 * i + 3) % vocabulary for i in range(CANARY_LENGTH))


@torch.no_grad()
def canary_logprobs(model: nn.Module, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Logprobs of ids[1:] given what precedes them, temperature 1, without any cache."""
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    output: Any = model(input_ids=tokens, use_cache=False)
    return tuple(token_logprobs(output.logits[0, :-1], tokens[0, 1:], 1.0).tolist())
