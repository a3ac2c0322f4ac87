"""The gate: what no honest replica says is refused, and whatever an honest one may say passes, late or again too."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from common.messages import (
    PROTOCOL,
    ApplyWeights,
    CudaHandle,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    FinishedSample,
    Generate,
    Generated,
    GenerateItem,
    Heartbeat,
    Hello,
    HostBuffer,
    Hosted,
    Lease,
    Manifest,
    Message,
    Proof,
    Ready,
    Receipt,
    RestoreState,
    Role,
    SamplesFinished,
    Sampling,
    Saved,
    SavePolicy,
    SaveState,
    Score,
    ScoreBatch,
    ScoreItem,
    Scores,
    SlotRef,
    StateSaved,
    Task,
    TensorEntry,
    UpdateBegun,
    UpdateCommitted,
    UpdatePolicy,
    WeightsApplied,
    WeightsDenied,
    WeightsProved,
    WeightsWanted,
    Welcome,
)
from services.coordinator.gate import MOST_REMEMBERED, MOST_REQUESTS, Gate
from services.coordinator.member import Member

SHARED, RUN = "/dev/shm/quartet-gate", "/runs/gate"
WELCOME = Welcome(epoch=2, run="gate", cache_path="", run_directory=RUN, shm_directory=SHARED, config=b"{}")
REFS = [SlotRef(4, 1), SlotRef(5, 3)]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=16)
TENSOR = TensorEntry(name="model.embed.weight", dtype="float32", shape=(2, 2), offset=4096)
MANIFEST = Manifest(
    name="policy", version=3, path=f"{SHARED}/weights/policy", identity="inode-17", gpu="", nbytes=8192,
    tensors=(TENSOR,), canary_ids=(3, 1, 2),
)  # fmt: skip
HANDLE = CudaHandle(
    gpu="GPU-7", handle=bytes(66), nbytes=64, offset=0, counter=b"/torch_1", counter_offset=0, event=bytes(64),
    event_sync=True,
)  # fmt: skip
GENERATE = Generate(items=[GenerateItem(ref=ref, sample=0) for ref in REFS], sampling=SAMPLING, version=2)
SCORE = ScoreBatch(
    items=[ScoreItem(ref=ref, prompt="", ground_truth=b"1", metadata=b"null", source="") for ref in REFS]
)
UPDATE = UpdatePolicy(refs=REFS, version=3, kl_coefficient=0.05)
HOST = HostBuffer(name="policy", nbytes=64, gpu="GPU-7")
SAVE = SaveState(step=3, path=f"{RUN}/checkpoints/step-3")
SAMPLE = FinishedSample(ref=REFS[0], length=4, finish_reason="stop", version_low=2, version_high=2)
RECEIPT = Receipt(transport="alias", identity="x", offsets=(), checksums=(), canary_logprobs=())
PROOF = Proof(version=3, checksums=(1,), canary_logprobs=(0.0, 0.0))
WORK = 7


def member(role: Role, epoch: int = 0, **said: Any) -> Member:
    hello = Hello(
        epoch=epoch, role=role, replica=0, identity=role, protocol=PROTOCOL, host="here", pid_space="here",
        pid=17, pid_start=1, **said,
    )  # fmt: skip
    return Member(role.encode(), hello, 0.0, ready=True)


def lease(task: Task, work: int = WORK) -> Lease:
    return Lease(epoch=2, work=work, step=3, phase="UPDATE", deadline_s=60.0, task=task)


def done(result: Any, work: int = WORK) -> Done:
    return Done(epoch=2, work=work, result=result, started=1.0, ended=2.0)


def finished(work: int = WORK, **changed: Any) -> SamplesFinished:
    return SamplesFinished(epoch=2, work=work, samples=[replace(SAMPLE, **changed)])


def committed(**changed: Any) -> UpdateCommitted:
    return UpdateCommitted(epoch=2, work=WORK, manifest=replace(MANIFEST, **changed))


def tensor(**changed: Any) -> UpdateCommitted:
    return committed(tensors=(replace(TENSOR, **changed),))


def hosted(**changed: Any) -> Done:
    return done(Hosted(handle=replace(HANDLE, **changed), created=True))


def score(ref: SlotRef) -> Score:
    return Score(ref=ref, reward=1.0, accuracy=1.0)


def applied() -> WeightsApplied:
    return WeightsApplied(epoch=2, work=WORK, version=3, receipt=RECEIPT)


REFUSED: list[tuple[Role, Task | None, Message, str]] = [
    ("reward", None, UpdateBegun(epoch=2, version=1), "a reward never sends UpdateBegun"),
    ("reward", SCORE, committed(), "a reward never sends UpdateCommitted"),
    ("critic", None, WeightsProved(epoch=2, proof=PROOF), "a critic never sends WeightsProved"),
    ("rollout", None, StateSaved(epoch=2, step=3, nbytes=1, seconds=0.0), "a rollout never sends StateSaved"),
    ("trainer", UPDATE, finished(), "a trainer never sends SamplesFinished"),
    ("critic", None, applied(), "a critic never sends WeightsApplied"),
    ("rollout", None, Ready(epoch=2, manifest=MANIFEST), "a rollout has no weights to commit"),
    ("rollout", None, done(Generated(samples=1, tokens=1)), "work 7, which it was never given"),
    ("rollout", GENERATE, done(Generated(samples=1, tokens=1), 8), "work 8, which it was never given"),
    ("rollout", None, Failed(epoch=2, work=WORK, kind="stale", message=""), "work 7, which it was never given"),
    ("rollout", None, finished(), "work 7, which it was never given"),
    ("rollout", None, applied(), "work 7, which it was never given"),
    ("trainer", None, committed(), "work 7, which it was never given"),
    ("rollout", GENERATE, finished(ref=SlotRef(6, 1)), r"slot 6 \(generation 1\) is not in its lease"),
    ("rollout", GENERATE, finished(ref=SlotRef(4, 3)), r"slot 4 \(generation 3\) is not in its lease"),
    ("rollout", GENERATE, finished(length=17), "slot 4: 17 tokens, expected at most 16"),
    ("rollout", GENERATE, finished(version_low=3, version_high=2), "slot 4: versions 3 to 2"),
    ("rollout", GENERATE, finished(version_high=9), "versions 2 to 9, its lease is for 2"),
    ("rollout", GENERATE, applied(), "a WeightsApplied is no answer to work 7: Generate"),
    ("reward", SCORE, done(Scores(scores=[score(SlotRef(6, 1))])), r"slot 6 \(generation 1\) is not in its lease"),
    ("reward", SCORE, done(Scores(scores=[score(REFS[0])] * 3)), "3 scores for 2 samples"),
    ("critic", Evaluate(refs=REFS), replace(done(Evaluated(tokens=1)), started=3.0), "before it started"),
    ("holder", HOST, hosted(handle=bytes(63)), "a CUDA handle of 63 bytes, expected 64 to 128"),
    ("holder", HOST, hosted(handle=bytes(129)), "a CUDA handle of 129 bytes"),
    ("holder", HOST, hosted(event=bytes(65)), "a CUDA event of 65 bytes, expected 64"),
    ("holder", HOST, hosted(counter=b""), "a counter's name of 0 bytes"),
    ("holder", HOST, hosted(gpu="GPU-8"), "64 bytes on GPU-8, expected 64 on GPU-7"),
    ("holder", HOST, hosted(nbytes=63), "63 bytes on GPU-7, expected 64"),
    ("trainer", SavePolicy(name="final", version=3), done(Saved(path="/etc/x", nbytes=1)), "'/etc/x' does not lie in"),
    ("trainer", SavePolicy(name="final", version=3), done(Saved(path=f"{RUN}/../x", nbytes=1)), "does not lie in"),
    ("trainer", UPDATE, committed(version=4), "it commits version 4 for work 7, expected 3"),
    ("trainer", SavePolicy(name="final", version=3), committed(), "it commits version 3 for work 7, expected None"),
    ("trainer", UPDATE, committed(path="/etc/passwd"), "'/etc/passwd' does not lie in"),
    ("trainer", UPDATE, committed(path=f"{SHARED}/../x"), "does not lie in"),
    ("trainer", UPDATE, committed(path=SHARED), "does not lie in"),
    ("trainer", UPDATE, committed(path=f"{SHARED}-other/policy"), "does not lie in"),
    ("trainer", UPDATE, tensor(name="../../x"), "this is no tensor's name"),
    ("trainer", UPDATE, tensor(name="/x"), "this is no tensor's name"),
    ("trainer", UPDATE, tensor(name="a\nb"), "this is no tensor's name"),
    ("trainer", UPDATE, tensor(dtype="object"), "dtype 'object', expected one of"),
    ("trainer", UPDATE, tensor(shape=(2**40, 2**40)), "but the set has 8192"),
    ("trainer", UPDATE, tensor(offset=8180), "16 bytes at offset 8180, but the set has 8192"),
    ("trainer", UPDATE, tensor(offset=4098), "16 bytes at offset 4098"),
    ("trainer", UPDATE, committed(tensors=(TENSOR, TENSOR)), "twice"),
    ("trainer", UPDATE, UpdateBegun(epoch=2, version=4), "version 4, which it was not asked for"),
    ("trainer", UPDATE, WeightsProved(epoch=2, proof=PROOF), "it proves version 3, and has committed nothing"),
    ("trainer", SAVE, StateSaved(epoch=2, step=2, nbytes=1, seconds=0.0), "state of step 2, which it was not"),
    ("trainer", None, Ready(epoch=2, manifest=replace(MANIFEST, path="/x")), "does not lie in"),
]  # fmt: skip


@pytest.mark.parametrize(("role", "task", "message", "why"), REFUSED)
def test_what_cannot_be_is_refused(role: Role, task: Task | None, message: Message, why: str) -> None:
    gate, replica = Gate(WELCOME), member(role)
    if task is not None:
        gate.sent(replica, lease(task))
    found = gate.check_in(replica, message)
    assert re.search(why, found), found


def test_an_honest_step_passes() -> None:
    gate = Gate(WELCOME)
    rollout, reward, critic, trainer, holder = map(member, ("rollout", "reward", "critic", "trainer", "holder"))

    def says(replica: Member, *messages: Message) -> None:
        for message in messages:
            assert gate.check_in(replica, message) == ""

    says(holder, Ready(epoch=2), Heartbeat(epoch=2, sent=1.0))
    says(trainer, WeightsWanted(epoch=2, request=1, name="policy", gpu="GPU-7", nbytes=64))
    gate.sent(holder, lease(HOST, 1))
    says(holder, done(Hosted(handle=HANDLE, created=True), 1))
    first = replace(MANIFEST, version=2)
    says(trainer, Ready(epoch=2, manifest=first, proof=replace(PROOF, version=2)))
    gate.sent(rollout, ApplyWeights(epoch=2, work=2, manifest=first))
    says(rollout, Ready(epoch=2), WeightsApplied(epoch=2, work=2, version=2, receipt=RECEIPT))
    gate.sent(rollout, lease(GENERATE, 3))
    says(rollout, finished(3), finished(3, ref=REFS[1]), done(Generated(samples=2, tokens=8), 3))
    gate.sent(reward, lease(SCORE, 4))
    says(reward, done(Scores(scores=[score(ref) for ref in REFS]), 4))
    gate.sent(critic, lease(Evaluate(refs=REFS), 5))
    says(critic, Failed(epoch=2, work=5, kind="error", message="no memory"))
    gate.sent(trainer, lease(UPDATE, 6))
    says(trainer, UpdateBegun(epoch=2, version=3), UpdateCommitted(epoch=2, work=6, manifest=MANIFEST))
    says(trainer, WeightsProved(epoch=2, proof=PROOF), Failed(epoch=2, work=0, kind="error", message="last words"))
    gate.sent(trainer, lease(SAVE, 7))
    says(trainer, StateSaved(epoch=2, step=3, nbytes=1, seconds=0.5))
    gate.sent(trainer, lease(RestoreState(step=2, path=f"{RUN}/checkpoints/step-2"), 8))
    says(
        trainer,
        UpdateCommitted(epoch=2, work=8, manifest=first),
        WeightsProved(epoch=2, proof=replace(PROOF, version=2)),
    )


def test_late_and_repeated_answers_pass_and_are_others_to_drop() -> None:
    gate, rollout = Gate(WELCOME), member("rollout")
    gate.sent(rollout, lease(GENERATE))
    for _ in range(3):
        assert gate.check_in(rollout, done(Generated(samples=2, tokens=8))) == ""
    assert gate.check_in(rollout, finished(ref=SlotRef(99, 1))) == "", "of work that is answered nobody takes samples"
    assert gate.check_in(rollout, Failed(epoch=2, work=WORK, kind="error", message="")) == ""


def test_work_of_an_earlier_coordinator_is_known_from_the_hello() -> None:
    gate, trainer = Gate(WELCOME), member("trainer", 1, leases_held=[5], leases_finished=[4])
    for work in (4, 5):
        assert gate.check_in(trainer, done(Evaluated(tokens=1), work)) == ""
    assert gate.check_in(trainer, UpdateBegun(epoch=2, version=9)) == ""
    assert gate.check_in(trainer, UpdateCommitted(epoch=2, work=5, manifest=MANIFEST)) == ""
    assert gate.check_in(trainer, StateSaved(epoch=2, step=1, nbytes=1, seconds=0.0)) == ""
    assert "never given" in gate.check_in(trainer, done(Evaluated(tokens=1), 6))


def test_one_members_work_is_not_anothers() -> None:
    gate, mine, other = Gate(WELCOME), member("rollout"), member("rollout")
    other.peer = b"other"
    gate.sent(mine, lease(GENERATE))
    assert "never given" in gate.check_in(other, done(Generated(samples=2, tokens=8)))
    assert gate.check_in(mine, done(Generated(samples=2, tokens=8))) == ""


def test_the_same_memory_does_not_get_other_tensors() -> None:
    gate, trainer = Gate(WELCOME), member("trainer")
    assert gate.check_in(trainer, Ready(epoch=2, manifest=replace(MANIFEST, version=2))) == ""
    gate.sent(trainer, lease(UPDATE))
    assert "other tensors than before in the same memory" in gate.check_in(trainer, tensor(offset=4352))
    assert gate.check_in(trainer, committed()) == ""


def test_a_refused_answer_fails_the_work_at_once_and_once() -> None:
    gate, reward = Gate(WELCOME), member("reward")
    gate.sent(reward, lease(SCORE))
    answer = done(Scores(scores=[score(SlotRef(6, 1))]))
    objection = gate.check_in(reward, answer)
    instead = gate.instead(reward, answer, objection)
    assert instead is not None
    assert (instead.work, instead.kind) == (WORK, "error")
    assert "slot 6" in instead.message
    assert gate.instead(reward, answer, objection) is None
    forged = done(Evaluated(tokens=1), 8)
    assert gate.instead(reward, forged, gate.check_in(reward, forged)) is None
    assert gate.instead(reward, committed(), "a reward never sends UpdateCommitted") is None


def test_memory_is_bounded() -> None:
    gate, rollout = Gate(WELCOME), member("rollout")
    for work in range(1, MOST_REMEMBERED + 10):
        gate.sent(rollout, lease(Evaluate(refs=[]), work))
        assert gate.check_in(rollout, done(Evaluated(tokens=1), work)) == ""
    assert "never given" in gate.check_in(rollout, done(Evaluated(tokens=1), 1))
    for request in range(MOST_REQUESTS):
        assert gate.check_in(rollout, WeightsWanted(epoch=2, request=request, name="policy", gpu="")) == ""
    more = WeightsWanted(epoch=2, request=MOST_REQUESTS, name="policy", gpu="")
    assert f"{MOST_REQUESTS} of its requests" in gate.check_in(rollout, more)
    gate.sent(rollout, WeightsDenied(epoch=2, request=0, reason=""))
    assert gate.check_in(rollout, more) == ""
    gate.left(rollout)
    assert "never given" in gate.check_in(rollout, done(Evaluated(tokens=1), MOST_REMEMBERED))
