"""What a check found."""

from __future__ import annotations

from collections.abc import Sequence
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


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]
