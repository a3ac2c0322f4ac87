"""A checkpoint as a Hugging Face directory: what its own classes load is the policy that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.checkpoints.files import CHECKSUMS, CheckpointError, Checksums
from common.config import Config
from common.config_loading import to_toml
from common.messages import UpdatePolicy
from common.model import load_causal_lm
from common.models import resolve_model
from common.run_files import STATE_FILE, RunDirectory, state_directories, state_directory
from services.coordinator.ledger import RecordSizes, StepRecord
from services.coordinator.states import SavedState
from tests.unit.model_support import CPU
from tests.unit.state_support import config, run_of
from tools.export import export, export_run

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
            run.save(trainer, step)
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


def note_state(checkpoints: Path, step: int, run: str = "demo", record: int = 0) -> None:
    """The coordinator's part of a state, which says by what its trainer's part is known."""
    directory = state_directory(checkpoints, step)
    sums = msgspec.json.decode((directory / "trainer" / CHECKSUMS).read_bytes(), type=Checksums)
    noted = StepRecord(
        step=record or step, version=step, samples=4, masked=0, position=(0, 4), kl_coefficient=0.1,
        sizes=RecordSizes(metrics=1, samples=1), reward=None, step_s=1.0, idle_s=0.0, phase_s={},
    )  # fmt: skip
    state = SavedState(run, noted, 1, {"trainer": sums.digest})
    (directory / STATE_FILE).write_bytes(msgspec.json.encode(state))


@pytest.fixture
def states(tmp_path: Path) -> RunDirectory:
    """A run's directory with whole states after its steps 1 and 2."""
    files = RunDirectory(tmp_path)
    checkpoint(tmp_path, config())
    files.config.write_text(to_toml(config()))
    for step in (1, 2):
        note_state(files.checkpoints, step)
    return files


def test_a_part_of_another_state_is_refused_by_its_file(states: RunDirectory, tmp_path: Path) -> None:
    """Whole in itself, with right checksums, and not what was saved after this step."""
    first, second = (state_directory(states.checkpoints, step) / "trainer" for step in (1, 2))
    for step in (1, 2):
        export_run(states.path, step, str(tmp_path / f"before-{step}"))
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    for step, part in ((1, first), (2, second)):
        target = tmp_path / f"after-{step}"
        with pytest.raises(CheckpointError) as refused:
            export_run(states.path, step, str(target))
        assert str(refused.value).startswith(f"{part / CHECKSUMS}: digest ")
        assert str(refused.value).endswith(": this is not the state that was saved")
        assert not target.exists()


def test_the_newest_whole_state_is_exported_and_no_copy_beside_it(states: RunDirectory, tmp_path: Path) -> None:
    newest = state_directory(states.checkpoints, 2)
    for name in ("step-2-copy", "step-9.old", "distrusted-step-7", "step-"):
        newest.with_name(name).mkdir()
        (newest.with_name(name) / STATE_FILE).write_bytes((newest / STATE_FILE).read_bytes())
    state_directory(states.checkpoints, 3).mkdir()
    assert list(state_directories(states.checkpoints)) == [1, 2, 3]
    said = export_run(states.path, None, None)
    assert said.startswith(f"{states.checkpoints / 'export-2'}: the policy after step 2, ")
    with pytest.raises(CheckpointError, match=r"there is no saved state after step 3; states there: 1, 2$"):
        export_run(states.path, 3, str(tmp_path / "none"))


@pytest.mark.parametrize(("run", "record"), [("other", 2), ("demo", 1)])
def test_a_state_of_another_run_or_step_is_refused(states: RunDirectory, run: str, record: int) -> None:
    note_state(states.checkpoints, 2, run, record)
    match = f"step-2/state.json is of run '{run}', step {record}; expected run 'demo', step 2: was the directory copied"
    with pytest.raises(CheckpointError, match=match):
        export_run(states.path, None, None)


def test_a_damaged_state_file_is_named(states: RunDirectory) -> None:
    (state_directory(states.checkpoints, 2) / STATE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"step-2/state\.json: cannot be read: "):
        export_run(states.path, None, None)
