"""A replica that takes part in the run, as the coordinator knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from common.messages import NO_STATE, Hello, Role


@dataclass
class Member:
    """A replica that has said Hello and lives."""

    peer: bytes
    hello: Hello
    heard: float
    ready: bool = False
    version: int = -1
    """Policy version that its receipt proved; -1: none (only rollout replicas have one)."""
    state: int = NO_STATE
    """Of a trainer or critic: the step after which its weights and optimizer are as they are."""
    leases: set[int] = field(default_factory=set[int])
    """Work that it was given and has not answered, work whose lease ran out included."""
    granted_gpu: str = ""
    """UUID of the GPU on which it was granted weights while it started: it takes of that memory until it is ready."""
    pidfd: int = -1
    """-1 where its process cannot be watched from here: then its connection alone tells of its death."""
    gone: asyncio.TimerHandle | None = None
    """Set while its connection is gone and its process has not ended yet."""
    last_words: str = ""
    leaving: bool = False
    """It takes no more work, and ends when it has answered what it holds."""
    ended: bool = False
    """Its process has ended, and what it sent before may still be unread."""

    @property
    def there(self) -> bool:
        return self.ready and self.gone is None and not (self.ended or self.leaving)

    @property
    def state_word(self) -> Literal["starting", "waiting", "working"]:
        return "starting" if not self.ready else "working" if self.leases else "waiting"

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def name(self) -> str:
        return f"{self.hello.role} {self.hello.replica}"
