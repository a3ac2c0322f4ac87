"""Weights from trainer to engine: what is copied, how long it takes, how much memory there is of them."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from common.messages import CudaHandle
from common.run_files import SharedDirectory
from common.run_lock import RunLock
from common.weights.receipts import problem
from tools.bench import weights_engine as engine
from tools.bench import weights_holder as holder
from tools.bench import weights_writer as writer
from tools.bench.actors import Actor, note
from tools.bench.record import BenchError
from tools.bench.shapes import SHAPES, model_directory

START_LIMIT_S = 300.0
UPDATES = 5
GIB = 2.0**30


def figures() -> dict[str, float]:
    """Engine vllm and a trainer's model as processes, the buffer with a holder of its own, random weights.

    On a GPU: Qwen2.5-7B's shape in bfloat16; on CPU a small one in float32, to rehearse. held_ms and first_lease_ms
    count from the end of the optimizer step to the engine holding the version, and to receipt and proof both being
    there and compared (medians of five updates); a run adds the bus, some 0.2 ms for each of three messages.
    weight_copies_ratio is (the set's bytes + what the engine has of its own) / the set's bytes; load_gib is by how much
    the GPU's memory in use grew while the engine's model was built. difference is the absolute one of engine's and
    trainer's logprobs in nats, gap how much likelier the trainer's best token is than the engine's greedy one. map_s is
    a new trainer's mapping of the old one's memory, its model being built without weights. copy_*: an engine with
    weights of its own, peak_extra_gib is what a copy allocates beside them.
    """
    with bench_of("7b", "small") as bench:
        bench.alias()
        bench.copies("copy", 0)
        return bench.figures


def copy_figures() -> dict[str, float]:
    """Copies of a weight set of Qwen2.5-0.5B's shape, bfloat16, into an engine on the same GPU that has weights of its
    own, at a publish (median of seven). On CPU a small shape in float32, to rehearse. weight_copies_ratio, load_gib and
    peak_extra_gib as in the benchmark weights.
    """
    with bench_of("0.5b", "smaller") as bench:
        bench.copies("copy_0.5b" if bench.on_gpu else "copy_smaller", 0)
        return bench.figures


def peer_copy_figures() -> dict[str, float]:
    """As the benchmark copy, but of Qwen2.5-7B's shape and to an engine on the host's second GPU."""
    if torch.cuda.device_count() < 2:
        raise BenchError(f"peer-copy takes two GPUs of one host; this process sees {torch.cuda.device_count()}")
    with bench_of("7b", "small") as bench:
        bench.copies("peer_copy", 1)
        return bench.figures


@contextmanager
def bench_of(gpu_shape: str, cpu_shape: str) -> Generator[Bench]:
    """A holder and a trainer's model of a shape; all of it is gone afterwards."""
    on_gpu = torch.cuda.is_available()
    shared = SharedDirectory.of_run(f"bench-{uuid.uuid4().hex[:8]}")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lock = RunLock.acquire(shared)  # or another run's start would take the directory for a dead run's
        stack.callback(lock.remove_directory)
        bench = Bench(gpu_shape if on_gpu else cpu_shape, root, shared.path / "policy", on_gpu, stack)
        bench.host()
        bench.start_writer()
        yield bench


@dataclass
class Bench:
    """The processes of one measurement."""

    shape: str
    root: Path
    path: Path
    on_gpu: bool
    stack: ExitStack
    figures: dict[str, float] = field(default_factory=dict[str, float])
    version: int = 0

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.on_gpu else "float32"

    def device(self, index: int = 0) -> str:
        return f"cuda:{index}" if self.on_gpu else "cpu"

    def actor(self, module: str) -> Actor:
        note(f"starts {module}")
        log = self.root / f"{module}-{uuid.uuid4().hex[:6]}.log"
        return self.stack.enter_context(Actor(f"tools.bench.{module}", log))

    # ------------------------------------------------------------ holder and writer

    def host(self) -> None:
        """Starts the holder; on CPU the writer's file is the memory and there is none."""
        if self.on_gpu:
            self.holder = self.actor("weights_holder")
            before = torch.cuda.mem_get_info(0)
            used = self.holder.ask(holder.Start(0), holder.Used)
            self.figures["holder_own_gib"] = (used.nbytes - (before[1] - before[0])) / GIB

    def export(self, name: str, nbytes: int) -> tuple[CudaHandle | None, bool]:
        if not self.on_gpu:
            return None, not self.path.exists()
        found = self.holder.ask(holder.Host(name, nbytes, 0), holder.Export)
        return found.handle, found.created

    def start_writer(self) -> None:
        self.directory = model_directory(self.shape, self.root)
        self.writer = self.actor("weights_writer")
        self.nbytes = self.writer.ask(writer.Size(str(self.directory), self.dtype), writer.Sized).nbytes
        self.manifest = self.build().manifest

    def build(self) -> writer.Built:
        handle, created = self.export(self.path.name, self.nbytes)
        note(f"builds a model of shape {self.shape}, {self.nbytes / GIB:.2f} GiB")
        order = writer.Build(str(self.directory), self.dtype, self.device(), str(self.path), handle, created)
        return self.writer.ask(order, writer.Built, START_LIMIT_S)

    def start_engine(self, transport: engine.Wanted, index: int, overrides: Sequence[str] = ()) -> Actor:
        actor = self.actor("weights_engine")
        handle, _ = self.export(self.path.name, self.nbytes)
        memory = 8192 if self.on_gpu else 64
        settings = [
            f"model.dtype={self.dtype}", "rollout.rows=64", "prompts.max_tokens=64", "rollout.max_new_tokens=64",
            f"rollout.vllm.kv_cache_mib={memory}", *overrides,
        ]  # fmt: skip
        log = str(self.root / f"engine-{transport}-{index}.log")
        order = engine.Start(str(self.directory), self.device(index), settings, self.manifest, handle, transport, log)
        note(f"starts engine vllm of shape {self.shape} by {transport} on {self.device(index)}")
        self.started = actor.ask(order, engine.Started, START_LIMIT_S)
        note(f"engine is there after {self.started.start_s:.0f} s")
        return actor

    def prove(self, actor: Actor) -> engine.Applied:
        """The committed version, applied and proved. Raises BenchError where the coordinator would refuse it."""
        proved = self.writer.ask(writer.Prove(), writer.Proved, START_LIMIT_S)
        applied = actor.ask(engine.Apply(self.version), engine.Applied)
        self.check(applied, proved)
        return applied

    def check(self, applied: engine.Applied, proved: writer.Proved) -> None:
        manifest = msgspec.structs.replace(self.manifest, version=self.version)
        if found := problem(manifest, proved.proof, applied.receipt):
            raise BenchError(f"the receipt of version {self.version} is wrong: {found}")

    # ------------------------------------------------------------ scenarios

    def alias(self) -> None:
        """One copy of the weights: updates, agreement, sleep, and a trainer that is killed and comes back."""
        self.figures["set_gib"] = self.nbytes / GIB
        actor = self.start_engine("alias", 0)
        self.figures |= {"engine_start_s": self.started.start_s, **self._copies("alias")}
        self.prove(actor)
        self._agree(actor, "before")
        self._updates(actor)
        self._agree(actor, "after")
        self._sleep(actor)
        self._kill_writer(actor)
        actor.kill()

    def copies(self, name: str, index: int) -> None:
        """An engine with weights of its own, copied at each version."""
        actor = self.start_engine("copy", index)
        self.prove(actor)
        copied = actor.ask(engine.Copy(self.version), engine.Copied)
        actor.kill()
        self.figures |= {
            f"{name}_ms": copied.median_ms, f"{name}_gib": copied.nbytes / GIB,
            f"{name}_peak_extra_gib": copied.peak_extra_bytes / GIB, **self._copies(name),
        }  # fmt: skip

    def _copies(self, name: str) -> dict[str, float]:
        facts = self.started.facts
        return {
            f"{name}_weight_copies_ratio": (self.nbytes + facts.own_bytes) / self.nbytes,
            f"{name}_load_gib": facts.load_bytes / GIB,
        }

    def _updates(self, actor: Actor) -> None:
        held: list[float] = []
        ready: list[float] = []
        checksums: list[float] = []
        copied = 0
        for _ in range(UPDATES):
            self.writer.tell(writer.Update())
            committed = self.writer.hear(writer.Committed)
            self.version = committed.version
            applied = actor.ask(engine.Apply(self.version), engine.Applied)
            proved = self.writer.hear(writer.Proved)
            comparing = time.monotonic()
            self.check(applied, proved)
            compared = time.monotonic() - comparing
            copied += applied.receipt.copied_bytes
            held.append((applied.receipt.held - committed.optimizer_done) * 1e3)
            ready.append((max(applied.done, proved.at) - committed.optimizer_done + compared) * 1e3)
            checksums.append(proved.checksum_ms)
        middle = UPDATES // 2
        self.figures |= {
            "alias_held_ms": sorted(held)[middle], "alias_held_max_ms": max(held), "alias_copied_gib": copied / GIB,
            "alias_first_lease_ms": sorted(ready)[middle], "alias_first_lease_max_ms": max(ready),
            "checksum_ms": sorted(checksums)[middle],
        }  # fmt: skip

    def _agree(self, actor: Actor, when: str) -> None:
        """What the engine samples against the trainer's own forward pass."""
        vocabulary = SHAPES[self.shape].vocabulary
        for kind, greedy in (("greedy", True), ("sampled", False)):
            samples = actor.ask(engine.Generate(16, 32, greedy, vocabulary), engine.Samples)
            order = writer.Compare(samples.prompts, samples.responses, samples.logprobs, 1.0)
            found = self.writer.ask(order, writer.Compared)
            name = f"{kind}_{when}_update"
            self.figures |= {f"{name}_difference_mean": found.mean, f"{name}_difference_max": found.largest}
            if greedy:
                self.figures |= {f"{name}_equal_ratio": found.greedy_equal_ratio, f"{name}_gap_max": found.gap}

    def _sleep(self, actor: Actor) -> None:
        slumber = actor.ask(engine.Sleep(), engine.Slumber)
        applied = self.prove(actor)
        self.figures |= {
            "sleep_ms": slumber.seconds * 1e3,
            "awake_used_gib": slumber.memory.used_before_bytes / GIB,
            "asleep_used_gib": slumber.memory.used_after_bytes / GIB,
            "woken_used_gib": applied.receipt.device_used_bytes / GIB,
        }
        self._agree(actor, "woken")

    def _kill_writer(self, actor: Actor) -> None:
        """The holder keeps the memory: the engine goes on, and a new trainer maps it again."""
        before = actor.ask(engine.Canary(), engine.Logprobs)
        self.writer.kill()
        after = actor.ask(engine.Canary(), engine.Logprobs)
        pairs = zip(before.values, after.values, strict=True)
        self.figures["holder_canary_difference_max"] = max(abs(one - other) for one, other in pairs)
        self.writer = self.actor("weights_writer")
        built = self.build()
        if built.manifest.version != self.version:
            raise BenchError(f"the new trainer found version {built.manifest.version}, expected {self.version}")
        self.figures["holder_map_s"] = built.map_s
        self.writer.tell(writer.Update())
        self.version = self.writer.hear(writer.Committed).version
        self.check(actor.ask(engine.Apply(self.version), engine.Applied), self.writer.hear(writer.Proved))
