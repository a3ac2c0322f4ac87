"""Samples on their way: the slot, how tokens are drawn, the finished response, its score."""

from __future__ import annotations

from msgspec import Struct

from common.messages.base import FinishReason, Part


class SlotRef(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One sample's place in the token cache; the generation catches a reader with an old reference."""

    slot: int
    generation: int


class Sampling(Part):
    """How tokens are drawn. ``temperature`` 0 is not a value: greedy decoding is ``greedy=True``."""

    temperature: float
    max_new_tokens: int
    greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class GenerateItem(Part):
    """One sample to generate. ``sample`` is its index within the step: it decides row and random numbers."""

    ref: SlotRef
    sample: int


class ScoreItem(Part):
    """One response to score; the row's own ground truth and metadata go along as the JSON that they are."""

    ref: SlotRef
    prompt: str
    ground_truth: bytes
    metadata: bytes
    source: str


class FinishedSample(Part):
    """A sample whose last token has been written."""

    ref: SlotRef
    length: int
    finish_reason: FinishReason
    version_low: int
    version_high: int


class Score(Part):
    """The scorers' outcome for one sample: ``reward`` is the weighted sum, ``accuracy`` the first scorer's own score.

    ``error`` is set, and both numbers are 0, where the sample could not be scored.
    """

    ref: SlotRef
    reward: float
    accuracy: float
    error: str = ""
