"""What ``quartet up`` shows while a run works: a live picture on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from io import BufferedReader
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import msgspec

from common.records import Status, StepMetrics
from common.run_files import RunDirectory, SharedDirectory
from tools.streams import may_be_unread, say

if TYPE_CHECKING:
    from rich.console import RenderableType

PARTIAL = 1 << 20
"""Most bytes of metrics.jsonl that are read at a time."""


@dataclass(frozen=True)
class ServiceLine:
    """A process of the run. ``fate`` says how it ended; None while it runs."""

    service: str
    replica: int
    pid: int
    fate: str | None = None


@dataclass(frozen=True)
class View:
    """Everything there is to show at one moment: the lines of metrics since the last view, the last of each kind."""

    status: Status | None
    new: list[StepMetrics]
    step: StepMetrics | None
    evaluation: StepMetrics | None
    services: list[ServiceLine]

    def state(self, line: ServiceLine) -> str:
        if line.fate is not None:
            return line.fate
        known = self.status.services if self.status else []
        return next((s.state for s in known if (s.role, s.replica) == (line.service, line.replica)), "running")


@dataclass
class Feed:
    """Follows the files in which the coordinator reports."""

    shared: SharedDirectory
    files: RunDirectory
    status: Status | None = None
    step: StepMetrics | None = None
    evaluation: StepMetrics | None = None
    _seen: list[int] = field(default_factory=list[int])
    """Hashes of the lines of metrics so far."""
    _end: int = 0
    _last: bytes = b""
    """Where the last of them ends, and what it is."""
    _decoder: msgspec.json.Decoder[StepMetrics] = field(default_factory=lambda: msgspec.json.Decoder(StepMetrics))

    def poll(self, services: list[ServiceLine]) -> View:
        self.status = read_status(self.shared) or self.status
        new = self._new_steps()
        for line in new:
            if is_evaluation(line):
                self.evaluation = line
            else:
                self.step = line
        return View(self.status, new, self.step, self.evaluation, services)

    def skip(self) -> None:
        """Takes what a resumed run has written before as shown."""
        while self.poll([]).new:
            continue

    def _new_steps(self) -> list[StepMetrics]:
        try:
            with self.files.metrics.open("rb") as file:
                lines = self._new_lines(file)
        except FileNotFoundError:
            return []
        self._seen += map(hash, lines)
        self._end += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        return [self._decoder.decode(line) for line in lines]

    def _new_lines(self, file: BufferedReader) -> list[bytes]:
        """The complete lines that follow the last one seen.

        The coordinator cuts off steps that are repeated. Then the last line is not where it was, and what is new begins
        where the file first differs from what has been seen.
        """
        file.seek(self._end - len(self._last))
        data = file.read(PARTIAL)
        if data.startswith(self._last):
            return complete_lines(data[len(self._last) :])
        file.seek(0)
        lines = complete_lines(file.read())
        pairs = enumerate(zip(lines, self._seen, strict=False))
        kept = next((index for index, (line, seen) in pairs if hash(line) != seen), min(len(lines), len(self._seen)))
        del self._seen[kept:]
        self._end = sum(map(len, lines[:kept]))
        self._last = lines[kept - 1] if kept else b""
        return lines[kept:]


def complete_lines(data: bytes) -> list[bytes]:
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def is_evaluation(line: StepMetrics) -> bool:
    """Whether a line of metrics is an evaluation's, after the step of the same number, and not a step's."""
    return "eval/rows" in line.values


def read_status(shared: SharedDirectory) -> Status | None:
    """The coordinator's last report; None before the first one and after the run's directory is gone."""
    try:
        return msgspec.json.decode(shared.status.read_bytes(), type=Status)
    except FileNotFoundError:
        return None


class Display(Protocol):
    """Where a run is shown. ``note`` takes what must be said at once: warnings, errors, deaths."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def show(self, view: View) -> None: ...
    def note(self, text: str) -> None: ...


def make_display(run: str) -> Display:
    """The live display if standard output is a terminal, else plain lines."""
    return LiveDisplay(run) if sys.stdout.isatty() else PlainDisplay()


class PlainDisplay:
    """One line a step on standard output; notes on standard error."""

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, view: View) -> None:
        for step in view.new:
            say(plain_line(step, view.status), sys.stdout)

    def note(self, text: str) -> None:
        say(text, sys.stderr)


class LiveDisplay:
    """Progress, figures and services, redrawn in place; notes are printed above and stay."""

    def __init__(self, run: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self.run = run
        self.console = Console(file=sys.stdout, highlight=False)
        # Standard error stays what it is: it may be a file while standard output is the terminal.
        self.live = Live(console=self.console, auto_refresh=False, redirect_stderr=False, redirect_stdout=False)

    def __enter__(self) -> LiveDisplay:
        with may_be_unread(sys.stdout):
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with may_be_unread(sys.stdout):
            self.live.stop()

    def show(self, view: View) -> None:
        with may_be_unread(sys.stdout):
            self.live.update(picture(self.run, view), refresh=True)

    def note(self, text: str) -> None:
        if sys.stderr.isatty():
            with may_be_unread(sys.stdout):
                self.console.print(text, markup=False, soft_wrap=True)
        else:
            say(text, sys.stderr)


def plain_line(step: StepMetrics, status: Status | None) -> str:
    total = f"/{status.steps}" if status else ""
    parts = [f"step {step.step}{total}", *figures(step)]
    if status and status.left_s is not None:
        parts.append(f"left {duration(status.left_s)}")
    return "  ".join(parts)


def figures(step: StepMetrics) -> list[str]:
    """The figures of a step or an evaluation that a person watches, those that it has."""
    if is_evaluation(step):
        accuracy = step.values.get("eval/accuracy")
        shown = "not measured" if accuracy is None else f"{accuracy:.3f}"
        return [f"held-out accuracy {shown}", f"on {step.values['eval/rows']:g} rows"]
    shown = [f"{name} {step.values[name]:.3f}" for name in ("reward", "accuracy", "kl") if name in step.values]
    if "samples_per_s" in step.timings:
        shown.append(f"{step.timings['samples_per_s']:.1f} samples/s")
    if "step_s" in step.timings:
        shown.append(f"{step.timings['step_s']:.1f} s/step")
    return shown


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def picture(run: str, view: View) -> RenderableType:
    """The live display of one moment."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    status = view.status
    head = Table.grid(padding=(0, 1))
    if status is None:
        head.add_row(Text(f"run {run}", style="bold"), "starting")
    else:
        left = f"left {duration(status.left_s)}" if status.left_s is not None else ""
        bar = ProgressBar(total=max(1, status.steps), completed=status.step, width=30)
        head.add_row(Text(f"run {run}", style="bold"), bar, f"step {status.step}/{status.steps}", status.phase, left)
    services = Table.grid(padding=(0, 2))
    for line in view.services:
        style = "green" if line.fate is None else "red"
        services.add_row(f"  {line.service}-{line.replica}", Text(view.state(line), style=style), f"process {line.pid}")
    facts = [figures(line) for line in (view.step, view.evaluation) if line is not None]
    return Group(head, *(Text("  " + "  ".join(fact)) for fact in facts or [["no step finished yet"]]), services)
