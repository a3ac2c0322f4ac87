"""The policy on disk: a Hugging Face directory that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.adapter import inner_model
from common.weights.names import LORA_A, LORA_B, adapted_module, plain_name

ADAPTER = "adapter"
"""Directory of a LoRA policy's adapter inside its checkpoint."""
BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt", ".py")
"""Files of a model directory that are copied as they are: tokenizer, chat template, code of the model's own."""


def save_policy(policy: Any, source: Path, target: Path) -> int:
    """Saves ``policy`` in its dtype, with what lies beside the weights in ``source``, where the model came from.

    A LoRA policy is saved as one model, its adapter added to the base's weights, and its adapter by itself in PEFT's
    format in ``adapter/``. Returns the bytes written. ``target`` appears, or is replaced, when everything is there.
    Raises OSError, naming the directory, where it cannot be written.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        state = host_copy(policy)
        if (adapter := getattr(policy, "peft_config", None)) is not None:
            save_adapter(policy, state, unfinished / ADAPTER)
            state = merged(state, adapter["default"].lora_alpha / adapter["default"].r)
        inner_model(policy).save_pretrained(unfinished, state_dict=state)
        for file in source.iterdir():
            copied = file.suffix in BESIDE_WEIGHTS and not file.name.endswith(".index.json")
            if copied and not (unfinished / file.name).exists():
                shutil.copyfile(file, unfinished / file.name)
        mode = (unfinished / "config.json").stat().st_mode
        for file in unfinished.rglob("*.safetensors"):
            file.chmod(mode)  # safetensors gives its files to their owner alone, whatever the umask
        nbytes = sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file())
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except Exception as error:
        # safetensors and transformers have errors of their own for a full disk, and none says which directory.
        raise OSError(f"{target}: the policy cannot be saved: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return nbytes


def save_adapter(policy: Any, state: dict[str, torch.Tensor], target: Path) -> None:
    """Writes what ``PeftModel.from_pretrained`` loads onto the base; ``state`` is the policy's, on the host."""
    import peft

    tensors = peft.get_peft_model_state_dict(policy, state_dict=state, save_embedding_layers=False)
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(policy.peft_config["default"])
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # a set, whose order is another one in each process
    config.save_pretrained(target)


def merged(state: dict[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """A LoRA policy's state as that of a plain model of the same function: W + scaling · B A, computed in float32."""
    plain = {plain_name(name): tensor for name, tensor in state.items()}
    for name in [name for name in plain if name.endswith(LORA_A)]:
        module = adapted_module(name)
        a, b, weight = plain.pop(name), plain.pop(module + LORA_B), plain[module + ".weight"]
        plain[module + ".weight"] = (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)
    return plain


def host_copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state with memory of its own for every tensor, tied ones still one.

    The policy's parameters are views of one shared file (``common.weights``), which safetensors takes for tied.
    """
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[place]
    return state
