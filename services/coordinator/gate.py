"""Whether what a replica sends can be: against its role, and against what it was given to do.

Every message passes here before it is dealt with. Whatever an honest replica may say passes, late and repeated answers
included, which others drop; what only a broken or a hostile one says is refused before it reaches anything.
"""

from __future__ import annotations

import hmac
import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from common import processes
from common.messages import (
    ApplyWeights,
    Done,
    Failed,
    FinishedSample,
    Generate,
    Heartbeat,
    Hello,
    Lease,
    Leaving,
    Manifest,
    Message,
    Proof,
    Ready,
    RestoreState,
    Role,
    SamplesFinished,
    SaveState,
    ScoreBatch,
    SlotRef,
    StateSaved,
    Task,
    UpdateBegun,
    UpdateCommitted,
    UpdatePolicy,
    WeightsApplied,
    WeightsDenied,
    WeightsGranted,
    WeightsProved,
    WeightsWanted,
    Welcome,
)
from services.coordinator.gate_values import manifest_problem, proof_problem, result_problem
from services.coordinator.member import Member

_ALL = (Ready, WeightsWanted, Heartbeat, Leaving, Done, Failed)
SAYS: dict[Role, tuple[type[Message], ...]] = {
    "rollout": (*_ALL, SamplesFinished, WeightsApplied),
    "reward": _ALL,
    "critic": (*_ALL, StateSaved),
    "trainer": (*_ALL, StateSaved, UpdateBegun, UpdateCommitted, WeightsProved),
    "holder": _ALL,
}
"""What each role may send, once it is a member."""
MOST_REQUESTS = 64
"""Requests for weights of one replica that may wait at a time."""
MOST_REMEMBERED = 4096
"""Work that one replica has answered, of which late and repeated answers are known as such."""
SHARE_GPU_MEMORY: frozenset[Role] = frozenset({"holder", "trainer", "rollout"})
"""Roles whose torch must fit each other's where weights lie on a GPU."""
WRITES: frozenset[Role] = frozenset({"trainer", "critic", "rollout"})
"""Roles that write into the token cache or into weights."""
MOST_OF_ROLE = 256
"""Replicas of a role."""


@dataclass(frozen=True)
class _Given:
    """Work that a member was given and has not answered: a lease's task, or a manifest to apply."""

    what: Task | Manifest
    refs: frozenset[SlotRef]
    """Slots that its answer may name."""


@dataclass
class _Past:
    """What the coordinator and one member have said to each other."""

    given: OrderedDict[int, _Given | None] = field(default_factory=OrderedDict[int, "_Given | None"])
    """By work; None: answered."""
    saves: set[int] = field(default_factory=set[int])
    """Steps whose state it was to save, and has not said to be saved."""
    asked: set[int] = field(default_factory=set[int])
    manifest: Manifest | None = None
    """The last that it committed."""


def _same_boot(one: str, other: str) -> bool:
    """Of two ``pid_space``: whether they are of one host."""
    return one.partition(" ")[0] == other.partition(" ")[0]


def minor(version: str) -> str:
    """``2.11.0+cu130`` -> ``2.11``."""
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


