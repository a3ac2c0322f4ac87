"""A checkpoint as a Hugging Face directory: what its own classes load is the policy that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.checkpoints.files import CheckpointError
from common.config import Config
from common.messages import UpdatePolicy
from common.model import load_causal_lm
from common.models import resolve_model
from tests.unit.model_support import CPU
from tests.unit.state_support import config, run_of
from tools.export import export

IDS = torch.tensor([[5, 6, 7, 8]])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(directory), local_files_only=True)


def checkpoint(folder: Path, settings: Config) -> tuple[Path, torch.Tensor]:
    """A trainer's state after two updates, and the live policy's logits."""
    with run_of(folder, settings) as run:
        trainer = run.trainer()
        before = logits(trainer.policy)
        for step in (1, 2):
            run.give(trainer, step, UpdatePolicy(refs=run.fill(step), version=step, kl_coefficient=0.1))
        run.save(trainer, 2)
        live = logits(trainer.policy)
        assert (live - before).abs().max() > 0.05, "nothing was learnt: nothing is tested"
        return Path(run.path(2)), live


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_exported_with_its_tokenizer(tmp_path: Path, dtype: str) -> None:
    directory, live = checkpoint(tmp_path, config(dtype))
    nbytes = export(directory, tmp_path / "exported", config(dtype))
    model = loaded(tmp_path / "exported")
    assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{dtype}"}
    assert torch.equal(logits(model), live)
    assert nbytes == sum(file.stat().st_size for file in (tmp_path / "exported").rglob("*") if file.is_file())
    tokenizer: Any = AutoTokenizer.from_pretrained(str(tmp_path / "exported"), local_files_only=True)
    assert tokenizer("1+2=")["input_ids"]
    assert resolve_model(str(tmp_path / "exported")) == tmp_path / "exported"


def test_a_lora_checkpoint_is_one_model_and_an_adapter_in_pefts_layout(tmp_path: Path) -> None:
    settings = config(rank=8)
    directory, live = checkpoint(tmp_path, settings)
    export(directory, tmp_path / "exported", settings)
    assert torch.allclose(logits(loaded(tmp_path / "exported")), live, atol=1e-4)
    base = load_causal_lm(settings.model, CPU)
    assert not torch.allclose(logits(base), live, atol=1e-2)
    adapted: Any = PeftModel.from_pretrained(base, str(tmp_path / "exported" / "adapter"))
    assert torch.equal(logits(adapted), live)


def test_what_is_not_the_configs_model_is_refused(tmp_path: Path) -> None:
    directory, _ = checkpoint(tmp_path, config(rank=8))
    target = tmp_path / "exported"
    with pytest.raises(CheckpointError, match=r"trainer: \[.*\] are weights of the state or of the config, not"):
        export(directory, target, config())
    with pytest.raises(CheckpointError, match=r"'parameter\.\S+' is .*float32, expected .*bfloat16: another model's"):
        export(directory, target, config("bfloat16", rank=8))
    with pytest.raises(CheckpointError, match="step-7/trainer: there is no whole saved state here"):
        export(directory.with_name("step-7"), target, config(rank=8))
    assert not target.exists()
