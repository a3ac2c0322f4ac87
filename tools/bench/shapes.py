"""Model directories with the shapes of published models, the tiny preset's tokenizer, and no weights in their file.

What is measured gets random weights where it runs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from common.models import resolve_model


@dataclass(frozen=True)
class Shape:
    """What a Qwen2 configuration varies in."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool


SHAPES = {
    "7b": Shape(28, 3584, 28, 4, 18944, 152064, False),  # Qwen2.5-7B
    "1.5b": Shape(28, 1536, 12, 2, 8960, 151936, True),  # Qwen2.5-1.5B
    "0.5b": Shape(24, 896, 14, 2, 4864, 151936, True),  # Qwen2.5-0.5B
    "small": Shape(4, 256, 8, 4, 512, 1000, False),  # to rehearse on a CPU
    "smaller": Shape(2, 128, 4, 2, 256, 1000, True),
}


def model_directory(name: str, root: Path) -> Path:
    """Writes config.json and the tokenizer's files of a shape into a folder of its own."""
    shape, directory = SHAPES[name], root / name
    directory.mkdir(parents=True, exist_ok=True)
    for file in resolve_model("tiny").iterdir():
        if file.name.startswith(("tokenizer", "special_tokens")):
            shutil.copy(file, directory)
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": False,
    }  # fmt: skip
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    save_file({}, directory / "model.safetensors")
    return directory


@torch.no_grad()
def randomize(model: torch.nn.Module, layers: int) -> None:
    """Random weights under which a deep network computes as a trained one does: branches small beside the residual.

    Without that, bfloat16 rounding is amplified from layer to layer and no two implementations agree. Logits stay
    within 2 for the same reason: bfloat16 keeps numbers of that size to 0.008.
    """
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name and not getattr(model.config, "tie_word_embeddings", False):
            parameter.normal_(0.0, 1.0)
        elif "lm_head" in name:
            parameter.normal_(0.0, 0.3 / parameter.shape[-1] ** 0.5)
        elif parameter.ndim >= 2:
            branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, 0.02 / (2 * layers) ** 0.5 if branch else 0.02)