class Gate:
    """Learns what members are given from ``sent``; its memory is bounded by their number."""

    def __init__(self, welcome: Welcome, on_gpu: bool = False) -> None:
        """``on_gpu``: weights cross processes by CUDA IPC."""
        self.welcome = welcome
        self.on_gpu = on_gpu
        self.secret = ""
        """Whoever is not of the run's own user does not have it, and may be a reward replica and nothing else."""
        self.pid_space = processes.pid_space()
        self._pasts: dict[bytes, _Past] = {}

    # ------------------------------------------------------------ what it learns

    def sent(self, member: Member, message: Message) -> None:
        """To be called with every message that went out to a member."""
        past = self._pasts.setdefault(member.peer, _Past())
        match message:
            case Lease(work=work, task=task):
                past.given[work] = _Given(task, _refs_of(task))
                if isinstance(task, SaveState):
                    past.saves.add(task.step)
            case ApplyWeights(work=work, manifest=manifest):
                past.given[work] = _Given(manifest, frozenset())
            case WeightsGranted(request=request) | WeightsDenied(request=request):
                past.asked.discard(request)
            case _:
                return
        while len(past.given) > MOST_REMEMBERED:
            past.given.popitem(last=False)

    def left(self, member: Member) -> None:
        """The member is dead, or will say Hello again."""
        self._pasts.pop(member.peer, None)

    def _taken(self, past: _Past, message: Message) -> None:
        match message:
            case Done(work=work) | Failed(work=work) | WeightsApplied(work=work) if work in past.given:
                past.given[work] = None
            case Ready(manifest=Manifest() as manifest) | UpdateCommitted(manifest=manifest):
                past.manifest = manifest
            case StateSaved(step=step):
                past.saves.discard(step)
            case WeightsWanted(request=request):
                past.asked.add(request)
            case _:
                pass

    # ------------------------------------------------------------ strangers

    def hello_problem(self, peer: bytes, hello: Hello, living: Iterable[Member]) -> str:
        """Why who says Hello cannot be who it says it is; empty where it can."""
        if hello.epoch > self.welcome.epoch:
            return f"it comes from epoch {hello.epoch}, this coordinator is the run's number {self.welcome.epoch}"
        here = hello.pid_space == self.pid_space
        own = not self.secret or hmac.compare_digest(hello.secret.encode(), self.secret.encode())
        if not own and (hello.role != "reward" or here):
            return (
                "it is another user (it has not the run's secret), and may only be a reward replica with process ids "
                "of its own: start it as the coordinator's user"
            )
        if here and hello.pid == os.getpid():
            return f"it says that it is process {hello.pid}, which is the coordinator"
        if hello.role in WRITES and _same_boot(hello.pid_space, self.pid_space) and not here:
            return (
                "it has process ids of its own, so its death could not be seen while it writes into shared memory: "
                'start it where the coordinator\'s process ids count (pid: "service:pause" in compose.yaml)'
            )
        others = [member for member in living if member.peer != peer]
        if here and hello.pid in {member.hello.pid for member in others if member.hello.pid_space == hello.pid_space}:
            return f"it says that it is process {hello.pid}, which is another replica"
        if sum(member.role == hello.role for member in others) >= MOST_OF_ROLE:
            return f"there are {MOST_OF_ROLE} {hello.role} replicas already"
        return self._torch_problem(hello, others) if self.on_gpu else ""

    def _torch_problem(self, hello: Hello, others: Iterable[Member]) -> str:
        """What a handle of GPU memory consists of is torch's own affair, and may change with its minor version."""
        mine = hello.versions.get("torch", "")
        if hello.role not in SHARE_GPU_MEMORY or not mine:
            return ""
        for member in others:
            theirs = member.hello.versions.get("torch", "")
            if member.role in SHARE_GPU_MEMORY and theirs and minor(theirs) != minor(mine):
                return (
                    f"it has torch {mine}, {member.name} has {theirs}: memory on a GPU is shared between the same "
                    "minor versions only; install one lock everywhere (QUARTET_LOCK of the images)"
                )
        return ""

    # ------------------------------------------------------------ members

    def check_in(self, member: Member, message: Message) -> str:
        """Why this message cannot be right, in one line; empty where it can, and then it counts as taken."""
        past = self._pasts.setdefault(member.peer, _Past())
        if not isinstance(message, SAYS[member.role]):
            return f"a {member.role} never sends {type(message).__name__}"
        found = self._problem(member, past, message)
        if not found:
            self._taken(past, message)
        return found

    def instead(self, member: Member, message: Message, objection: str) -> Failed | None:
        """What takes the place of a refused answer to work that this member does hold, so that the work is lost at once
        and not at its deadline; None where nobody waits for anything."""
        if not isinstance(message, Done | WeightsApplied):
            return None
        past = self._pasts[member.peer]
        if past.given.get(message.work) is None:
            return None
        past.given[message.work] = None
        text = f"its {type(message).__name__} is refused: {objection}"
        return Failed(epoch=message.epoch, work=message.work, kind="error", message=text)

    def _problem(self, member: Member, past: _Past, message: Message) -> str:
        match message:
            case Failed(work=0) | Heartbeat() | Leaving():
                return ""
            case Done() | Failed() | SamplesFinished() | WeightsApplied() | UpdateCommitted():
                return _not_given(member, past, message.work) or self._answer_problem(past, message)
            case Ready(manifest=manifest, proof=proof):
                return self._ready_problem(member, past, manifest, proof)
            case UpdateBegun(version=version):
                return "" if _inherited(member) or version in _versions(past) else _unasked(f"version {version}")
            case WeightsProved(proof=proof):
                return proof_problem(proof, past.manifest)
            case StateSaved(step=step):
                return "" if _inherited(member) or step in past.saves else _unasked(f"state of step {step}")
            case WeightsWanted(request=request):
                full = len(past.asked) >= MOST_REQUESTS and request not in past.asked
                return f"{MOST_REQUESTS} of its requests for weights wait already" if full else ""
            case _:
                return f"nobody sends {type(message).__name__}"

    def _ready_problem(self, member: Member, past: _Past, manifest: Manifest | None, proof: Proof | None) -> str:
        if member.role != "trainer":
            return f"a {member.role} has no weights to commit" if manifest or proof else ""
        if manifest is not None and (found := manifest_problem(manifest, past.manifest, self.welcome.shm_directory)):
            return found
        return "" if proof is None else proof_problem(proof, manifest or past.manifest)

    def _answer_problem(
        self, past: _Past, message: Done | Failed | SamplesFinished | WeightsApplied | UpdateCommitted
    ) -> str:
        """An answer to what was answered before, or was given by an earlier coordinator, is dropped by others."""
        given = past.given.get(message.work)
        if isinstance(message, UpdateCommitted):
            version = None if given is None else _version(given.what)
            if given is not None and version != message.manifest.version:
                return f"it commits version {message.manifest.version} for work {message.work}, expected {version}"
            return manifest_problem(message.manifest, past.manifest, self.welcome.shm_directory)
        if given is None or isinstance(message, Failed):
            return ""
        if isinstance(message, WeightsApplied) != isinstance(given.what, Manifest):
            return f"a {type(message).__name__} is no answer to work {message.work}: {type(given.what).__name__}"
        match message, given.what:
            case SamplesFinished(samples=samples), task:
                return next((found for sample in samples if (found := _sample_problem(sample, task, given.refs))), "")
            case Done(started=started, ended=ended), _ if ended < started:
                return f"it ended at {ended}, before it started at {started}"
            case Done(result=result), task if not isinstance(task, Manifest):
                return result_problem(result, task, given.refs, self.welcome.run_directory)
            case _:
                return ""


