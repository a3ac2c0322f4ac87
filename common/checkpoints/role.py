"""What trainer and critic have in common: the step whose state they hold, saving it and becoming it again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from common.checkpoints.files import CheckpointError
from common.checkpoints.reader import StateReader
from common.checkpoints.saver import StateSaver
from common.checkpoints.writer import Written
from common.learner import Learner
from common.messages import NO_STATE, RestoreState, SaveState, StateStaged
from common.service import LeaseFailed, Outbox

log = logging.getLogger("checkpoints")

CLOSE_LIMIT_S = 4.0
"""Longest wait for an unfinished save when the service ends; less than what the replica grants to it."""
_WEIGHT = "parameter."
_RNG, _RNG_GPU = "rng.cpu", "rng.cuda"


class RoleState:
    """The state of a role: its weights, optimizer, counters and torch's random numbers.

    ``step`` is the step after which all of that is as it is; ``NO_STATE`` while it changes, and where it is torn.
    """

    def __init__(self, role: str, learner: Learner, device: torch.device, wait_s: float, step: int = 0) -> None:
        self.role = role
        self.step = step
        self._learner = learner
        self._device = device
        self._first_random = _random_states(device)
        self._saver = StateSaver(wait_s)

    def prepare(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes the memory for saving these weights and their optimizer's state; on a GPU that takes seconds."""
        if self._device.type == "cuda":
            nbytes = sum(tensor.nbytes for tensor in weights.values()) + self._learner.full_bytes()
            self._saver.prepare(nbytes, self._device)

    def require(self, doing: str) -> None:
        """Raises LeaseFailed where there is no state to work on."""
        if self.step == NO_STATE:
            raise LeaseFailed("stale", f"{self.role}: {doing} asked for, but no state is held: RestoreState first")

    def save(self, task: SaveState, weights: Mapping[str, torch.Tensor], outbox: Outbox) -> StateStaged:
        """Copies the state and writes the copy to ``task.path``/<role> in the background; the outbox is told the end.

        Raises LeaseFailed where another step's state is held, or an earlier save does not end.
        """
        if task.step != self.step:
            raise LeaseFailed("stale", f"{self.role}: the state of step {task.step} asked for, {self.step} is held")
        tensors = {_WEIGHT + name: tensor for name, tensor in weights.items()}
        tensors |= self._learner.state() | _random_states(self._device)
        counters = {"step": task.step, "skipped_in_row": self._learner.skipped_in_row}

        def report(end: Written | CheckpointError) -> None:
            if isinstance(end, Written):
                outbox.state_saved(task.step, end.nbytes, end.seconds, digest=end.digest)
            else:
                outbox.state_saved(task.step, 0, 0.0, str(end))

        try:
            return StateStaged(stall_s=self._saver.save(Path(task.path, self.role), tensors, counters, report))
        except CheckpointError as error:
            raise LeaseFailed("error", str(error)) from error

    def open(self, task: RestoreState) -> StateReader:
        """The saved state that is asked for, verified. Raises LeaseFailed where it is missing, torn or another one."""
        path = Path(task.path, self.role)
        if not self._saver.wait(self._saver.wait_s):
            raise LeaseFailed("error", f"{path}: an earlier save has not ended, so nothing can be restored yet")
        try:
            saved = StateReader(path, task.digest)
            if saved.counters.get("step") != task.step:
                raise CheckpointError(f"{path}: holds the state of step {saved.counters.get('step')}, not {task.step}")
            return saved
        except CheckpointError as error:
            raise LeaseFailed("error", str(error)) from error

    def load_weights(self, saved: StateReader, weights: Mapping[str, torch.Tensor]) -> None:
        """Reads weights into these tensors. Raises LeaseFailed where the state is another model's."""
        wanted = {_WEIGHT + name: tensor for name, tensor in weights.items()}
        required, optional = self._learner.state_names()
        known = wanted.keys() | required | optional | {_RNG, _RNG_GPU}
        try:
            if unknown := sorted(saved.tensors.keys() - known):
                raise CheckpointError(
                    f"{saved.directory}: tensors {unknown[:3]} are none of this model: was it saved with another "
                    "model.path, model.dtype or model.lora?"
                )
            saved.load(wanted)
        except CheckpointError as error:
            raise LeaseFailed("error", str(error)) from error

    def load_learner(self, saved: StateReader) -> None:
        """Reads optimizer and random states; the weights have been read before. Raises LeaseFailed."""
        random = {key: tensor for key, tensor in _random_states(self._device).items() if key in saved.tensors}
        try:
            saved.load(random)
            self._learner.load_state(saved.tensors.keys(), saved.load, saved.counters.get("skipped_in_row", 0))
        except CheckpointError as error:
            raise LeaseFailed("error", str(error)) from error
        _set_random_states(random, self._device)

    def begin_again(self) -> None:
        """Optimizer and random states as when the service was built; the weights have been put back before."""
        self._learner.reset()
        _set_random_states(self._first_random, self._device)

    def close(self) -> None:
        self._saver.close(CLOSE_LIMIT_S)


def saved_weights(saved: StateReader) -> list[str]:
    """Names of the weights in a state."""
    return [key.removeprefix(_WEIGHT) for key in saved.tensors if key.startswith(_WEIGHT)]


def load_saved_weights(saved: StateReader, weights: Mapping[str, torch.Tensor]) -> None:
    """Reads weights alone, by their names, in place. Raises CheckpointError."""
    saved.load({_WEIGHT + name: tensor for name, tensor in weights.items()})


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {_RNG: torch.get_rng_state()}
    if device.type == "cuda":
        states[_RNG_GPU] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[_RNG])
    if _RNG_GPU in states:
        torch.cuda.set_rng_state(states[_RNG_GPU], device)
