"""The policy on disk: a Hugging Face directory that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt", ".py")
"""Files of a model directory that are copied as they are: tokenizer, chat template, code of the model's own."""


def save_policy(model: PreTrainedModel, source: Path, target: Path) -> int:
    """Saves ``model`` in its dtype, with what lies beside the weights in ``source``, where the model came from.

    Returns the bytes written. ``target`` appears, or is replaced, when everything is there. Raises OSError, naming the
    directory, where it cannot be written.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished, state_dict=host_copy(model))
        for file in source.iterdir():
            copied = file.suffix in BESIDE_WEIGHTS and not file.name.endswith(".index.json")
            if copied and not (unfinished / file.name).exists():
                shutil.copyfile(file, unfinished / file.name)
        nbytes = sum(file.stat().st_size for file in unfinished.iterdir())
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except Exception as error:
        # safetensors and transformers have errors of their own for a full disk, and none says which directory.
        raise OSError(f"{target}: the policy cannot be saved: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return nbytes


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
