"""The fuzzers, shortened; and that they find what they look for."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import pytest

from common import bus
from common.messages import Ack, Heartbeat, ToCoordinator, ToReplica
from tools.fuzz.cache import fuzz_cache
from tools.fuzz.checkpoints import fuzz_checkpoints
from tools.fuzz.frames import fuzz_frames
from tools.fuzz.isolation import try_all
from tools.fuzz.mutation import Mutator
from tools.fuzz.report import Result, Tally
from tools.fuzz.samples import messages
from tools.fuzz.weights import fuzz_weights

FRAMES = 30_000
SEED = 11


def assert_sound(result: Result, cases: int) -> None:
    assert result.failures == []
    assert result.failed == 0
    assert result.cases >= cases, "the fuzzer has tried what it says"


def test_frames() -> None:
    result = fuzz_frames(FRAMES, SEED)
    assert_sound(result, FRAMES)
    for side in ("coordinator", "replica"):
        assert result.outcomes[f"{side}: no message"] > FRAMES / 4
        assert result.outcomes[f"{side}: a message"] > FRAMES / 100
    assert min(result.outcomes["gate: refused"], result.outcomes["gate: let through"]) > 100


def test_token_cache() -> None:
    result = fuzz_cache(SEED, step=5)
    assert_sound(result, 1000)
    for outcome in ("refused", "told by check()", "nothing to tell", "taken over", "not taken over"):
        assert result.outcomes[outcome] > 50, outcome


def test_weights() -> None:
    result = fuzz_weights(SEED, step=4)
    assert_sound(result, 400)
    assert min(result.outcomes["refused"], result.outcomes["accepted"]) > 50


def test_checkpoints() -> None:
    result = fuzz_checkpoints(SEED, step=23)
    assert_sound(result, 1000)
    for outcome in ("refused", "right", "resealed: refused", "resealed: right", "resealed: other numbers"):
        assert result.outcomes[outcome] > 5, outcome


def test_the_same_seed_makes_the_same_frames() -> None:
    frames = [bus.encode(Ack(epoch=1, work=2)), bus.encode(Heartbeat(epoch=1, sent=0.5))]
    first, second, other = (Mutator(seed, frames) for seed in ("a", "a", "b"))
    made = [first.frame() for _ in range(200)]
    assert made == [second.frame() for _ in range(200)]
    assert made != [other.frame() for _ in range(200)]


def test_mutation_starts_from_messages_that_are_right() -> None:
    for message in messages(ToCoordinator):
        assert bus.decode_to_coordinator(bus.encode(message)) == message
    for message in messages(ToReplica):
        assert bus.decode_to_replica(bus.encode(message)) == message


class Misbehaving:
    """Its third case kills, hangs, leaves or fails; or reports what is wrong."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 6

    def name(self, number: int) -> str:
        return f"case {number}"

    def attempt(self, number: int, tally: Tally) -> None:
        if number != 2:
            return
        match self.how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "leave":
                os._exit(3)
            case "raise":
                raise IndexError("beyond the end")
            case "slow":
                time.sleep(1.5)  # what is looked for: the tally allows less
            case _:
                tally.fail(self.name(number), "wrong data")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("kill", "kills its process by SIGKILL"),
        ("leave", "ends its process with exit code 3"),
        ("raise", "IndexError: beyond the end"),
        ("slow", "allowed 1 s"),
        ("tell", "wrong data"),
    ],
)
def test_what_goes_wrong_in_a_case_is_found_and_the_others_are_tried(how: str, found: str) -> None:
    tally = Tally("none", 1, 1.0)
    try_all(lambda: Misbehaving(how), tally)
    result = tally.result()
    assert result.failed == 1
    (failure,) = result.failures
    assert failure.case == "case 2"
    assert found in failure.what
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
