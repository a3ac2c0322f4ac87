"""Every message travels as it is, and what is no message is refused with the name of what is wrong."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common import bus, messages
from common.messages import (
    Ack,
    Done,
    Generated,
    Heartbeat,
    Lease,
    Message,
    Score,
    Scores,
    SlotRef,
    ToCoordinator,
    ToReplica,
)

SLOW_MACHINE = [HealthCheck.too_slow]
INT64 = st.integers(-(2**63), 2**63 - 1)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: INT64,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
}
LARGEST_IN_TESTS = 1000
"""Lists that a limit cuts off only beyond this are not made that long."""


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Every value that a message type can hold, by its annotations."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{field.name: instances(field.type) for field in msgspec.structs.fields(kind)})
    if kind in PLAIN:
        return PLAIN[kind]
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin is Annotated:
        return within(*arguments)
    if origin is list:
        return st.lists(instances(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(instances(arguments[0]), instances(arguments[1]), max_size=3)
    if origin is tuple:
        return st.lists(instances(arguments[0]), max_size=3).map(tuple)
    if arguments and all(isinstance(argument, str) for argument in arguments):  # Literal
        return st.sampled_from(arguments)
    if arguments:
        return st.one_of([instances(argument) for argument in arguments])
    return st.none() if kind is type(None) else st.from_type(kind)


def within(kind: Any, limits: msgspec.Meta) -> st.SearchStrategy[Any]:
    """Values of a type that its limits allow, the limits themselves among them."""
    if kind is int:
        return st.integers(limits.ge, limits.le)  # pyright: ignore[reportArgumentType]
    if kind is float:
        return st.floats(limits.ge, limits.le)
    return instances(kind)


DIRECTIONS = {
    "to_coordinator": (ToCoordinator, bus.decode_to_coordinator),
    "to_replica": (ToReplica, bus.decode_to_replica),
}
CASES = [(direction, kind) for direction, (union, _) in DIRECTIONS.items() for kind in get_args(union)]


def decode(direction: str, frame: bytes) -> Any:
    return DIRECTIONS[direction][1](frame)


def encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def tree(message: Message) -> dict[str, Any]:
    return msgspec.msgpack.decode(bus.encode(message))


DONE = Done(epoch=1, work=7, result=Generated(samples=1, tokens=2), started=0.5, ended=1.5)


def test_every_message_type_belongs_to_a_direction() -> None:
    declared = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }
    assert declared == {kind for _, kind in CASES}


@pytest.mark.parametrize(
    ("direction", "kind"), CASES, ids=[f"{direction}-{kind.__name__}" for direction, kind in CASES]
)
@given(data=st.data())
@settings(max_examples=25, suppress_health_check=SLOW_MACHINE)
def test_round_trip(direction: str, kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(instances(kind))
    assert decode(direction, bus.encode(message)) == message


@pytest.mark.parametrize(
    ("direction", "kind"), CASES, ids=[f"{direction}-{kind.__name__}" for direction, kind in CASES]
)
@given(data=st.data())
@settings(max_examples=10, suppress_health_check=SLOW_MACHINE)
def test_an_unknown_field_is_named(direction: str, kind: type[Message], data: st.DataObject) -> None:
    frame = encode(tree(data.draw(instances(kind))) | {"surplus": 1})
    bad = decode(direction, frame)
    assert isinstance(bad, bus.BadMessage)
    assert "surplus" in bad.reason
    assert bad.size == len(frame)


@pytest.mark.parametrize(
    ("direction", "kind"), CASES, ids=[f"{direction}-{kind.__name__}" for direction, kind in CASES]
)
@given(data=st.data())
@settings(max_examples=10, suppress_health_check=SLOW_MACHINE)
def test_a_wrong_type_or_a_missing_field_is_named(direction: str, kind: type[Message], data: st.DataObject) -> None:
    whole = tree(data.draw(instances(kind)))
    required = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
    name = data.draw(st.sampled_from(required))
    wrong = decode(direction, encode(whole | {name: {"no": {"such": "type"}}}))
    assert isinstance(wrong, bus.BadMessage)
    assert name in wrong.reason
    del whole[name]
    missing = decode(direction, encode(whole))
    assert isinstance(missing, bus.BadMessage)
    assert name in missing.reason


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"type": "Nonsense"}, "Nonsense"),
        ({"type": 3}, "type"),
        ({"work": "seven"}, "$.work"),
        ({"work": 1.5}, "$.work"),
        ({"work": b"7"}, "$.work"),
        ({"epoch": None}, "$.epoch"),
        ({"result": {"type": "Generated", "samples": 1}}, "tokens"),
        ({"result": {"type": "Heartbeat", "epoch": 1, "sent": 0.0}}, "Heartbeat"),
        ({"result": [1, 2]}, "$.result"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], named: str) -> None:
    frame = tree(DONE) | change
    bad = decode("to_coordinator", encode(frame))
    assert isinstance(bad, bus.BadMessage)
    assert named in bad.reason


def test_a_message_of_the_other_direction_is_refused() -> None:
    for direction, kind in CASES:
        other = next(name for name in DIRECTIONS if name != direction)
        if kind in get_args(DIRECTIONS[other][0]):
            continue
        bad = decode(other, encode({"type": kind.__name__, "epoch": 1}))
        assert isinstance(bad, bus.BadMessage)
        assert kind.__name__ in bad.reason


@given(cut=st.integers(0, len(bus.encode(DONE)) - 1))
def test_a_truncated_message_is_refused(cut: int) -> None:
    frame = bus.encode(DONE)[:cut]
    assert decode("to_coordinator", frame) == bus.BadMessage("Input data was truncated", cut)


def test_bytes_after_the_message_are_refused() -> None:
    assert isinstance(decode("to_coordinator", bus.encode(DONE) + b"\x00"), bus.BadMessage)


@given(frame=st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91" * 100_000)
@example(b"\x81\xa4type\xa3Ack" + b"\x81" * 50_000)
def test_random_bytes_are_refused_both_ways(frame: bytes) -> None:
    for direction in DIRECTIONS:
        assert isinstance(decode(direction, frame), bus.BadMessage)


@given(place=st.integers(0, len(bus.encode(DONE)) - 1), byte=st.integers(0, 255))
def test_a_flipped_byte_is_another_message_or_none_and_never_an_exception(place: int, byte: int) -> None:
    frame = bytearray(bus.encode(DONE))
    frame[place] = byte
    found = decode("to_coordinator", bytes(frame))
    assert isinstance(found, bus.BadMessage | Done)


def test_text_that_is_no_utf8_is_refused() -> None:
    frame = bus.encode(messages.Failed(epoch=1, work=1, kind="error", message="abcdef"))
    bad = decode("to_coordinator", frame.replace(b"abcdef", b"\xff\xfe\xfd\xfc\xfb\xfa"))
    assert isinstance(bad, bus.BadMessage)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_unpickles(tmp_path: Path, protocol: int) -> None:
    bomb = tmp_path / "exploded"
    frame = pickle.dumps(Bomb(bomb), protocol)
    for direction in DIRECTIONS:
        assert isinstance(decode(direction, frame), bus.BadMessage)
        inside = encode({"type": "Heartbeat", "epoch": 1, "sent": frame})
        assert isinstance(decode(direction, inside), bus.BadMessage)
    assert not bomb.exists()


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        DONE.work = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_nan_travels_as_nan() -> None:
    """The collection refuses such a reward; the wire must not turn it into something else."""
    score = Score(ref=SlotRef(1, 3), reward=math.nan, accuracy=0.0)
    found = decode("to_coordinator", bus.encode(msgspec.structs.replace(DONE, result=Scores(scores=[score]))))
    assert math.isnan(found.result.scores[0].reward)


def test_a_lease_of_256_samples_stays_small() -> None:
    items = [messages.GenerateItem(ref=SlotRef(slot, 2**40 + 1), sample=slot) for slot in range(256)]
    task = messages.Generate(items=items, sampling=messages.Sampling(temperature=1.0, max_new_tokens=16), version=3)
    lease = Lease(epoch=1, work=1, step=1, phase="GENERATE", deadline_s=600.0, task=task)
    assert len(bus.encode(lease)) < 256 * 60
    assert decode("to_replica", bus.encode(lease)) == lease


def test_both_directions_know_heartbeats_and_only_replicas_are_sent_an_ack() -> None:
    for direction in DIRECTIONS:
        assert decode(direction, bus.encode(Heartbeat(epoch=1, sent=2.0))) == Heartbeat(epoch=1, sent=2.0)
    ack = Ack(epoch=1, work=3)
    assert decode("to_replica", bus.encode(ack)) == ack
    assert isinstance(decode("to_coordinator", bus.encode(ack)), bus.BadMessage)
