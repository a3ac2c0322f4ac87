"""Answers that are sent again until the coordinator acknowledges them."""

from __future__ import annotations

import time

import msgspec

from common.messages import Message


def stamped(message: Message, epoch: int) -> Message:
    """The same message under the epoch of the coordinator that it goes to now."""
    return message if message.epoch == epoch else msgspec.structs.replace(message, epoch=epoch)


class Unacknowledged:
    """Keeps messages by the work that they answer. One acknowledgement of a work covers all that was said about it."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._sent: dict[tuple[int, str], tuple[float, Message]] = {}

    def add(self, work: int, message: Message) -> None:
        self._sent[work, type(message).__name__] = (time.monotonic(), message)

    def acknowledge(self, work: int) -> None:
        for key in [key for key in self._sent if key[0] == work]:
            del self._sent[key]

    def works(self) -> list[int]:
        """Work that is finished and not acknowledged, in the order in which it was finished."""
        return list(dict.fromkeys(work for work, _ in self._sent))

    def due(self, older_than_s: float | None = None) -> list[Message]:
        """Messages whose last sending is ``older_than_s`` (default: the interval) ago; they count as sent now."""
        now = time.monotonic()
        limit = self.interval_s if older_than_s is None else older_than_s
        due = [key for key, (sent, _) in self._sent.items() if now - sent >= limit]
        for key in due:
            self._sent[key] = (now, self._sent[key][1])
        return [self._sent[key][1] for key in due]
