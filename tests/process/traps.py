"""Traps: places in a service at which it, or another one, is killed in a certain step; see ``dying_service.py``.

A place is a method of the real service, and the moment before or after it. Every trap snaps once a run: its mark, a
file in the plan's folder, tells the replacement, and the test, that it has.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from common.processes import children, is_alive, registered
from common.run_files import SharedDirectory

HOLD_LIMIT_S = 60.0
POLL_S = 0.01
PLAN = "plan.json"


class Trap(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Springs in ``service`` at ``place`` in ``step``, at the ``nth`` time that a process comes by there."""

    name: str
    service: str
    place: str
    """``loading``, ``phase PHASE`` of the coordinator, or what ``place_of`` knows."""
    step: int
    nth: int = 1
    victims: tuple[str, ...] = ()
    """Who is killed, in this order, the service itself last; nobody named: it alone. ``supervisor`` and ``guardian``
    are the processes above the services, ``engine`` is the one that vLLM has started for the service itself."""
    signal: int = signal.SIGKILL
    until: str = ""
    """Nobody is killed: whoever comes by waits here until the trap of this name has sprung. Its own name: it only tells
    that somebody came by."""
    replica: int = 0


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The traps of one run."""

    run: str
    traps: list[Trap]


class Mark(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trap leaves: when it sprang (Unix time), and the processes that it killed."""

    time: float
    pids: dict[str, int]


@dataclass(frozen=True)
class Place:
    """A method (``module:Class.method`` or ``module:function``) and how to tell the step from its arguments.

    ``kind`` and ``step`` are paths: the number of an argument, then names of attributes or keys.
    """

    target: str
    when: Literal["before", "after"] = "before"
    step: str = ""
    """Without it: the step of the work that the process was given last, or of the coordinator's loop."""
    kind: str = ""
    wanted: str = ""
    """Only where what ``kind`` leads to is of the type of this name."""


SERVICES = {
    "rollout": "services.rollout.service:RolloutService",
    "reward": "services.reward.service:RewardService",
    "critic": "services.critic.service:CriticService",
    "trainer": "services.trainer.service:TrainerService",
}
LEDGER = "services.coordinator.ledger:Ledger"
PLACES: dict[str, Place] = {
    # rollout: a sample is in its slot and not yet reported; weights are applied and the receipt is not sent
    "written": Place("services.rollout.service:RolloutService._write", "after"),
    "applied": Place("services.rollout.service:RolloutService.apply_weights", "after", "1.version"),
    # trainer and critic: in the middle of an update; after its last write; in the background write; in a restore
    "torn": Place("common.learner:Learner.apply", "after"),
    "policy learnt": Place("services.trainer.update:PolicyUpdate.run", "after"),
    "policy committed": Place("common.weights.writer:WeightWriter.commit", "after"),
    "values learnt": Place("services.critic.update:CriticUpdate.run", "after"),
    "saving": Place("common.checkpoints.saver:write_state", "before", "2.step"),
    "saved": Place("common.checkpoints.writer:publish", "before", "1.parent.name"),
    "restoring": Place("common.checkpoints.role:RoleState.load_learner"),
    "weights restored": Place("common.weights.writer:WeightWriter.restore", "after"),
    # coordinator: around what it writes down
    "opened": Place("services.coordinator.states:SavedStates.scan"),  # it does not know yet where the run goes on
    "samples": Place("services.coordinator.dispatch:Dispatcher.finished", "after"),
    "commit heard": Place("services.coordinator.publisher:Publisher.committed"),
    "receipt heard": Place("services.coordinator.publisher:Publisher.applied"),
    "metrics written": Place(f"{LEDGER}.step_done", "before", "1.step"),
    "step written": Place(f"{LEDGER}.step_done", "after", "1.step"),
    "evaluation written": Place(f"{LEDGER}.evaluation_done", "after"),
    "slots freed": Place("services.coordinator.journal:Journal.moved"),
    "state written": Place("services.coordinator.states:SavedStates._write", "before", "1"),
    "forgotten": Place(f"{LEDGER}.forget_after", "after"),
    "cut": Place("services.coordinator.training:Training.cut_records", "after"),
}


def place_of(service: str, name: str) -> Place:
    """``PLACES``, and of replicas ``given TASK`` and ``done TASK``, of the coordinator ``heard RESULT``.

    ``given`` is before anything is done, ``done`` when the result is there and not yet sent; ``heard`` when the
    coordinator has written a result down and not yet acknowledged it.
    """
    if name in PLACES:
        return PLACES[name]
    moment, _, wanted = name.partition(" ")
    if moment == "heard":
        return Place("services.coordinator.dispatch:Dispatcher.done", "after", "", "1.result", wanted)
    handle = f"{SERVICES[service]}.handle"
    return Place(handle, "before" if moment == "given" else "after", "", "1.task", wanted)


