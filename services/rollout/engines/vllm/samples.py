"""Finished samples on their way from vLLM's loop to the thread that waits for them."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np

from common.messages import FinishReason
from services.rollout.engines.interface import EngineError, Request, Response

Finished = queue.SimpleQueue[Response | BaseException]
"""Samples in the order in which they ended; an error is the last."""
REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


def next_finished(finished: Finished, limit: float) -> list[Response]:
    """Waits for the next finished sample and takes all that have ended by then. An error is raised in its turn.

    Raises queue.Empty after ``limit`` seconds without any.
    """
    responses: list[Response] = []
    item = finished.get(timeout=limit)
    while not isinstance(item, BaseException):
        responses.append(item)
        if finished.empty():
            return responses
        item = finished.get_nowait()
    if not responses:
        raise item
    finished.put(item)
    return responses


def response_of(request: Request, completion: Any) -> Response:
    """A finished sample from vLLM's completion. Raises EngineError for one without a logprob for each token."""
    ids, logprobs = completion.token_ids, completion.logprobs
    values = [] if logprobs is None else logprobs.logprobs
    reason = REASONS.get(completion.finish_reason)
    if reason is None or len(values) != len(ids):
        raise EngineError(
            f"sample {request.sample}: vLLM ended it with {completion.finish_reason!r}, {len(ids)} tokens and "
            f"{len(values)} logprobs"
        )
    return Response(request.index, np.array(ids, np.int32), np.array(values, np.float32), reason)
