"""The trained policy on disk: what Hugging Face's own classes load is the model in the trainer's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import ModelConfig
from common.model import load_causal_lm
from common.models import resolve_model
from common.tokenizer import load_tokenizer
from common.weights.writer import WeightWriter
from services.trainer.policy_directory import save_policy
from tests.unit.model_support import CPU, random_model

IDS = torch.tensor([[5, 6, 7, 8]])


def changed(model: Any) -> torch.Tensor:
    """Changes every parameter in place, as an update does; the logits after it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.01)
        return model(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def loaded_logits(directory: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), local_files_only=True)
    return model.eval()(input_ids=IDS, use_cache=False).logits


def test_a_shared_policy_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    source = resolve_model("tiny")
    model = load_causal_lm(ModelConfig(path="tiny"), CPU)
    WeightWriter(tmp_path / "policy", "policy", model, version=0)
    wanted, target = changed(model), tmp_path / "checkpoints" / "final"
    nbytes = save_policy(model, source, target)
    assert torch.equal(loaded_logits(target), wanted)
    assert nbytes == sum(file.stat().st_size for file in target.iterdir())
    assert [path.name for path in target.parent.iterdir()] == ["final"]
    assert load_tokenizer(target).fingerprint == load_tokenizer(source).fingerprint
    tokenizer: Any = AutoTokenizer.from_pretrained(str(target), local_files_only=True)
    assert tokenizer("12+34=")["input_ids"] == load_tokenizer(source).encode("12+34=")
    assert resolve_model(str(target)) == target, "it can be the model.path of a further run"


def test_tied_tensors_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model = random_model("qwen3")
    model.save_pretrained(tmp_path / "source")
    WeightWriter(tmp_path / "policy", "policy", model, version=0)
    wanted = changed(model)
    save_policy(model, tmp_path / "source", tmp_path / "final")
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("source", "final")]
    assert sizes[0] == sizes[1]
    assert torch.equal(loaded_logits(tmp_path / "final"), wanted)


def test_a_later_save_replaces_the_earlier_one_whole(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path / "source")
    save_policy(model, tmp_path / "source", tmp_path / "final")
    (tmp_path / "final" / "left.txt").write_text("of the earlier one")
    wanted = changed(model)
    save_policy(model, tmp_path / "source", tmp_path / "final")
    assert torch.equal(loaded_logits(tmp_path / "final"), wanted)
    assert not (tmp_path / "final" / "left.txt").exists()


def test_what_cannot_be_saved_is_named_and_leaves_the_earlier_one(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path / "source")
    save_policy(model, tmp_path / "source", tmp_path / "final")
    before = loaded_logits(tmp_path / "final")
    changed(model)
    with pytest.raises(OSError, match=r"final: the policy cannot be saved: .*gone"):
        save_policy(model, tmp_path / "gone", tmp_path / "final")
    assert torch.equal(loaded_logits(tmp_path / "final"), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "source"]
