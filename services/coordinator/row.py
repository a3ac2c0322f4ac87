"""One row of prompts: what is read of it, by configurable field names, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from common.config import PromptFields, PromptsConfig
from common.tokenizer import ChatMessage

Record = dict[str, Raw]

NAMED = 5
"""Skipped rows that are named; the rest are only counted."""

_NULL = Raw(b"null")


class RowError(ValueError):
    """A row, or a file of rows, that cannot be used; the message names file and line and says what to do."""


class Row(Struct, frozen=True, kw_only=True):
    """One row: its prompt, and what its scorer needs, as the JSON that it was."""

    prompt: str | list[ChatMessage]
    ground_truth: Raw
    metadata: Raw
    source: str
    """The row's own ``data_source``; the name of the task for a generated row; empty if there is none."""
    origin: str
    """Where the row lies, for messages: ``file.jsonl:17``."""


class Skipped:
    """Rows without their ground truth: counted, the first few named."""

    def __init__(self) -> None:
        self.count = 0
        self.named: list[str] = []

    def add(self, origin: str) -> None:
        """Counts one more."""
        self.count += 1
        if len(self.named) < NAMED:
            self.named.append(origin)

    def __str__(self) -> str:
        more = ", …" if self.count > len(self.named) else ""
        return f"{self.count} without ground truth ({', '.join(self.named)}{more})" if self.count else "none skipped"


def encoded(values: Mapping[str, Any], origin: str) -> Record:
    """Python values as the JSON of a record; what JSON does not know becomes a string."""
    try:
        return {key: Raw(msgspec.json.encode(value, enc_hook=str)) for key, value in values.items()}
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise RowError(f"{origin}: a value that JSON cannot hold: {error}") from None


def keep(row: Row, prompts: PromptsConfig, skipped: Skipped) -> bool:
    """Whether a row is used: what ``prompts.missing_ground_truth`` says about one without its ground truth."""
    if bytes(row.ground_truth) != b"null" or prompts.missing_ground_truth == "allow":
        return True
    if prompts.missing_ground_truth == "error":
        raise RowError(
            f"{row.origin}: no ground truth in field {prompts.fields.ground_truth!r}; name the right one by "
            "prompts.fields.ground_truth, or choose prompts.missing_ground_truth = 'skip' or 'allow'"
        )
    skipped.add(row.origin)
    return False


def parse_row(record: Record, fields: PromptFields, origin: str) -> Row:
    """The row of a record; RowError if it has no prompt, or one that is neither text nor chat messages."""
    prompt = _lookup(record, fields.prompt)
    if prompt is None:
        raise RowError(no_prompt(origin, fields.prompt, list(record)))
    try:
        text = msgspec.json.decode(prompt, type=str | list[ChatMessage])
    except msgspec.MsgspecError as error:
        raise RowError(
            f"{origin}: {fields.prompt}: expected a string or a list of {{role, content}} messages: {error}"
        ) from None
    if not text:
        raise RowError(f"{origin}: {fields.prompt}: the prompt is empty")
    truth = _lookup(record, fields.ground_truth) or _lookup(record, "ground_truth") or _NULL
    source = _lookup(record, fields.source) or _NULL
    name = bytes(source).decode()
    return Row(
        prompt=text,
        ground_truth=truth,
        metadata=_lookup(record, fields.metadata) or _NULL,
        source=msgspec.json.decode(source, type=str) if name.startswith('"') else "" if name == "null" else name,
        origin=origin,
    )


def no_prompt(place: str, field: str, present: Sequence[str]) -> str:
    """The message for a row or a file without the prompt's field."""
    found = ", ".join(sorted(present)) or "no field"
    return f"{place}: no prompt in field {field!r}; found {found}. Name the right one by prompts.fields.prompt"


def _lookup(record: Record, name: str) -> Raw | None:
    """A field by its own name, or, where there is none, by dots into nested objects; null counts as absent."""
    if name in record:
        found = bytes(record[name])
        return None if found == b"null" else Raw(found)
    head, _, rest = name.partition(".")
    if not rest or head not in record or not bytes(record[head]).startswith(b"{"):
        return None
    return _lookup(msgspec.json.decode(record[head], type=Record), rest)
