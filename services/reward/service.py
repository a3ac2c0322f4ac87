"""The reward service: a lease of finished samples in, one score for each of them out.

    lease -> response_ids from the token cache -> text -> every scorer -> weighted sum -> Scores

A sample that cannot be scored travels back with an error, never with a reward of 0.
"""

from __future__ import annotations

import logging
import time

from common import cache_access
from common.config_values import reward_functions
from common.messages import Lease, Manifest, Receipt, Score, ScoreBatch, ScoreItem, Scores
from common.models import resolve_model
from common.service import Assignment, LeaseFailed, Outbox, WrongSetup
from common.token_cache import CacheError
from common.tokenizer import load_tokenizer
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.interface import Batch, SampleScores, Scorer, ScorerError

log = logging.getLogger("reward")

DEADLINE_SHARE = 0.9
"""Part of the lease's time that scoring may take; the rest is for the way there and back."""
FLOAT32_MAX = 3.4028234663852886e38
"""Rewards lie in the token cache as float32."""
SHOWN_CHARACTERS = 120
"""Longest piece of a prompt or response that an error quotes."""


class RewardService:
    """A ``common.service.Service``. Reads the token cache and writes nothing."""

    def __init__(self, assignment: Assignment) -> None:
        config = assignment.config
        self.config = config
        self.tokenizer = load_tokenizer(resolve_model(config.model.path))
        self.cache = cache_access.attach_cache(assignment, self.tokenizer.fingerprint)
        functions = reward_functions(config)
        self.weights = [entry.weight for entry in functions]
        short = bool(config.reward.function)
        keys = [
            "reward.function" if short else f"reward.functions[{index}].function" for index in range(len(functions))
        ]
        self.scorer: Scorer = FunctionScorer(functions, keys, limit_s=config.reward.timeout_s)

    def ready(self) -> None:
        """Starts the scorer; raises WrongSetup where a function cannot be loaded."""
        try:
            self.scorer.start(time.monotonic() + self.config.timeouts.start)
        except ScorerError as error:
            raise WrongSetup(str(error)) from error

    def state(self) -> int:
        return 0

    def handle(self, lease: Lease, outbox: Outbox) -> Scores:
        """Scores a batch; raises LeaseFailed where its slots are stale or the scorer cannot be started again."""
        if not isinstance(lease.task, ScoreBatch):
            raise LeaseFailed(
                "error", f"the reward service was leased a {type(lease.task).__name__}; it takes ScoreBatch"
            )
        deadline = time.monotonic() + DEADLINE_SHARE * lease.deadline_s
        items = lease.task.items
        batch = self.read(items)
        try:
            outcomes = self.scorer.score(batch, deadline)
        except ScorerError as error:
            raise LeaseFailed("error", str(error)) from error
        scores = [
            score_of(item, response, outcome, self.weights)
            for item, response, outcome in zip(items, batch.responses, outcomes, strict=True)
        ]
        failed = [score for score in scores if score.error]
        if failed:
            log.warning(
                "work %d: %d of %d samples not scored; %s", lease.work, len(failed), len(scores), failed[0].error
            )
        return Scores(scores=scores)

    def read(self, items: list[ScoreItem]) -> Batch:
        """The texts to score; raises LeaseFailed where a slot belongs to another sample by now."""
        try:
            ids = self.cache.views("response_ids", [item.ref for item in items])
        except CacheError as error:
            raise LeaseFailed("stale", str(error)) from error
        return Batch(
            prompts=[item.prompt for item in items],
            responses=[self.tokenizer.decode(row.tolist()) for row in ids],
            ground_truths=[item.ground_truth for item in items],
            metadata=[item.metadata for item in items],
            sources=[item.source for item in items],
        )

    def apply_weights(self, manifest: Manifest) -> Receipt:
        raise LeaseFailed("error", f"the reward service runs no policy; it was told to apply {manifest.label}")

    def cache_counts(self) -> tuple[int, int]:
        return cache_access.take_counts(self.cache)

    def close(self) -> None:
        self.scorer.close()
        self.cache.close()


def score_of(item: ScoreItem, response: str, outcome: SampleScores, weights: list[float]) -> Score:
    """The weighted sum of the functions' scores, and the first one's own score as accuracy; or what went wrong."""
    if isinstance(outcome, str):
        where = f"slot {item.ref.slot}, prompt {shorten(item.prompt)}, response {shorten(response)}"
        return Score(ref=item.ref, reward=0.0, accuracy=0.0, error=f"{outcome} ({where})")
    reward = sum(weight * score for weight, score in zip(weights, outcome, strict=True))
    if not abs(reward) <= FLOAT32_MAX:
        error = f"the weighted sum of the scores {outcome} is {reward}, more than float32 holds: scale it down"
        return Score(ref=item.ref, reward=0.0, accuracy=0.0, error=error)
    return Score(ref=item.ref, reward=reward, accuracy=outcome[0])


def shorten(text: str) -> str:
    """The end of a long text, quoted: that is where a prompt has its question and a response its answer."""
    return repr(text) if len(text) <= SHOWN_CHARACTERS else f"…{text[-SHOWN_CHARACTERS:]!r}"
