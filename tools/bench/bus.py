"""How fast the bus is: a real Router here, a real Dealer in another process, messages of a Done's size between them."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from common import bus
from common.messages import Ack, Done, Generated, Hello, Message, Stop

ROOT = Path(__file__).resolve().parents[2]
BURST = 20_000
ROUND_TRIPS = 3_000
LIMIT_S = 60.0


def figures() -> dict[str, float]:
    """A Router and a Dealer in two processes over ipc, both on uvloop, with encoding and decoding. `messages_per_s`:
    20,000 Done messages sent in one go, from the first received to the last. `one_way_us`: from just before a Done
    is encoded by its sender to when the receiver has it decoded, while nothing else travels, median of 3,000.
    `round_trip_us`: Ack there, Done back, median and 99th percentile of the same 3,000.
    """
    with tempfile.TemporaryDirectory(prefix="quartet-bench-") as folder:
        return uvloop.run(asyncio.wait_for(measure(f"ipc://{folder}/bus.sock"), LIMIT_S))


async def measure(endpoint: str) -> dict[str, float]:
    router = bus.Router(endpoint)
    command = [sys.executable, "-m", "tools.bench.bus", endpoint]
    peer = subprocess.Popen(command, cwd=ROOT)  # noqa: ASYNC220 - nothing else is on this loop yet
    try:
        identity, _ = await router.receive()
        rate = await burst(router, identity)
        one_way, there_and_back = await ping(router, identity)
        router.send(identity, Stop(epoch=1, reason="measured"))
        await asyncio.to_thread(peer.wait, LIMIT_S)
    finally:
        peer.kill()
        peer.wait()
        router.close()
    return {
        "messages_per_s": rate,
        "message_bytes": float(len(bus.encode(done(0)))),
        "one_way_us": statistics.median(one_way) * 1e6,
        "round_trip_us": statistics.median(there_and_back) * 1e6,
        "round_trip_p99_us": statistics.quantiles(there_and_back, n=100)[98] * 1e6,
    }


async def burst(router: bus.Router, peer: bytes) -> float:
    router.send(peer, Ack(epoch=1, work=BURST))
    await router.receive()
    started = time.perf_counter()
    for _ in range(BURST - 1):
        _, message = await router.receive()
        require_done(message)
    return (BURST - 1) / (time.perf_counter() - started)


async def ping(router: bus.Router, peer: bytes) -> tuple[list[float], list[float]]:
    one_way: list[float] = []
    there_and_back: list[float] = []
    for _ in range(ROUND_TRIPS):
        sent = time.monotonic()
        router.send(peer, Ack(epoch=1, work=1))
        _, message = await router.receive()
        received = time.monotonic()
        one_way.append(received - require_done(message).ended)
        there_and_back.append(received - sent)
    return one_way, there_and_back


def require_done(message: Message | bus.BadMessage) -> Done:
    if not isinstance(message, Done):
        raise TypeError(f"expected a Done, received {message}")
    return message


def done(work: int) -> Done:
    result = Generated(samples=64, tokens=512)
    return Done(epoch=1, work=work, result=result, started=time.monotonic(), ended=time.monotonic())


async def answer(endpoint: str) -> None:
    """The other process: answers Ack(work=n) with n Done messages until Stop."""
    dealer = bus.Dealer(endpoint, "bench")
    hello = Hello(
        epoch=0, role="reward", replica=0, identity="bench", protocol=1, host="", pid_space="", pid=0, pid_start=0
    )
    dealer.send(hello)
    while not isinstance(message := await dealer.receive(), Stop):
        if isinstance(message, Ack):
            for work in range(message.work):
                dealer.send(done(work))
    dealer.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(asyncio.wait_for(answer(sys.argv[1]), LIMIT_S))