def _sample_problem(sample: FinishedSample, task: Task | Manifest, refs: frozenset[SlotRef]) -> str:
    if not isinstance(task, Generate):
        return f"finished samples are no answer to {type(task).__name__}"
    slot = f"slot {sample.ref.slot}"
    if sample.ref not in refs:
        return f"{slot} (generation {sample.ref.generation}) is not in its lease"
    if sample.length > task.sampling.max_new_tokens:
        return f"{slot}: {sample.length} tokens, expected at most {task.sampling.max_new_tokens}"
    if not 0 <= sample.version_low <= sample.version_high <= task.version:
        return f"{slot}: versions {sample.version_low} to {sample.version_high}, its lease is for {task.version}"
    return ""


def _refs_of(task: Task) -> frozenset[SlotRef]:
    return frozenset(item.ref for item in task.items) if isinstance(task, Generate | ScoreBatch) else frozenset()


def _not_given(member: Member, past: _Past, work: int) -> str:
    """Work of a coordinator before this one is known from the member's own Hello alone, and answered into the void."""
    if work in past.given or work in member.hello.leases_held or work in member.hello.leases_finished:
        return ""
    return f"it answers work {work}, which it was never given"


def _inherited(member: Member) -> bool:
    """Whether it worked for an earlier coordinator, and may still say what that one asked for."""
    return member.hello.epoch != 0


def _version(what: Task | Manifest) -> int | None:
    """The version that a piece of work ends with the commit of."""
    match what:
        case UpdatePolicy(version=version):
            return version
        case RestoreState(step=step):
            return step
        case _:
            return None


def _versions(past: _Past) -> set[int | None]:
    return {_version(given.what) for given in past.given.values() if given is not None} - {None}


def _unasked(what: str) -> str:
    return f"it tells of {what}, which it was not asked for"
