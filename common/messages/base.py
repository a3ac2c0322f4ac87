"""What all messages and their parts have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL = 5
"""Both sides must speak the same protocol version."""

Role = Literal["rollout", "reward", "critic", "trainer", "holder"]
Transport = Literal["alias", "copy"]
Phase = Literal["GENERATE", "SCORE", "EVALUATE", "ADVANTAGE", "UPDATE", "PUBLISH", "CHECKPOINT"]
FinishReason = Literal["stop", "length"]
NO_STATE = -1
ANY_REPLICA = -1
"""Of a replica that takes whatever number is free: docker compose gives the replicas of a service none."""


def number_text(replica: int) -> str:
    """A replica's number as texts have it."""
    return "?" if replica == ANY_REPLICA else str(replica)


FailureKind = Literal["error", "stale"]
"""``stale``: the lease asks for weights or slots that are no longer, or not yet, what it names."""

# Limits that every decoder checks: a number fits what it is written to (the token cache, SQLite, a torch size), a text
# or a list has a length that runs of any size stay well below, and a time is a number.
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""What may be negative: checksums, and offsets of which -1 says something."""
Count = Annotated[int, Meta(ge=0, le=2**62)]
"""Bytes, tokens, numbers of work and of epochs."""
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A place in a table, a step, a process."""
Version = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A policy version, or a step's state; -1: none."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
"""A span, or a time of the monotonic clock; never NaN."""
Name = Annotated[str, Meta(max_length=1024)]
"""Of a tensor, a host, a GPU."""
PathName = Annotated[str, Meta(max_length=4096)]
"""As long as the kernel takes (PATH_MAX)."""
Text = Annotated[str, Meta(max_length=2**24)]
"""For people, or a prompt."""


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages. ``epoch`` counts the coordinators of a run; 0 means not yet known."""

    epoch: Count


class Part(Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what travels inside a message."""
