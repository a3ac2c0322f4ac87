"""Saving and restoring a trainer's state: how long the trainer stalls, what is written, how long it takes back."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.checkpoints.role import RoleState
from common.config import OptimizerConfig
from common.learner import Learner
from common.messages import RestoreState, SaveState
from common.weights.layout import model_tensors
from tools.bench.actors import note
from tools.bench.record import BenchError
from tools.bench.shapes import model_directory, randomize

LIMIT_S = 300.0
SAVES = 3
POLL_S = 0.02
GIB = 2.0**30


class Saves:
    """Takes the reports of the writing thread."""

    def __init__(self) -> None:
        self.written: list[tuple[int, float]] = []
        self.errors: list[str] = []

    def state_saved(self, step: int, nbytes: int, seconds: float, error: str = "", digest: str = "") -> None:
        if error:
            self.errors.append(error)
        else:
            self.written.append((nbytes, seconds))

    def wait(self, count: int) -> None:
        """Until so many saves are written. Raises BenchError where one failed, or takes too long."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.written) < count:
            if self.errors or time.monotonic() > deadline:
                raise BenchError(f"not saved within {LIMIT_S:g} s: {self.errors}")
            time.sleep(POLL_S)

    def samples_finished(self, work: int, samples: object) -> None:
        raise BenchError("a trainer finishes no samples")

    def update_begun(self, version: int) -> None:
        raise BenchError("nothing is updated here")

    def update_committed(self, work: int, manifest: object) -> None:
        raise BenchError("nothing is updated here")

    def weights_proved(self, proof: object) -> None:
        raise BenchError("nothing is updated here")


def figures() -> dict[str, float]:
    """A policy with its AdamW state: on a GPU Qwen2.5-1.5B's shapes in bfloat16 with float32 masters, on a CPU a small
    shape in float32, random weights. stall_ms is how long the trainer waits for one save (median of three; the first
    one, for which host memory may still be being pinned, is first_stall_ms), write_s how long the file takes beside its
    work, size_ratio what lies on the disk over parameters, masters and moments. restore_s reads it back into the same
    model, checksums included, right after it was written, so out of the host's page cache."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        note("builds the model")
        model = build(root, "1.5b" if on_gpu else "small", device)
        learner = Learner(model, OptimizerConfig(), 10)
        weights = model_tensors(model)
        state = RoleState("trainer", learner, device, LIMIT_S)
        state.prepare(weights)
        learn_nothing(learner)
        held = sum(tensor.nbytes for tensor in weights.values()) + learner.full_bytes()
        saves, stalls = Saves(), []
        for step in range(SAVES + 1):
            note(f"saves for the {step + 1}. time")
            state.step = step
            stalls.append(state.save(SaveState(step=step, path=str(root / f"step-{step}")), weights, saves).stall_s)
            saves.wait(step + 1)  # the next one is not to wait for this one
            note(f"stalled {stalls[-1]:.3f} s, written in {saves.written[-1][1]:.1f} s")
            if step:
                shutil.rmtree(root / f"step-{step - 1}")
        note("restores")
        started = time.perf_counter()
        saved = state.open(RestoreState(step=SAVES, path=str(root / f"step-{SAVES}")))
        state.load_weights(saved, weights)
        state.load_learner(saved)
        restored = time.perf_counter() - started
    return {
        "first_stall_ms": stalls[0] * 1e3,
        "stall_ms": statistics.median(stalls[1:]) * 1e3,
        "write_s": statistics.median(seconds for _, seconds in saves.written),
        "state_gib": held / GIB,
        "size_ratio": saves.written[-1][0] / held,
        "restore_s": restored,
    }


def build(root: Path, shape: str, device: torch.device) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_directory(shape, root), trust_remote_code=False)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    randomize(model, config.num_hidden_layers)
    return model


def learn_nothing(learner: Learner) -> None:
    """One step of the optimizer with gradients of 0, after which it has its moments."""
    for master in learner.masters:
        master.grad = torch.zeros_like(master)
    learner.apply()