def follow(path: str, arguments: Sequence[Any]) -> Any:
    """What a path leads to."""
    number, *names = path.split(".")
    found = arguments[int(number)]
    for name in names:
        found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    return found


class Trapper:
    """Sets the traps of one process."""

    def __init__(self, folder: Path, service: str, replica: int) -> None:
        self.folder = folder
        self.plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
        self.traps = [trap for trap in self.plan.traps if (trap.service, trap.replica) == (service, replica)]
        self.service, self.name = service, f"{service}-{replica}"
        self.step_now: Callable[[], int] = lambda: self._given
        self._given = 0
        self._passed: dict[str, int] = {}

    def loading(self) -> None:
        """The process has been welcomed, or started to coordinate, and has built nothing yet."""
        for trap in self.traps:
            if trap.place == "loading":
                self._pass(trap)

    def set_up(self) -> None:
        """Patches the places of all traps; imports what they are in."""
        if self.service == "coordinator":
            self._watch_coordinator()
        else:
            self._patch(f"{SERVICES[self.service]}.handle", "before", self._note_lease)
        for trap in self.traps:
            if trap.place != "loading" and not trap.place.startswith("phase "):
                self._set(trap, place_of(trap.service, trap.place))

    def _note_lease(self, _service: Any, lease: Any, _outbox: Any) -> None:
        self._given = lease.step

    def _watch_coordinator(self) -> None:
        from services.coordinator.step import StepRunner
        from services.coordinator.training import Training

        loops: list[Training] = []
        self._patch("services.coordinator.training:Training.__post_init__", "before", loops.append)
        self.step_now = lambda: loops[0].step if loops else 0

        def enter(runner: Any, phase: str) -> None:
            runner.__dict__["phase"] = phase
            for trap in self.traps:
                if trap.place == f"phase {phase}" and trap.step == self.step_now():
                    self._pass(trap)

        phases = property(lambda runner: runner.__dict__["phase"], enter)
        StepRunner.phase = phases  # pyright: ignore[reportAttributeAccessIssue]

    def _set(self, trap: Trap, place: Place) -> None:
        def look(*arguments: Any) -> None:
            # The directory of a state is named step-<n>.
            step = int(str(follow(place.step, arguments)).removeprefix("step-")) if place.step else self.step_now()
            kind = type(follow(place.kind, arguments)).__name__ if place.kind else ""
            if (step, kind) == (trap.step, place.wanted):
                self._pass(trap)

        self._patch(place.target, place.when, look)

    def _patch(self, target: str, when: str, look: Callable[..., None]) -> None:
        module, _, path = target.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        original = getattr(owner, name)

        def patched(*arguments: Any, **named: Any) -> Any:
            if when == "before":
                look(*arguments)
            result = original(*arguments, **named)
            if when == "after":
                look(*arguments)
            return result

        setattr(owner, name, patched)

    # ------------------------------------------------------------ springing

    def _pass(self, trap: Trap) -> None:
        self._passed[trap.name] = self._passed.get(trap.name, 0) + 1
        if self._passed[trap.name] != trap.nth or (self.folder / trap.name).exists():
            return
        if trap.until:
            self._mark(trap, {})
            self._wait_for(trap)
            return
        pids = self._pids(trap.victims or (f"{trap.service}-{trap.replica}",))
        self._mark(trap, pids)
        for pid in sorted(pids.values(), key=lambda pid: pid == os.getpid()):
            os.kill(pid, trap.signal)

    def _wait_for(self, trap: Trap) -> None:
        deadline = time.monotonic() + HOLD_LIMIT_S
        while not (self.folder / trap.until).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"trap {trap.name}: {trap.until} has not sprung within {HOLD_LIMIT_S:g} s")
            time.sleep(POLL_S)  # a poll of a file, with a deadline

    def _pids(self, victims: tuple[str, ...]) -> dict[str, int]:
        listed = registered(SharedDirectory.of_run(self.plan.run).processes)
        found = {f"{entry.service}-{entry.replica}": entry.pid for entry in listed if is_alive(entry)}
        guardian = os.getppid()
        found |= {"supervisor": parent_of(guardian), "guardian": guardian, self.name: os.getpid()}
        if "engine" in victims:
            found["engine"] = engine_of(os.getpid())
        return {victim: found[victim] for victim in victims}

    def _mark(self, trap: Trap, pids: dict[str, int]) -> None:
        draft = self.folder / f".{trap.name}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(Mark(time=time.time(), pids=pids)))
        draft.rename(self.folder / trap.name)


def engine_of(service: int) -> int:
    """vLLM's EngineCore, the child of a rollout service in which the scheduler runs."""
    tracker = b"multiprocessing.resource_tracker"  # Python's own, beside it
    (found,) = [pid for pid in children()[service] if tracker not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


def parent_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def mark_of(folder: Path, trap: Trap) -> Mark | None:
    """What a trap left; None where it has not sprung."""
    path = folder / trap.name
    return msgspec.json.decode(path.read_bytes(), type=Mark) if path.exists() else None
