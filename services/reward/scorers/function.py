"""Scores by Python functions, built in or the user's, in a child process that is killed when it takes too long.

A child that hangs or dies on a batch is killed and started again, and then gets each sample alone: the sample on which
it hangs or dies once more has an error, and the next one gets a new child.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from common.config import RewardFunctionConfig
from services.reward.child_process import ChildError, ChildProcess
from services.reward.scorers.interface import Batch, SampleScores
from services.reward.wire import FunctionSpec

log = logging.getLogger("reward")

SHORTEST_TRY_S = 0.01
"""A sample is not tried again where less time than this is left."""


class FunctionScorer:
    """All functions of a config, called one after the other on each batch, in one child process.

    ``keys`` are the config keys of the functions, for errors. ``limit_s`` is the time limit of one batch.
    """

    def __init__(self, functions: Sequence[RewardFunctionConfig], keys: Sequence[str], limit_s: float) -> None:
        specs = [spec_of(entry, key) for entry, key in zip(functions, keys, strict=True)]
        self.limit_s = limit_s
        self.child = ChildProcess(specs)

    def start(self, deadline: float) -> None:
        try:
            self.child.load(deadline)
        except ChildError as error:
            raise error.while_loading() from error

    def score(self, batch: Batch, deadline: float) -> list[SampleScores]:
        if not len(batch):
            return []
        try:
            return self.once(batch, self.limit_s, deadline)
        except ChildError as error:
            if len(batch) == 1:
                return [str(error)]
            log.warning("a batch of %d samples: %s; now each sample alone", len(batch), error)
            return self.one_by_one(batch, deadline)

    def one_by_one(self, batch: Batch, deadline: float) -> list[SampleScores]:
        """Each sample alone. No sample takes more than half of the time that is left, so that others get theirs."""
        outcomes: list[SampleScores] = []
        for index in range(len(batch)):
            left = deadline - time.monotonic()
            if left < SHORTEST_TRY_S:
                outcomes.append("not scored: its batch failed, and the lease left no time to score this sample alone")
                continue
            limit = left / 2 if index < len(batch) - 1 else left
            try:
                outcomes += self.once(batch.only(index), min(self.limit_s, limit), deadline)
            except ChildError as error:
                outcomes.append(str(error))
        return outcomes

    def once(self, batch: Batch, limit_s: float, deadline: float) -> list[SampleScores]:
        self.child.load(deadline)
        return self.child.score(batch, min(limit_s, deadline - time.monotonic()))

    def close(self) -> None:
        self.child.close()


def spec_of(entry: RewardFunctionConfig, key: str) -> FunctionSpec:
    """What the child needs to know of a function. Relative paths hold from where the service was started."""
    path, colon, function = entry.function.rpartition(":")
    name = f"{Path(path).absolute()}:{function}" if colon else entry.function
    return FunctionSpec(key=key, name=name, options=dict(entry.options))
