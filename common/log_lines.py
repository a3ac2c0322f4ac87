"""How a service's log lines look: text for people, or with ``QUARTET_LOG=json`` one JSON object a line.

A line says where it comes from: time, service, replica, level; as JSON also the step, and the phase of the work that
the service is doing.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime

import msgspec

FORMAT = "QUARTET_LOG"
"""Environment variable: ``text`` (the default) or ``json``."""
FORMATS = ("text", "json")


class LogLines(logging.Formatter):
    """Formats records of one service. ``replica`` -1: it has no number yet."""

    def __init__(self, service: str, replica: int | None, as_json: bool) -> None:
        super().__init__()
        self.service = service
        self.replica = replica
        self.as_json = as_json
        self.step = 0
        self.phase = ""

    @property
    def name(self) -> str:
        return self.service if self.replica is None else f"{self.service}-{'?' if self.replica < 0 else self.replica}"

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        for part in (record.exc_info and self.formatException(record.exc_info), record.stack_info):
            message += f"\n{part}" if part else ""
        if not self.as_json:
            return f"{self.formatTime(record)} {self.name} {record.levelname} {message}"
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "service": self.service, "replica": self.replica or 0, "level": record.levelname, "step": self.step,
            "phase": self.phase, "logger": record.name, "message": message,
        }  # fmt: skip
        return msgspec.json.encode(line).decode()


lines = LogLines("", None, as_json=False)
"""This process's; a replica that gets its number, or a step that begins, changes it."""


def set_up_logging(service: str, replica: int | None, level: str) -> None:
    """One line an event on standard error. Raises ValueError for a wrong ``QUARTET_LOG``."""
    chosen = os.environ.get(FORMAT) or FORMATS[0]
    if chosen not in FORMATS:
        raise ValueError(f"{FORMAT}={chosen}: expected one of {', '.join(FORMATS)}")
    lines.service, lines.replica, lines.as_json = service, replica, chosen == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def working_on(step: int, phase: str) -> None:
    """What the lines of this process are about from now on."""
    lines.step, lines.phase = step, phase
