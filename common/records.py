"""What a run writes down: a line of metrics a step, samples, a summary, and the status for ``quartet status``."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from common.run_files import SHM_ROOT, naming, private


class StepMetrics(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of metrics.jsonl. ``values`` depends on the seed alone (on CPU); ``timings`` is wall time and memory."""

    step: int
    values: dict[str, float]
    timings: dict[str, float]


class SampleRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of samples.jsonl. A sample that is masked out has neither reward nor accuracy."""

    step: int
    sample: int
    origin: str
    prompt: str
    response: str
    ground_truth: msgspec.Raw
    reward: float | None
    accuracy: float | None
    finish_reason: str
    response_length: int
    version_low: int
    version_high: int
    masked: bool


class Summary(Struct, frozen=True, forbid_unknown_fields=True):
    """summary.json: the facts of a run that has ended. Accuracies are those of the evaluations (``eval.*``).

    What was not measured is null: no evaluation, or nothing in it that could be scored.
    """

    run: str
    finished: bool
    steps: int
    samples: int
    masked_samples: int
    accuracy_first: float | None
    accuracy_last: float | None
    reward_first: float | None
    reward_last: float | None
    wall_s: float
    phase_s: dict[str, float]
    coordinator_overhead_ratio: float
    cache_hit_ratio: float
    config_digest: str
    epoch: int
    rows_without_ground_truth: int = 0
    """Rows that were skipped, of training and evaluation."""
    rows_too_long: int = 0
    """Rows that were skipped as far as they were looked at."""
    trained_model: str | None = None
    """Hugging Face directory of the policy that was saved last; of a finished run the trained one."""


class ServiceStatus(Struct, frozen=True):
    role: str
    replica: int
    pid: int
    state: str
    heard_s: float
    """Seconds since its last message."""


class Status(Struct, frozen=True):
    """status.json in the run's shared directory, replaced whole several times a second."""

    run: str
    pid: int
    epoch: int
    step: int
    steps: int
    phase: str
    started: float
    """Unix time of the start."""
    reward: float | None
    accuracy: float | None
    kl: float | None
    samples_per_s: float | None
    left_s: float | None
    services: list[ServiceStatus]
    run_directory: str


def write_whole(path: Path, data: bytes, durable: bool = False) -> None:
    """Writes a file so that a reader sees either the old or the new content. Raises OSError that names the file.

    ``durable``: and so that it outlives a power cut; returns when the disk has it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", opener=private if path.is_relative_to(SHM_ROOT) else None) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise naming(path, error) from error


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, record: Struct) -> None:
    """Adds a line of JSON. Raises OSError that names the file."""
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise naming(path, error) from error
