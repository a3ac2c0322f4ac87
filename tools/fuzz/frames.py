"""Mutated frames against both decoders, and what decodes against the coordinator's gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import bus
from common.messages import (
    PROTOCOL,
    ApplyWeights,
    Done,
    Evaluate,
    FinishedSample,
    Generate,
    Generated,
    GenerateItem,
    Hello,
    HostBuffer,
    Lease,
    Manifest,
    Message,
    Ready,
    Role,
    SamplesFinished,
    Sampling,
    SavePolicy,
    SaveState,
    Score,
    ScoreBatch,
    ScoreItem,
    Scores,
    SlotRef,
    Task,
    TensorEntry,
    UpdateCommitted,
    UpdatePolicy,
    WeightsApplied,
    Welcome,
)
from services.coordinator.gate import Gate
from services.coordinator.member import Member
from tools.fuzz.mutation import Mutator
from tools.fuzz.report import Result, Tally
from tools.fuzz.samples import both

SLOW_S = 1.0
"""Longest time for one frame, on a machine that is busy with other things."""
SHARED, RUN = "/dev/shm/quartet-fuzz", "/runs/fuzz"
REFS = [SlotRef(slot, 1 + 2 * slot) for slot in range(4)]
ROLES: tuple[Role, ...] = ("rollout", "reward", "critic", "trainer", "holder")
TENSORS = (
    TensorEntry(name="model.embed.weight", dtype="float32", shape=(2, 2), offset=4096),
    TensorEntry(name="lm_head.weight", dtype="bfloat16", shape=(2, 2), offset=4352),
)


def manifest(version: int) -> Manifest:
    return Manifest(
        name="policy", version=version, path=f"{SHARED}/weights/policy", identity="inode-17", gpu="", nbytes=8192,
        tensors=TENSORS, canary_ids=(3, 1, 2),
    )  # fmt: skip


def tasks() -> dict[Role, list[Task]]:
    """What each role of a run is at work on."""
    sampling = Sampling(temperature=1.0, max_new_tokens=16)
    items = [GenerateItem(ref=ref, sample=ref.slot) for ref in REFS]
    scored = [ScoreItem(ref=ref, prompt="1 + 1", ground_truth=b"2", metadata=b"null", source="") for ref in REFS]
    return {
        "rollout": [Generate(items=items, sampling=sampling, version=3)],
        "reward": [ScoreBatch(items=scored)],
        "critic": [Evaluate(refs=REFS), SaveState(step=3, path=f"{RUN}/checkpoints/step-3")],
        "trainer": [
            UpdatePolicy(refs=REFS, version=3, kl_coefficient=0.05),
            SavePolicy(name="final", version=3),
            SaveState(step=3, path=f"{RUN}/checkpoints/step-3"),
        ],
        "holder": [HostBuffer(name="policy", nbytes=8192, gpu="GPU-7")],
    }


def begin() -> tuple[Gate, list[Member]]:
    """A gate in the middle of a step, with one member of each role that holds work."""
    welcome = Welcome(epoch=3, run="fuzz", cache_path="", run_directory=RUN, shm_directory=SHARED, config=b"{}")
    gate, members, work = Gate(welcome), list[Member](), 1
    for role in ROLES:
        said = Hello(
            epoch=0, role=role, replica=0, identity=role, protocol=PROTOCOL, host="here", pid_space="", pid=17,
            pid_start=5,
        )  # fmt: skip
        member = Member(role.encode(), said, 0.0, ready=True)
        members.append(member)
        for task in tasks()[role]:
            gate.sent(member, Lease(epoch=3, work=work, step=3, phase="UPDATE", deadline_s=60.0, task=task))
            work += 1
        if role == "trainer":
            gate.check_in(member, Ready(epoch=3, manifest=manifest(2)))
        if role == "rollout":
            gate.sent(member, ApplyWeights(epoch=3, work=work, manifest=manifest(2)))
            work += 1
    return gate, members


def honest() -> list[Message]:
    """What the members of ``begin`` may truly answer: from here mutations reach deepest."""
    sample = FinishedSample(ref=REFS[0], length=4, finish_reason="stop", version_low=3, version_high=3)
    scores = Scores(scores=[Score(ref=ref, reward=1.0, accuracy=1.0) for ref in REFS])
    return [
        SamplesFinished(epoch=3, work=1, samples=[sample]),
        Done(epoch=3, work=1, result=Generated(samples=4, tokens=16), started=1.0, ended=2.0),
        Done(epoch=3, work=3, result=scores, started=1.0, ended=2.0),
        UpdateCommitted(epoch=3, work=6, manifest=manifest(3)),
    ]


def wrong(member: Member, message: Message) -> str:
    """What the gate must never let through in the state of ``begin``; found out apart from the gate's own rules."""
    match message:
        case SamplesFinished(work=1, samples=samples):
            good = all(
                sample.ref in REFS and sample.length <= 16 and 0 <= sample.version_low <= sample.version_high <= 3
                for sample in samples
            )
            return "" if member.role == "rollout" and good else "finished samples"
        case UpdateCommitted(manifest=found) | Ready(manifest=Manifest() as found):
            inside = all(tensor.offset <= found.nbytes and ".." not in tensor.name for tensor in found.tensors)
            placed = not found.path.startswith("/") or Path(found.path).resolve().is_relative_to(SHARED)
            return "" if member.role == "trainer" and inside and placed else "a commit"
        case Done(work=3, result=Scores(scores=scores)):
            return "" if member.role == "reward" and all(score.ref in REFS for score in scores) else "scores"
        case WeightsApplied(work=1):
            return "what was not asked for"
        case _:
            return ""


