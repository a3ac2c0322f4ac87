"""A whole run that trains adapters alone: its reference is the policy without them, its checkpoint one model."""

from __future__ import annotations

from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from common.models import resolve_model
from tests.process.whole_runs import WholeRun

IDS = torch.tensor([[5, 6, 7, 8]])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits


def test_adapters_are_trained_and_saved(run: WholeRun) -> None:
    ended = run.complete(
        "eval.rows=0", "model.lora.rank=8", "model.lora.alpha=16", "trainer.optimizer.learning_rate=1e-3"
    )
    assert ended.code == 0, ended.err
    first, second = run.steps()
    assert first.values["kl"] == 0, "with B zero the policy is the reference, bit for bit"
    assert second.values["kl"] != 0
    run.assert_nothing_left()
    final, tiny = run.files.checkpoints / "final", resolve_model("tiny")
    base: Any = AutoModelForCausalLM.from_pretrained(str(tiny), dtype=torch.float32, local_files_only=True)
    untrained = logits(base)
    merged: Any = AutoModelForCausalLM.from_pretrained(str(final), dtype=torch.float32, local_files_only=True)
    assert (logits(merged) - untrained).abs().max() > 1e-3
    adapted: Any = peft.PeftModel.from_pretrained(base, str(final / "adapter"))
    assert (logits(merged) - logits(adapted)).abs().max() < 1e-4
