"""Samples on their way: the slot, how tokens are drawn, the finished response, its score."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from common.messages.base import Count, FinishReason, Index, Part, Text, Version

Blob = Annotated[bytes, Meta(max_length=2**24)]


class SlotRef(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One sample's place in the token cache; the generation catches a reader with an old reference."""

    slot: Index
    generation: Count


class Sampling(Part):
    """How tokens are drawn. ``temperature`` 0 is not a value: greedy decoding is ``greedy=True``."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    max_new_tokens: Index
    greedy: bool = False
    top_k: Index = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    seed: Count = 0


class GenerateItem(Part):
    """One sample to generate. ``sample`` is its index within the step: it decides row and random numbers."""

    ref: SlotRef
    sample: Index


class ScoreItem(Part):
    """One response to score; the row's own ground truth and metadata go along as the JSON that they are."""

    ref: SlotRef
    prompt: Text
    ground_truth: Blob
    metadata: Blob
    source: Text


class FinishedSample(Part):
    """A sample whose last token has been written."""

    ref: SlotRef
    length: Index
    finish_reason: FinishReason
    version_low: Version
    version_high: Version


class Score(Part):
    """The scorers' outcome for one sample: ``reward`` is the weighted sum, ``accuracy`` the first scorer's own score.

    ``error`` is set, and both numbers are 0, where the sample could not be scored.
    """

    ref: SlotRef
    reward: float
    accuracy: float
    error: Text = ""
