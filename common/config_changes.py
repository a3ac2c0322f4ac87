"""Which keys of a run's config may change when it is continued, and which differences keep it from being.

A continued run must be the run that it would have been without the interruption. So a key may change only if no number
of any step depends on it; everything else belongs to the run's identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, cast

import msgspec
from msgspec import Struct

from common.config import Config
from common.config_values import has_critic

MAY_CHANGE = {
    "run.directory": "where the files lie; they may have been moved",
    "rollout.replicas": "how many processes share the work",
    "rollout.sleep": "when memory is given back",
    "rollout.warn_difference": "a bound on what is measured",
    "rollout.stop_difference": "a bound on what is measured",
    "rollout.vllm.start_timeout": "a deadline",
    "rollout.vllm.kv_cache_mib": "memory; an engine that does not fit any more must be able to get less",
    "rollout.vllm.gpu_memory_utilization": "memory, likewise",
    "reward.replicas": "how many processes share the work",
    "reward.timeout_s": "a deadline; a scorer that was too slow is why many a run is interrupted",
    "reward.attempts": "how often a scorer that fails is tried",
    "eval.every": "how often is measured; training does not depend on it",
    "checkpoint": "what is kept on disk",
    "restart": "who is started again",
    "weights": "how the same bytes travel",
    "bus": "how messages travel",
    "cache": "how much memory is reserved",
    "timeouts": "deadlines",
    "log": "what is written down",
}
"""Keys, or whole sections, and why no number depends on them."""

STEPS = "run.steps"
"""May grow, where the learning rate does not depend on it."""


class Difference(Struct, frozen=True):
    """A key that has another value than before. ``was`` or ``now`` is None where the key is not there."""

    key: str
    was: Any
    now: Any
    why: str = ""
    """What keeps it from changing, if that is not plain."""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.key}: was {shown(self.was)}, now {shown(self.now)}{why}"


def changes(earlier: Config, now: Config) -> list[Difference]:
    """Every key in which two configs differ."""
    was, new = flat(earlier), flat(now)
    return [Difference(key, was.get(key), new.get(key)) for key in {**was, **new} if was.get(key) != new.get(key)]


def misfits(earlier: Config, now: Config) -> list[Difference]:
    """The differences that keep a run with config ``earlier`` from being continued with ``now``; none: it fits."""
    found: list[Difference] = []
    for change in changes(earlier, now):
        if change.key == STEPS:
            why = steps_obstacle(earlier, change.was, change.now)
            found += [msgspec.structs.replace(change, why=why)] if why else []
        elif not may_change(change.key):
            found.append(change)
    return found


def identity_digest(config: Config) -> str:
    """Hex digest over the keys that may not change: two configs with the same one give the same steps."""
    fixed = {key: value for key, value in flat(config).items() if key != STEPS and not may_change(key)}
    return hashlib.sha256(msgspec.json.encode(fixed, order="deterministic")).hexdigest()


def may_change(key: str) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:length]) in MAY_CHANGE for length in range(1, len(parts) + 1))


def steps_obstacle(config: Config, was: int, now: int) -> str:
    """Why ``run.steps`` may not change like that; empty if it may."""
    if now < was:
        return "it may only grow"
    learners = {"trainer": config.trainer, **({"critic": config.critic} if has_critic(config) else {})}
    for name, learner in learners.items():
        if learner.optimizer.schedule != "constant":
            key = f"{name}.optimizer.schedule"
            return f"{key} = {learner.optimizer.schedule}: the steps before would have had other learning rates"
    return ""


def flat(config: Config) -> dict[str, Any]:
    """Values by dotted key; a list is one value."""
    return dict(_leaves(msgspec.to_builtins(config), ""))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in cast("dict[str, Any]", value).items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def shown(value: Any) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()
