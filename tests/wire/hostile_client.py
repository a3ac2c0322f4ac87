"""A client that does all the harm that it can to a coordinator's socket, until it is told to stop by its input's end.

    hostile_client.py ENDPOINT SEED

Prints one JSON object at its end: how often it did what.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import uuid
from collections import Counter
from collections.abc import Callable

import zmq

from common import bus
from common.messages import (
    PROTOCOL,
    Ack,
    Done,
    Evaluated,
    Failed,
    FinishedSample,
    Heartbeat,
    Hello,
    Manifest,
    Message,
    Proof,
    Ready,
    Receipt,
    Role,
    SamplesFinished,
    Score,
    Scores,
    SlotRef,
    StateSaved,
    TensorEntry,
    UpdateBegun,
    UpdateCommitted,
    WeightsApplied,
    WeightsProved,
)
from common.processes import process_start

BATCH = 200
PAUSE_S = 0.02
"""Messages between two looks at whether to stop."""


class Hostile:
    """One process with as many connections as it likes."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.endpoint = endpoint
        self.random = random.Random(seed)
        self.context = zmq.Context()
        self.counts: Counter[str] = Counter()
        self.member = self.connect("member")
        self.stranger = self.connect("stranger")

    def connect(self, name: str) -> tuple[zmq.Socket[bytes], str]:
        identity = f"{name}-{uuid.uuid4()}"
        made = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.IDENTITY, identity.encode())
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDTIMEO, 2000)
        made.connect(self.endpoint)
        return made, identity

    def hello(self, identity: str, role: Role = "reward", epoch: int = 0) -> Hello:
        pid = os.getpid()
        return Hello(
            epoch=epoch, role=role, replica=77, identity=identity, protocol=PROTOCOL, host="elsewhere",
            pid_space="elsewhere", pid=pid, pid_start=process_start(pid),
        )  # fmt: skip

    def send(self, made: zmq.Socket[bytes], *frames: bytes) -> None:
        try:
            made.send_multipart(frames)
        except zmq.Again:
            self.counts["not taken"] += 1

    # ------------------------------------------------------------ what it does

    def garbage(self) -> None:
        for _ in range(BATCH):
            self.send(self.stranger[0], self.random.randbytes(self.random.choice((0, 1, 7, 300, 5000))))

    def parts(self) -> None:
        for count in (0, 2, 3, 50, 2000):
            self.send(self.stranger[0], *[b"part"] * (count + 1))

    def unknown(self) -> None:
        """Messages of one who has not said Hello; nobody reads the answers."""
        frame = bus.encode(Heartbeat(epoch=1, sent=0.0))
        for _ in range(BATCH):
            self.send(self.stranger[0], frame)

    def huge(self) -> None:
        """Larger than any frame may be. The connection is lost, so it is one of its own."""
        made, _ = self.connect("huge")
        self.send(made, bytes(bus.LARGEST_TO_COORDINATOR + 1))
        made.poll(1000)
        made.close()

    def hellos(self) -> None:
        """Changing identities; a second trainer, an identity that is not its own, a future epoch, another protocol."""
        for _ in range(10):
            made, identity = self.connect("hello")
            wrong = self.random.randrange(4)
            said = [
                self.hello(identity, "trainer"), self.hello(str(uuid.uuid4())), self.hello(identity, epoch=99),
                self.hello("somebody"),
            ]  # fmt: skip
            self.send(made, bus.encode(said[wrong]))
            made.poll(50)  # for the answer, which comes at once where there is one
            made.close()

    def forged(self) -> None:
        """As a member, what this member never may say: answers to others' work, another role's words."""
        made, identity = self.member
        self.send(made, bus.encode(self.hello(identity)))
        for message in lies(self.random):
            self.send(made, bus.encode(message))

    def past_and_future(self) -> None:
        for epoch in (0, 2, 2**40):
            self.send(self.member[0], bus.encode(Done(epoch=epoch, work=1, result=RESULT, started=0.0, ended=0.0)))

    def run(self) -> None:
        deeds: list[Callable[[], None]] = [
            self.garbage, self.parts, self.unknown, self.hellos, self.forged, self.past_and_future,
        ]  # fmt: skip
        for deed in (self.huge, *deeds):
            deed()
            self.counts[deed.__name__] += 1
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            deed = self.random.choice(deeds)
            deed()
            self.counts[deed.__name__] += 1
        print(json.dumps(self.counts), flush=True)
        self.context.destroy(linger=0)


RESULT = Evaluated(tokens=3)


def lies(chance: random.Random) -> list[Message]:
    """What a reward replica that was given nothing may not say."""
    work, ref = chance.choice((1, 2, 3, 17, 2**40)), SlotRef(chance.choice((0, 5, 2**31 - 1)), chance.choice((1, 3)))
    tensor = TensorEntry(name="../../x", dtype="float32", shape=(2**60,), offset=2**60)
    manifest = Manifest(
        name="policy", version=chance.randrange(9), path="/etc/passwd", identity="x", gpu="", nbytes=1,
        tensors=(tensor,),
    )  # fmt: skip
    receipt = Receipt(transport="alias", identity="x", offsets=(), checksums=(), canary_logprobs=())
    proof = Proof(version=2**31 - 1, checksums=(), canary_logprobs=())
    sample = FinishedSample(ref=ref, length=2**31 - 1, finish_reason="stop", version_low=0, version_high=0)
    scores = Scores(scores=[Score(ref=ref, reward=float("nan"), accuracy=0.0)])
    return [
        Done(epoch=1, work=work, result=RESULT, started=0.0, ended=1.0),
        Done(epoch=1, work=work, result=scores, started=0.0, ended=1.0),
        Failed(epoch=1, work=work, kind="stale", message="forged"),
        SamplesFinished(epoch=1, work=work, samples=[sample]),
        UpdateBegun(epoch=1, version=5),
        UpdateCommitted(epoch=1, work=work, manifest=manifest),
        WeightsProved(epoch=1, proof=proof),
        WeightsApplied(epoch=1, work=work, version=0, receipt=receipt),
        StateSaved(epoch=1, step=1, nbytes=1, seconds=0.0),
        Ready(epoch=1, manifest=manifest, proof=proof),
        Ack(epoch=1, work=work),
        Heartbeat(epoch=1, sent=0.0),
    ]


if __name__ == "__main__":
    Hostile(sys.argv[1], int(sys.argv[2])).run()
