"""What the tests of models share: small random models of several families, and samples in a real token cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common.config import Config, ModelConfig, PromptsConfig, RolloutConfig
from common.messages import SlotRef
from common.token_cache import COLUMNS, Geometry, TokenCache, prompt_key

MAX_PROMPT, MAX_NEW = 35, 8
"""Longest prompt and response of the small models, which have just so many positions."""
VOCABULARY = 97
PAD = 0
CPU = torch.device("cpu")

_BLOCKS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_ROOM: dict[str, Any] = {"max_position_embeddings": MAX_PROMPT + MAX_NEW, "initializer_range": 0.2}
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
_GQA: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 48}
_SIZES: dict[str, dict[str, Any]] = {
    "llama": _GQA,
    "qwen3": _GQA | {"head_dim": 8, "tie_word_embeddings": True},
    "mistral": _GQA | {"sliding_window": 64},
    "gpt_neox": {"intermediate_size": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2},
    "gpt2": {},
}

FAMILIES = ("tiny", "llama", "qwen3", "gpt_neox", "opt", "gpt2", "mistral")
"""``tiny`` is the embedded model; the others are random. OPT and GPT-2 have learned positions, not one too many."""


def random_model(family: str, **changes: Any) -> Any:
    """A causal LM of two layers with random weights that spread its logits, in eval mode."""
    torch.manual_seed(7)
    fields: dict[str, Any] = _BLOCKS | _ROOM | _IDS | _SIZES[family] | changes
    match family:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**fields))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**fields))
        case "mistral":
            model = MistralForCausalLM(MistralConfig(**fields))
        case "gpt_neox":
            model = GPTNeoXForCausalLM(GPTNeoXConfig(**fields))
        case "opt":
            model = OPTForCausalLM(OPTConfig(**fields))
        case _:
            model = GPT2LMHeadModel(GPT2Config(**fields))
    return model.eval()


def model_path(family: str, folder: Path, **changes: Any) -> str:
    """What ``model.path`` is for a family; a random model is saved into ``folder`` first."""
    if family == "tiny":
        return "tiny"
    path = folder / family
    if not path.exists():
        random_model(family, **changes).save_pretrained(path)
    return str(path)


def engine_config(path: str, rows: int = 4, prefill_rows: int = 3, max_new: int = MAX_NEW, **model: Any) -> Config:
    return Config(
        model=ModelConfig(path=path, **model),
        prompts=PromptsConfig(max_tokens=MAX_PROMPT),
        rollout=RolloutConfig(rows=rows, prefill_rows=prefill_rows, max_new_tokens=max_new, device="cpu"),
    )


def random_ids(seed: int, length: int, vocabulary: int = VOCABULARY) -> npt.NDArray[np.int32]:
    """Ordinary tokens only: no pad, begin or end."""
    return np.random.default_rng(seed).integers(3, vocabulary, length).astype(np.int32)


@contextmanager
def token_cache(slots: int = 16, max_response: int = 12, fingerprint: str = "tok") -> Generator[TokenCache]:
    """An empty cache in shared memory whose every column this process may write."""
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        geometry = Geometry(slots=slots, max_prompt_tokens=MAX_PROMPT, max_response_tokens=max_response, prompts=slots)
        path = Path(directory, "tokens")
        with TokenCache.create(
            path, run="demo", fingerprint=fingerprint, geometry=geometry, writes=frozenset(COLUMNS)
        ) as cache:
            yield cache


def put_sample(
    cache: TokenCache, prompt: Sequence[int] | npt.NDArray[np.int32], response: Sequence[int] | npt.NDArray[np.int32]
) -> SlotRef:
    """A finished sample whose response tokens all count."""
    key = prompt_key(str(list(prompt)), "", "tok")
    cache.put_prompt(key, prompt)
    ref = cache.allocate(key)
    cache.set_scalars(ref, response_length=len(response))
    cache.column("response_ids", ref)[: len(response)] = response
    cache.column("response_mask", ref)[: len(response)] = 1
    return ref


def put_column(cache: TokenCache, name: str, ref: SlotRef, values: Sequence[float] | npt.NDArray[Any]) -> None:
    cache.column(name, ref)[: len(values)] = values


@torch.no_grad()
def full_logits(
    model: Any, prompt: Sequence[int] | npt.NDArray[np.int32], response: Sequence[int] | npt.NDArray[np.int32]
) -> torch.Tensor:
    """Logits that predict each response token, [len(response), V], by one forward without cache, batch or padding."""
    ids = torch.tensor([[*map(int, prompt), *map(int, response)]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
