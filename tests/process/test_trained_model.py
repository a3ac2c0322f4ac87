"""What a run leaves of its model: Hugging Face directories, on the way and at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.models import resolve_model
from tests.process.whole_runs import WholeRun
from tools.export import export_run


def weights(directory: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), local_files_only=True)
    return dict(model.state_dict())


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_the_trained_policy_is_saved(run: WholeRun) -> None:
    """And each step's state is one that is exported as it was."""
    ended = run.complete("checkpoint.every=1", "trainer.optimizer.learning_rate=0.001")
    assert ended.code == 0, ended.err
    folder = run.files.checkpoints
    assert sorted(path.name for path in folder.iterdir()) == ["final", "step-1", "step-2"]
    for step in (1, 2):
        export_run(run.files.path, step, str(run.folder / f"exported-{step}"))
    start, first, last, final = (
        weights(path)
        for path in (resolve_model("tiny"), run.folder / "exported-1", run.folder / "exported-2", folder / "final")
    )
    assert distance(last, final) == 0.0
    assert len({path.stat().st_mode for path in (folder / "final").iterdir()}) == 1, "whoever reads one reads all"
    # AdamW moves a weight by about the learning rate: the two steps are there, and no third one.
    assert 1e-4 < distance(start, first) < 2e-3
    assert 1e-4 < distance(first, final) < 2e-3
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder / "final"), local_files_only=True)
    assert tokenizer.decode(tokenizer("1+2=")["input_ids"], skip_special_tokens=True) == "1+2="
    summary = run.summary()
    assert summary.trained_model == str(folder / "final")
    assert summary.phase_s["CHECKPOINT"] > 0
    assert str(folder / "final") in ended.out
    stalls = [line.timings["checkpoint_stall_s"] for line in run.metrics() if "checkpoint_stall_s" in line.timings]
    assert stalls, "what saving the states cost"
    assert 0 < sum(stalls) < summary.wall_s
