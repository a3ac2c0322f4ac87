"""A replica's requests for the memory of weight sets: asked in the worker thread, answered in the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Future

from common.config_values import Limit
from common.messages import Message, WeightsDenied, WeightsGranted, WeightsWanted
from common.service import ReplicaError


class WeightRequests:
    """Requests that the coordinator has not answered yet. All but ``ask`` belongs to the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[Message], None]) -> None:
        self._loop = loop
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[WeightsWanted, Future[WeightsGranted]]] = {}
        self._closed = ""

    def ask(self, name: str, gpu: str, nbytes: int, limit: Limit) -> WeightsGranted:
        """Worker thread: waits for the answer. Raises ReplicaError where it is a refusal, or late."""
        request = next(self._numbers)
        future: Future[WeightsGranted] = Future()
        wanted = WeightsWanted(epoch=0, request=request, name=name, gpu=gpu, nbytes=nbytes)
        self._loop.call_soon_threadsafe(self._open, wanted, future)
        try:
            return future.result(limit.seconds)
        except TimeoutError:
            place = f" on {gpu}" if gpu else ""
            what = f"{nbytes} bytes{place} to write it" if nbytes else f"a committed version{place}"
            raise ReplicaError(
                f"weight set {name!r}: waited {limit.seconds:g} s ({limit.keys}) for {what}, and the coordinator has "
                "not answered"
            ) from None
        finally:
            self._loop.call_soon_threadsafe(self._waiting.pop, request, None)

    def _open(self, wanted: WeightsWanted, future: Future[WeightsGranted]) -> None:
        if self._closed:
            future.set_exception(ReplicaError(self._closed))
            return
        self._waiting[wanted.request] = (wanted, future)
        self._send(wanted)

    def answer(self, message: WeightsGranted | WeightsDenied) -> None:
        """Takes an answer; one that nobody waits for any more, or that comes again, is dropped."""
        wanted, future = self._waiting.pop(message.request, (None, None))
        if wanted is None or future is None or future.done():
            return
        if isinstance(message, WeightsGranted):
            future.set_result(message)
        else:
            future.set_exception(ReplicaError(f"weight set {wanted.name!r} is refused: {message.reason}"))

    def repeat(self) -> None:
        """Asks again: the coordinator did not know this replica, and so has not kept what it asked."""
        for wanted, _ in self._waiting.values():
            self._send(wanted)

    def close(self, reason: str) -> None:
        """Nobody waits any longer than the replica lives."""
        self._closed = reason
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(ReplicaError(reason))
