"""What a lease asks for (coordinator to replica)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.messages.base import Count, Index, Name, Part, PathName, Text, Version
from common.messages.samples import GenerateItem, Sampling, ScoreItem, SlotRef

MOST = Meta(max_length=2**20)
"""Samples of one lease."""
Refs = Annotated[list[SlotRef], MOST]


class Generate(Part):
    items: Annotated[list[GenerateItem], MOST]
    sampling: Sampling
    version: Version


class ScoreBatch(Part):
    items: Annotated[list[ScoreItem], MOST]


class Evaluate(Part):
    """Critic: write ``values`` and ``bootstrap_value``. ``refs`` is one micro-batch in sample order."""

    refs: Refs


class Logprobs(Part):
    """Trainer: write ``logprobs`` and, if asked for, ``ref_logprobs``. ``refs`` is one micro-batch in sample order."""

    refs: Refs
    reference: bool


class UpdatePolicy(Part):
    """Trainer: one PPO update on the whole batch, in sample order, and publish it as ``version``."""

    refs: Refs
    version: Version
    kl_coefficient: float
    skip: bool = False
    """Publish without an update (critic warm-up)."""


class UpdateCritic(Part):
    refs: Refs


class SavePolicy(Part):
    """Trainer: write the committed ``version`` to ``name`` in the run's checkpoints, as a Hugging Face directory."""

    name: Name
    version: Version


class SaveState(Part):
    """Trainer and critic: copy weights and optimizer state as they are after ``step``, and write the copy to
    ``path``/<role> in the background (``StateSaved`` tells the end of it)."""

    step: Index
    path: PathName


class RestoreState(Part):
    """Trainer and critic: become what they were after ``step``, from ``path``/<role>; step 0: as a run begins.

    The trainer commits and proves the policy's weights as version ``step``. ``digest`` is what the state is known by;
    empty where nobody noted it.
    """

    step: Index
    path: PathName
    digest: Text = ""


class Sleep(Part):
    """Rollout: give back the memory of the KV cache, and of copied weights, until weights are applied again."""


class HostBuffer(Part):
    """Holder: export the buffer of a weight set, allocating it on this GPU if there is none yet."""

    name: Name
    nbytes: Count
    gpu: Name


Task = (
    Generate | ScoreBatch | Evaluate | Logprobs | UpdatePolicy | UpdateCritic | SavePolicy | SaveState | RestoreState
    | Sleep | HostBuffer
)  # fmt: skip