def fuzz_frames(count: int, seed: int) -> Result:
    """Half of the frames for the coordinator, half for a replica."""
    tally = Tally("frames", seed, SLOW_S)
    kinds = both()
    for side, decode, messages in (
        ("coordinator", bus.decode_to_coordinator, [*kinds["coordinator"], *4 * honest()]),
        ("replica", bus.decode_to_replica, kinds["replica"]),
    ):
        mutator = Mutator(f"{side} {seed}", [bus.encode(message) for message in messages])
        gate, members = begin()
        for number in range(count // 2):
            mutation, frame = mutator.frame()
            name = f"{side} {number} ({mutation})"
            message = None
            with tally.case(name):
                message = _decoded(tally, decode, frame, name)
            tally.outcomes[f"{side}: {'a message' if message else 'no message'}"] += 1
            if message is not None and side == "coordinator" and _past_the_gate(tally, gate, members, message, name):
                gate, members = begin()  # what was answered is no longer owed
    return tally.result()


def _decoded(tally: Tally, decode: Callable[[bytes], Any], frame: bytes, name: str) -> Message | None:
    """What a frame says; it must say the same when it is sent on."""
    found = decode(frame)
    if isinstance(found, bus.BadMessage):
        return None
    again = bus.encode(found)
    if bus.encode(decode(again)) != again:
        tally.fail(name, f"what was decoded is another message when it is sent on: {found}")
    return found


def _past_the_gate(tally: Tally, gate: Gate, members: Sequence[Member], message: Message, name: str) -> bool:
    """Whether the gate has let a message of some member through, or made another of it."""
    through = False
    for member in members:
        with tally.case(f"{name} of {member.role}"):
            if isinstance(message, Hello):
                gate.hello_problem(b"stranger", message, members)
                continue
            objection = gate.check_in(member, message)
            instead = gate.instead(member, message, objection) if objection else None
            tally.outcomes["gate: refused" if objection else "gate: let through"] += 1
            through = through or not objection or instead is not None
            if not objection and (what := wrong(member, message)):
                tally.fail(name, f"the gate lets {what} of the {member.role} through: {message}")
    return through
