"""What a lease asks for (coordinator to replica)."""

from __future__ import annotations

from common.messages.base import Part
from common.messages.samples import GenerateItem, Sampling, ScoreItem, SlotRef


class Generate(Part):
    items: list[GenerateItem]
    sampling: Sampling
    version: int


class ScoreBatch(Part):
    items: list[ScoreItem]


class Evaluate(Part):
    """Critic: write ``values`` and ``bootstrap_value``. ``refs`` is one micro-batch in sample order."""

    refs: list[SlotRef]


class Logprobs(Part):
    """Trainer: write ``logprobs`` and, if asked for, ``ref_logprobs``. ``refs`` is one micro-batch in sample order."""

    refs: list[SlotRef]
    reference: bool


class UpdatePolicy(Part):
    """Trainer: one PPO update on the whole batch, in sample order, and publish it as ``version``."""

    refs: list[SlotRef]
    version: int
    kl_coefficient: float
    skip: bool = False
    """Publish without an update (critic warm-up)."""


class UpdateCritic(Part):
    refs: list[SlotRef]


class SavePolicy(Part):
    """Trainer: write the committed ``version`` to ``name`` in the run's checkpoints, as a Hugging Face directory."""

    name: str
    version: int


class SaveState(Part):
    """Trainer and critic: copy weights and optimizer state as they are after ``step``, and write the copy to
    ``path``/<role> in the background (``StateSaved`` tells the end of it)."""

    step: int
    path: str


class RestoreState(Part):
    """Trainer and critic: become what they were after ``step``, from ``path``/<role>; step 0: as a run begins.

    The trainer commits and proves the policy's weights as version ``step``.
    """

    step: int
    path: str


class Sleep(Part):
    """Rollout: give back the memory of the KV cache, and of copied weights, until weights are applied again."""


class HostBuffer(Part):
    """Holder: export the buffer of a weight set, allocating it on this GPU if there is none yet."""

    name: str
    nbytes: int
    gpu: str


Task = (
    Generate | ScoreBatch | Evaluate | Logprobs | UpdatePolicy | UpdateCritic | SavePolicy | SaveState | RestoreState
    | Sleep | HostBuffer
)  # fmt: skip
