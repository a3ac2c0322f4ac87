"""One message of every kind and every task and result in it, as they travel in a run: what mutation starts from."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from common.messages import Message, ToCoordinator, ToReplica

NUMBERS = {int: 3, float: 0.5, bool: True, str: "policy", bytes: b"handle"}


def messages(union: Any) -> list[Message]:
    """All messages of a direction; one for each value of a field that is itself one of several structs."""
    return [made for kind in get_args(union) for made in instances(kind)]


def instances(kind: Any) -> list[Any]:
    """Values of a type, in which each of its alternatives occurs."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return instances(arguments[0])
    if origin is Literal:
        return list(arguments)
    if origin in (Union, types.UnionType):
        return [value for argument in arguments for value in instances(argument)]
    if origin is list:
        return [[*instances(arguments[0])], []]
    if origin is tuple:
        return [tuple(instances(arguments[0])), ()]
    if origin is dict:
        return [{key: value for key in instances(arguments[0]) for value in instances(arguments[1])}]
    if kind is type(None):
        return [None]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _structs(kind)
    return [NUMBERS[kind]]


def _structs(kind: type[msgspec.Struct]) -> list[Any]:
    """As many as the field with most alternatives has; the others repeat their last."""
    fields = {field.name: instances(field.type) for field in msgspec.structs.fields(kind)}
    most = max(map(len, fields.values()), default=1)
    return [
        kind(**{name: values[min(place, len(values) - 1)] for name, values in fields.items()}) for place in range(most)
    ]


def both() -> dict[str, list[Message]]:
    return {"coordinator": messages(ToCoordinator), "replica": messages(ToReplica)}
