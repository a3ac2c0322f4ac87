"""LoRA policies: the base's weights stay as they are, and PEFT's small matrices beside them are trained.

    y = W x + (alpha / rank) · B (A x)        A [rank, in] random, B [out, rank] zero at first

Without its adapter the policy is the reference: one model serves both.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from common.config import LoRAConfig, ModelConfig
from common.config_values import lora_alpha
from common.messages import AdapterInfo
from common.model import load_causal_lm
from common.service import ReplicaError


def load_policy(config: ModelConfig, device: torch.device, seed: int) -> Any:
    """The policy in eval mode: a Hugging Face model, or a ``PeftModel`` around one if ``lora.rank`` is not 0."""
    model = load_causal_lm(config, device)
    return add_adapter(model, config.lora, seed) if config.lora.rank else model


def adapter_info(lora: LoRAConfig) -> AdapterInfo | None:
    """What a weight set's manifest says of its adapter; None without LoRA."""
    if lora.rank == 0:
        return None
    return AdapterInfo(rank=lora.rank, alpha=lora_alpha(lora), targets=tuple(lora.targets))


def add_adapter(model: Any, lora: LoRAConfig, seed: int) -> Any:
    """Wraps a model so that its adapter alone is trained; the same ``seed`` gives the same first matrices.

    Raises ReplicaError where PEFT is not installed or the model lacks one of ``lora.targets``.
    """
    try:
        import peft
    except ImportError as error:
        raise ReplicaError(
            f"model.lora.rank = {lora.rank}, but the package peft is not installed: pip install 'quartet[lora]'"
        ) from error
    modules = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if missing := [target for target in lora.targets if target not in modules]:
        raise ReplicaError(
            f"model.lora.targets: the model has no projection {missing[0]!r}; it has {', '.join(sorted(modules))}"
        )
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora_alpha(lora), target_modules=list(lora.targets), task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In the base's dtype, as engines hold it; the learner keeps float32 masters.
        policy: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return policy.eval()


def inner_model(policy: Any) -> Any:
    """The Hugging Face model itself, which computes with the adapter too."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


@contextmanager
def adapter_off(policy: Any) -> Generator[None]:
    """Within, a LoRA policy computes what its base computes, bit for bit."""
    with policy.disable_adapter():
        yield
