"""The other process of the round trip: maps each buffer by its handle and writes to it.

It reads a JSON list of ``Offer`` and prints a JSON list of what was in the way, one text for each, empty where nothing.
"""

from __future__ import annotations

import sys

import msgspec

from tools.doctor.memory import Offer, fill


def main(offers: bytes) -> str:
    return msgspec.json.encode([fill(offer) for offer in msgspec.json.decode(offers, type=list[Offer])]).decode()


if __name__ == "__main__":
    print(main(sys.stdin.buffer.read()))
