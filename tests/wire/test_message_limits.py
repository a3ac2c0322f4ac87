"""Every number, text and list in a message has limits, and what is beyond them is refused by name."""

from __future__ import annotations

import math
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import bus
from common.messages import FinishedSample, Message, SamplesFinished, SlotRef
from tests.wire.test_messages import CASES, SLOW_MACHINE, decode, encode, instances, tree

UNLIMITED = {
    "Score.reward", "Score.accuracy", "UpdatePolicy.kl_coefficient", "Proof.canary_logprobs", "Receipt.canary_logprobs",
}  # fmt: skip
"""Numbers that may be anything, NaN too, which others look at."""


def structs_in(kind: Any) -> set[type[msgspec.Struct]]:
    """A message and all parts that may travel in it."""
    found: set[type[msgspec.Struct]] = set()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        found.add(kind)
        parts = [field.type for field in msgspec.structs.fields(kind)]
    else:
        parts = list(get_args(kind))
    return found.union(*map(structs_in, parts))


STRUCTS = set[type[msgspec.Struct]]().union(*(structs_in(kind) for _, kind in CASES))


def unlimited(kind: Any) -> bool:
    """Whether a value of this type may be of any size."""
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        inner, limits = arguments
        if inner in (int, float):
            return limits.ge is None or limits.le is None
        return limits.max_length is None or any(map(unlimited, get_args(inner)[:1]))
    if get_origin(kind) in (list, tuple, dict) or kind in (int, float, str, bytes):
        return True
    return any(unlimited(argument) for argument in arguments if not isinstance(argument, str))


def test_every_field_has_limits() -> None:
    found = {
        f"{kind.__name__}.{field.name}"
        for kind in STRUCTS
        for field in msgspec.structs.fields(kind)
        if unlimited(field.type)
    }
    assert found == UNLIMITED


def beyond(kind: Any) -> list[Any]:
    """Values just outside a number's limits, as far as the encoding has such numbers."""
    if get_origin(kind) is not Annotated or get_args(kind)[0] not in (int, float):
        return []
    number, limits = get_args(kind)
    if number is float:
        return [math.nan, math.inf, -math.inf, limits.ge - 1, limits.le * 2]
    return [value for value in (limits.ge - 1, limits.le + 1, 2**64 - 1) if -(2**63) <= value < 2**64]


@pytest.mark.parametrize(
    ("direction", "kind"), CASES, ids=[f"{direction}-{kind.__name__}" for direction, kind in CASES]
)
@given(data=st.data())
@settings(max_examples=5, suppress_health_check=SLOW_MACHINE)
def test_a_number_beyond_its_limits_is_named(direction: str, kind: type[Message], data: st.DataObject) -> None:
    whole = tree(data.draw(instances(kind)))
    for field in msgspec.structs.fields(kind):
        for value in beyond(field.type):
            bad = decode(direction, encode(whole | {field.encode_name: value}))
            assert isinstance(bad, bus.BadMessage), (field.name, value)
            assert field.encode_name in bad.reason


@pytest.mark.parametrize("ref", [[-1, 1], [2**31, 1], [2**63 - 1, 1], [2**64 - 1, 1], [0, -1], [0, 2**63 - 1]])
def test_a_slot_that_no_table_has_is_no_message(ref: list[int]) -> None:
    sample = FinishedSample(ref=SlotRef(0, 1), length=1, finish_reason="stop", version_low=0, version_high=0)
    whole = tree(SamplesFinished(epoch=1, work=1, samples=[sample]))
    whole["samples"][0]["ref"] = ref
    bad = decode("to_coordinator", encode(whole))
    assert isinstance(bad, bus.BadMessage)
    assert "$.samples[0]" in bad.reason


def test_a_long_list_is_refused_by_its_length() -> None:
    frame = encode({"type": "Hello", "epoch": 0, "role": "reward", "replica": 0, "identity": "x", "protocol": 3,
                    "host": "h", "pid": 1, "pid_start": 1, "leases_held": list(range(2**16 + 1))})  # fmt: skip
    bad = decode("to_coordinator", frame)
    assert isinstance(bad, bus.BadMessage)
    assert "length <= 65536" in bad.reason
    assert "leases_held" in bad.reason
