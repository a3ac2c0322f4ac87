"""What peers do wrong: told once for each, then counted; and how often each of them is answered. Bounded memory.

A line for each bad message would let one peer fill the disk, and an answer for each would let it fill the memory of the
coordinator, where answers wait for a peer that does not read.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

log = logging.getLogger("gate")

MOST_PEERS = 256
"""Peers that are told apart; what others do wrong is counted together."""
QUIET_S = 60.0
"""After so long without anything wrong a peer is forgotten."""
ANSWERS_AT_ONCE, ANSWERS_PER_S = 32, 32.0
"""A replica needs an answer to its Hello, two a second, and to its heartbeats."""
MOST_ANSWERED = 4096
SHOWN_CHARACTERS = 300
SHOWN_OF_IDENTITY = 8


@dataclass
class _Bad:
    who: str
    last: float
    count: int = 1


class Complaints:
    """Kept by the conversation for members and strangers alike, by peer."""

    def __init__(self) -> None:
        self._bad: dict[bytes, _Bad] = {}
        self._others = 0
        self._answers: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def note(self, peer: bytes, who: str, reason: str) -> None:
        """Logs the first thing that a peer does wrong, with the reason, and counts the others."""
        bad = self._bad.get(peer)
        if bad is not None:
            bad.count += 1
            bad.last = time.monotonic()
        elif len(self._bad) < MOST_PEERS:
            self._bad[peer] = _Bad(who, time.monotonic())
            log.error("refused what %s sent (told once, then counted): %s", who, printable(reason))
        else:
            self._others += 1
            if self._others == 1:
                log.error("more than %d peers send what is refused: those beyond are counted together", MOST_PEERS)

    def count(self, peer: bytes) -> int:
        """What this peer did wrong since it was last quiet."""
        bad = self._bad.get(peer)
        return 0 if bad is None else bad.count

    def may_answer(self, peer: bytes) -> bool:
        """Whether this peer gets an answer now; it has asked too often otherwise, and asks again."""
        now = time.monotonic()
        left, before = self._answers.pop(peer, (float(ANSWERS_AT_ONCE), now))
        left = min(float(ANSWERS_AT_ONCE), left + (now - before) * ANSWERS_PER_S)
        allowed = left >= 1
        self._answers[peer] = (left - 1 if allowed else left, now)
        if len(self._answers) > MOST_ANSWERED:
            self._answers.popitem(last=False)
        return allowed

    def left(self, peer: bytes) -> None:
        """The peer is gone: says how much it did wrong, and forgets it."""
        self._answers.pop(peer, None)
        bad = self._bad.pop(peer, None)
        if bad is not None and bad.count > 1:
            log.error("refused %d messages of %s in all", bad.count, bad.who)

    def sweep(self) -> None:
        """Forgets those that have been quiet for long: a stranger does not say that it leaves."""
        late = time.monotonic() - QUIET_S
        for peer in [peer for peer, bad in self._bad.items() if bad.last < late]:
            self.left(peer)

    def close(self) -> None:
        for peer in list(self._bad):
            self.left(peer)
        if self._others:
            log.error("refused %d messages of other peers in all", self._others)
            self._others = 0


def stranger_name(peer: bytes) -> str:
    """What a peer is called that is no member. Its identity is its alone to know, so only the start is shown."""
    return f"a stranger ({printable(peer.decode(errors='replace'))[:SHOWN_OF_IDENTITY]}…)"


def printable(text: str) -> str:
    """One line of bounded length, whatever a peer has put into it."""
    cut = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in cut)
