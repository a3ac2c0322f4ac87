"""What all messages and their parts have in common."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

PROTOCOL = 3
"""Both sides must speak the same protocol version."""

Role = Literal["rollout", "reward", "critic", "trainer", "holder"]
Transport = Literal["alias", "copy"]
Phase = Literal["GENERATE", "SCORE", "EVALUATE", "ADVANTAGE", "UPDATE", "PUBLISH", "CHECKPOINT"]
FinishReason = Literal["stop", "length"]
NO_STATE = -1
FailureKind = Literal["error", "stale"]
"""``stale``: the lease asks for weights or slots that are no longer, or not yet, what it names."""


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages. ``epoch`` counts the coordinators of a run; 0 means not yet known."""

    epoch: int


class Part(Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what travels inside a message."""
