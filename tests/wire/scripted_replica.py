"""A real replica process whose computation is scripted: real sockets, real token cache, no model.

    scripted_replica.py ROLE NUMBER ENDPOINT FOLDER [WORD…]

Every lease is noted as a line of FOLDER/leases-ROLE-NUMBER; ``began`` when it is taken up, ``ended`` when it is done.
Words, PHASE being the phase of the lease (``APPLY`` for weights):

    block:PHASE     waits until FOLDER/go exists, then works          gil:SECONDS  keeps the interpreter lock on a lease
    die:PHASE       kills itself with SIGKILL on the lease            late:VALUE   writes VALUE instead of its tokens
    die-once:PHASE  the same, only the first process of the folder    after:N      misbehaves when N samples are done
    raise:PHASE     ValueError        stale:PHASE  LeaseFailed        drop:PHASE   closes its connection and lives on
    receipt:FIELD   a receipt that is wrong in this field             bad:KIND     scores "bad" prompts: error or nan
    wrong:PHASE     a result of another kind                          forget:N     reports all but the last N samples
    give-up:PHASE   ReplicaError, as of an engine that has died       save:late    writes states once FOLDER/go exists
    fail-load       raises while loading                              start:S      timeouts.start before the Welcome
    proof:late      proves a version once FOLDER/go exists            want:GPU     asks for the weights while loading
    want-again:GPU  asks for them in each APPLY                       size:BYTES   asks as their writer
    again           a trainer that finds an earlier one's weights     die-done:PHASE  dies with the work done, untold
    unsaved:STEP    cannot write the state of this step               unrestored:STEP cannot restore that of this step
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import uvloop

from common.config import Config, TimeoutsConfig
from common.messages import (
    NO_STATE,
    Evaluate,
    Evaluated,
    FinishedSample,
    Generate,
    Generated,
    HostBuffer,
    Hosted,
    Lease,
    Logprobs,
    LogprobsDone,
    Manifest,
    Proof,
    Receipt,
    RestoreState,
    Result,
    Saved,
    SavePolicy,
    SaveState,
    Score,
    ScoreBatch,
    Scores,
    Sleep,
    Slept,
    StateRestored,
    StateStaged,
    UpdateCritic,
    Updated,
    UpdatePolicy,
)
from common.models import resolve_model
from common.replica import Replica
from common.service import Assignment, LeaseFailed, Outbox, ReplicaError
from common.token_cache import TokenCache
from common.tokenizer import load_tokenizer
from tests.wire.scripted_values import committed, exported, proved, tokens_of

PATIENCE_S = 30.0
WRITES = {
    "rollout": frozenset({"response_ids", "response_mask", "behaviour_logprobs"}),
    "trainer": frozenset({"logprobs", "ref_logprobs"}),
    "critic": frozenset({"values", "bootstrap_value"}),
    "reward": frozenset[str](),
    "holder": frozenset[str](),
}


class Scripted:
    """Implements ``common.service.Service``."""

    replica: Replica

    def __init__(self, assignment: Assignment, folder: Path, words: dict[str, str]) -> None:
        if "fail-load" in words:
            raise RuntimeError("there is no such model")
        self.name = f"{assignment.role}-{assignment.replica}"
        self.role = assignment.role
        self.folder = folder
        self.words = words
        self.cache: TokenCache | None = None
        if assignment.cache_path:
            fingerprint = load_tokenizer(resolve_model("tiny")).fingerprint
            path = Path(assignment.cache_path)
            self.cache = TokenCache.attach(path, run=assignment.run, fingerprint=fingerprint, writes=WRITES[self.role])
        self.exports = 0
        self.held = NO_STATE if "again" in words else 0
        self.exchange = assignment.weights
        if "want" in words:
            self.want("want")

    def want(self, word: str) -> None:
        granted = self.exchange.want("policy", self.words[word], int(self.words.get("size", "0")))
        handle = "none" if granted.handle is None else granted.handle.handle.rstrip(b"\0").decode()
        version = "none" if granted.manifest is None else granted.manifest.version
        self.note(f"granted {handle} {version} {granted.created}")

    def ready(self) -> tuple[Manifest, Proof] | None:
        if self.role != "trainer" or self.held == NO_STATE:
            return None
        return committed(0, self.words.get("want", "")), proved(0)

    def state(self) -> int:
        return self.held

    def handle(self, lease: Lease, outbox: Outbox) -> Result:
        self.note(f"began {lease.phase} {lease.work}")
        if "gil" in self.words:
            ctypes.PyDLL(None).usleep(int(float(self.words["gil"]) * 1e6))  # PyDLL keeps the interpreter lock
        if "after" not in self.words:
            self.misbehave(lease.phase)
        result = self.compute(lease, outbox)
        if self.words.get("die-done") == lease.phase:
            os.kill(os.getpid(), signal.SIGKILL)
        self.note(f"ended {lease.phase} {lease.work}")
        return Evaluated(tokens=7) if self.words.get("wrong") == lease.phase else result

    def compute(self, lease: Lease, outbox: Outbox) -> Result:
        match lease.task:
            case Generate() as task:
                return self.generate(lease, task, outbox)
            case ScoreBatch() as task:
                unscored = [(item.prompt, Score(ref=item.ref, reward=0.0, accuracy=0.0)) for item in task.items]
                return Scores(scores=[self.score(prompt, score) for prompt, score in unscored])
            case Evaluate(refs=refs):
                return Evaluated(tokens=len(refs))
            case Logprobs(refs=refs):
                return LogprobsDone(tokens=len(refs))
            case UpdateCritic(refs=refs):
                self.held = lease.step
                return Updated(metrics={}, tokens=len(refs))
            case UpdatePolicy(refs=refs, version=version):
                outbox.update_begun(version)
                outbox.update_committed(lease.work, committed(version))
                if self.words.get("proof") == "late":
                    self.wait_for_go()
                outbox.weights_proved(proved(version))
                self.held = version
                return Updated(metrics={"loss": 0.5}, tokens=len(refs))
            case SavePolicy(name=name, version=version):
                self.note(f"saved {name}")
                return Saved(path=f"{name}@{version}", nbytes=0)
            case SaveState(step=step, path=path):
                return self.save_state(step, Path(path), outbox)
            case RestoreState(step=step, digest=digest):
                assert digest == (f"{self.role} {step}" if step else ""), f"of {step}, asked for {digest!r}"
                return self.restore_state(lease.work, step, outbox)
            case HostBuffer() as task:
                self.exports += 1
                return Hosted(handle=exported(task, self.exports), created=self.exports == 1)
            case Sleep():
                return Slept(used_before_bytes=0, used_after_bytes=0)

    def save_state(self, step: int, path: Path, outbox: Outbox) -> StateStaged:
        if self.words.get("unsaved") == str(step):
            outbox.state_saved(step, 0, 0.0, "the disk is full")
            return StateStaged(stall_s=0.5)
        (writing := threading.Thread(target=self.write_state, args=(step, path, outbox), daemon=True)).start()
        if self.words.get("save") != "late":
            writing.join()
        return StateStaged(stall_s=0.5)

    def write_state(self, step: int, path: Path, outbox: Outbox) -> None:
        if self.words.get("save") == "late":
            self.wait_for_go()
        (path / self.role).mkdir(parents=True)
        outbox.state_saved(step, 1 << 30, 0.25, digest=f"{self.role} {step}")

    def restore_state(self, work: int, step: int, outbox: Outbox) -> StateRestored:
        self.note(f"restored {step}")
        if self.words.get("unrestored") == str(step):
            raise ValueError("a checksum is wrong")
        if self.role == "trainer":
            outbox.update_committed(work, committed(step))
            outbox.weights_proved(proved(step))
        self.held = step
        return StateRestored(seconds=0.125)

    def generate(self, lease: Lease, task: Generate, outbox: Outbox) -> Generated:
        assert self.cache is not None
        reported = len(task.items) - int(self.words.get("forget", "0"))
        for count, item in enumerate(task.items):
            if self.words.get("after") == str(count):
                self.misbehave("GENERATE")
            tokens = tokens_of(item.sample)
            shown = [int(self.words["late"])] * len(tokens) if "late" in self.words else tokens
            self.cache.column("response_ids", item.ref)[: len(tokens)] = shown
            self.cache.column("response_mask", item.ref)[: len(tokens)] = 1
            done = FinishedSample(
                ref=item.ref, length=len(tokens), finish_reason="stop", version_low=task.version,
                version_high=task.version,
            )  # fmt: skip
            if count < reported:
                outbox.samples_finished(lease.work, [done])
        return Generated(samples=len(task.items), tokens=0)

    def score(self, prompt: str, score: Score) -> Score:
        """The reward is the sum of the response's tokens as this process sees them."""
        assert self.cache is not None
        self.note(str(score.ref.slot), "scored")
        if "bad" in self.words and prompt.startswith("bad"):
            if self.words["bad"] == "error":
                return msgspec.structs.replace(score, error="a scripted error")
            return msgspec.structs.replace(score, reward=math.nan)
        tokens = self.cache.response("response_ids", score.ref).tolist()
        return msgspec.structs.replace(score, reward=float(sum(tokens)), accuracy=1.0)

    def misbehave(self, phase: str) -> None:
        flag = self.folder / "died"
        if self.words.get("die") == phase or (self.words.get("die-once") == phase and not flag.exists()):
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.words.get("drop") == phase:
            self.replica.loop.call_soon_threadsafe(self.replica.dealer.close)
            time.sleep(PATIENCE_S)  # meant to hang: its lease runs out
        if self.words.get("block") == phase:
            self.wait_for_go()
        if self.words.get("raise") == phase:
            raise ValueError("a scripted exception")
        if self.words.get("give-up") == phase:
            raise ReplicaError("the engine's process has died")
        if self.words.get("stale") == phase:
            raise LeaseFailed("stale", "scripted to be stale")

    def wait_for_go(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (self.folder / "go").exists():
            assert time.monotonic() < deadline, "nobody said go"
            time.sleep(0.01)  # the interval of a poll with a deadline

    def apply_weights(self, manifest: Manifest) -> Receipt:
        self.note(f"began APPLY {manifest.version}")
        self.misbehave("APPLY")
        if "want-again" in self.words:
            self.want("want-again")
        proof, offsets = proved(manifest.version), tuple(tensor.offset for tensor in manifest.tensors)
        receipt = Receipt(
            transport="alias", identity=manifest.identity, offsets=offsets, checksums=proof.checksums,
            canary_logprobs=proof.canary_logprobs, held=time.monotonic(),
        )  # fmt: skip
        wrong = {
            "identity": "inode-18",
            "offsets": (4096, 4160),
            "checksums": (manifest.version, 99),
            "canary_logprobs": (-1.5, -0.75),
            "stale_tokens": 2,
        }
        field = self.words.get("receipt", "")
        self.note(f"ended APPLY {manifest.version}")
        return msgspec.structs.replace(receipt, **{field: wrong[field]}) if field else receipt

    def cache_counts(self) -> tuple[int, int]:
        return 3, 1

    def close(self) -> None:
        self.note("closed")

    def note(self, line: str, name: str = "") -> None:
        with (self.folder / (name or f"leases-{self.name}")).open("a") as file:
            file.write(line + "\n")


def main() -> int:
    role, number, endpoint, folder, *rest = sys.argv[1:]
    words = {name: value for name, _, value in (word.partition(":") for word in rest)}
    assert role in ("rollout", "reward", "critic", "trainer", "holder")

    def build(assignment: Assignment) -> Scripted:
        service = Scripted(assignment, Path(folder), words)
        service.replica = replica
        return service

    faulthandler.register(signal.SIGUSR1)  # as common.service_main does
    replica = Replica(role, int(number), endpoint, build)
    if "start" in words:
        replica.config = Config(timeouts=TimeoutsConfig(start=float(words["start"])))
    code = uvloop.run(replica.run())
    os._exit(code)  # as common.service_main does: a scripted computation may still be waiting


if __name__ == "__main__":
    main()
