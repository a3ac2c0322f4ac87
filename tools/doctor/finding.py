"""What a check found."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Finding(Struct, frozen=True):
    """``why`` and ``change`` are empty where nothing is wrong. An error keeps a run from starting."""

    check: str
    level: Literal["ok", "warning", "error"]
    found: str
    why: str = ""
    change: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, why: str, change: str) -> Finding:
    return Finding(check, "warning", found, why, change)


def error(check: str, found: str, why: str, change: str) -> Finding:
    return Finding(check, "error", found, why, change)
