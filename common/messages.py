"""Every message that travels between the coordinator and a replica.

Messages are frozen, tagged structs; unknown fields are refused. There is one union per direction: ``ToCoordinator`` and
``ToReplica``. What a lease asks for is a ``Task``; what comes back is a ``Result``. Tokens, logprobs and values never
travel in a message: they lie in the token cache, and messages name their slots.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

PROTOCOL = 2
"""Both sides must speak the same protocol version."""

Role = Literal["rollout", "reward", "critic", "trainer", "holder"]
Transport = Literal["alias", "copy"]
Phase = Literal["GENERATE", "SCORE", "EVALUATE", "ADVANTAGE", "UPDATE", "PUBLISH", "CHECKPOINT"]
FinishReason = Literal["stop", "length"]
FailureKind = Literal["error", "stale"]
"""``stale``: the lease asks for weights or slots that are no longer, or not yet, what it names."""


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages. ``epoch`` counts the coordinators of a run; 0 means not yet known."""

    epoch: int


class Part(Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what travels inside a message."""


# ---------------------------------------------------------------- parts


class SlotRef(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One sample's place in the token cache; the generation catches a reader with an old reference."""

    slot: int
    generation: int


class Sampling(Part):
    """How tokens are drawn. ``temperature`` 0 is not a value: greedy decoding is ``greedy=True``."""

    temperature: float
    max_new_tokens: int
    greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class GenerateItem(Part):
    """One sample to generate. ``sample`` is its index within the step: it decides row and random numbers."""

    ref: SlotRef
    sample: int


class ScoreItem(Part):
    """One response to score; the row's own ground truth and metadata go along as the JSON that they are."""

    ref: SlotRef
    prompt: str
    ground_truth: bytes
    metadata: bytes
    source: str


class FinishedSample(Part):
    """A sample whose last token has been written."""

    ref: SlotRef
    length: int
    finish_reason: FinishReason
    version_low: int
    version_high: int


class Score(Part):
    """The scorers' outcome for one sample: ``reward`` is the weighted sum, ``accuracy`` the first scorer's own score.

    ``error`` is set, and both numbers are 0, where the sample could not be scored.
    """

    ref: SlotRef
    reward: float
    accuracy: float
    error: str = ""


class TensorEntry(Part):
    """One tensor of a weight set: where it lies, in bytes from the start of the set's memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class AdapterInfo(Part):
    """LoRA: what the engine must know beside the tensors. ``targets`` are names of projections."""

    rank: int
    alpha: int
    targets: tuple[str, ...]


class Manifest(Part):
    """A committed version of a weight set."""

    name: str
    version: int
    path: str
    """File with the set's state page; on CPU the tensors follow in it."""
    identity: str
    """Names the memory itself: random bytes that lie in a GPU buffer, or the file's inode."""
    gpu: str
    """UUID of the GPU whose memory holds the tensors; empty: the file does."""
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    canary_ids: tuple[int, ...] = ()
    """Tokens whose logprobs writer and consumer both compute."""
    adapter: AdapterInfo | None = None
    """Set for a LoRA policy, whose adapter's tensors are named ``<module>.lora_A.weight`` and ``….lora_B.weight``."""


class Proof(Part):
    """What the writer of a version says of it. Computed beside the consumers' receipts, so it comes after the manifest.

    ``checksums`` are those of the manifest's tensors, in its order; ``canary_logprobs`` those of canary_ids[1:].
    """

    version: int
    checksums: tuple[int, ...]
    canary_logprobs: tuple[float, ...]


class Receipt(Part):
    """An engine's proof that it runs a version: where each of its tensors lies, what it sums to, and what it computes.

    ``offsets`` and ``checksums`` are in the order of the manifest's tensors; an offset of -1 says that this tensor is
    the engine's own copy.
    """

    transport: Transport
    identity: str
    offsets: tuple[int, ...]
    checksums: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    unchecked: tuple[int, ...] = ()
    """Indices of tensors that the engine keeps in a form of its own: the canary alone proves them."""
    stale_tokens: int = 0
    """Tokens of the canary that a prefix cache answered from before this version; must be 0."""
    copied_bytes: int = 0
    held: float = 0.0
    """``time.monotonic()`` when the engine held the version, before it proved it."""
    device_used_bytes: int = 0
    """Memory of the engine's GPU in use by all processes, the KV cache being there again; 0 on CPU."""


class CudaHandle(Part):
    """One export of a GPU buffer through CUDA IPC, for one consumer: what torch's storage gives, as plain values."""

    gpu: str
    handle: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


# ---------------------------------------------------------------- tasks (coordinator -> replica)


class Generate(Part):
    items: list[GenerateItem]
    sampling: Sampling
    version: int


class ScoreBatch(Part):
    items: list[ScoreItem]


class Evaluate(Part):
    """Critic: write ``values`` and ``bootstrap_value``. ``refs`` is one micro-batch in sample order."""

    refs: list[SlotRef]


class Logprobs(Part):
    """Trainer: write ``logprobs`` and, if asked for, ``ref_logprobs``. ``refs`` is one micro-batch in sample order."""

    refs: list[SlotRef]
    reference: bool


class UpdatePolicy(Part):
    """Trainer: one PPO update on the whole batch, in sample order, and publish it as ``version``."""

    refs: list[SlotRef]
    version: int
    kl_coefficient: float
    skip: bool = False
    """Publish without an update (critic warm-up)."""


class UpdateCritic(Part):
    refs: list[SlotRef]


class SavePolicy(Part):
    """Trainer: write the committed ``version`` to ``name`` in the run's checkpoints, as a Hugging Face directory."""

    name: str
    version: int


class Sleep(Part):
    """Rollout: give back the memory of the KV cache, and of copied weights, until weights are applied again."""


class HostBuffer(Part):
    """Holder: export the buffer of a weight set, allocating it on this GPU if there is none yet."""

    name: str
    nbytes: int
    gpu: str


Task = Generate | ScoreBatch | Evaluate | Logprobs | UpdatePolicy | UpdateCritic | SavePolicy | Sleep | HostBuffer


# ---------------------------------------------------------------- results (replica -> coordinator)


class Generated(Part):
    samples: int
    tokens: int


class Scores(Part):
    scores: list[Score]


class Evaluated(Part):
    tokens: int


class LogprobsDone(Part):
    tokens: int


class Updated(Part):
    """Policy or critic updated; metrics by name, already over the global batch."""

    metrics: dict[str, float]
    tokens: int


class Saved(Part):
    path: str
    nbytes: int


class Slept(Part):
    """Memory of the engine's GPU in use by all processes, before and after; 0 on CPU."""

    used_before_bytes: int
    used_after_bytes: int


class Hosted(Part):
    """``created`` is false where the buffer was there already: it holds what its last writer left."""

    handle: CudaHandle
    created: bool


Result = Generated | Scores | Evaluated | LogprobsDone | Updated | Saved | Slept | Hosted


# ---------------------------------------------------------------- both directions


class Heartbeat(Message):
    sent: float
    """``time.monotonic()`` of the sender; the same clock in all processes of a host."""


class Ack(Message):
    """Stops the repetition of ``Done``, ``Failed`` or ``WeightsApplied``, and of what else was said about this work."""

    work: int


# ---------------------------------------------------------------- replica -> coordinator


class Hello(Message):
    role: Role
    replica: int
    identity: str
    protocol: int
    host: str
    pid: int
    pid_start: int
    """Start time of the process in clock ticks since boot, so that a reused pid is not taken for it."""
    versions: dict[str, str] = {}
    leases_held: list[int] = []
    leases_finished: list[int] = []


class Ready(Message):
    """The model is loaded, the cache is mapped: leases may come. The trainer names its first committed weights."""

    manifest: Manifest | None = None
    proof: Proof | None = None


class WeightsWanted(Message):
    """Asks for the memory of a weight set. The writer gives its size, a consumer 0; ``gpu`` is the asker's, or empty.

    A consumer is answered as soon as the set has been committed, and on a GPU when trainer and critic are ready, so
    that engines take what is left.
    """

    request: int
    name: str
    gpu: str
    nbytes: int = 0


class SamplesFinished(Message):
    work: int
    samples: list[FinishedSample]


class Done(Message):
    work: int
    result: Result
    started: float
    ended: float
    """``time.monotonic()`` at the start and the end of the computation."""
    cache_hits: int = 0
    cache_misses: int = 0
    memory_bytes: int = 0


class Failed(Message):
    """Work came to nothing. With work 0: the replica itself gives up, and these are its last words."""

    work: int
    kind: FailureKind
    message: str


class UpdateBegun(Message):
    version: int


class UpdateCommitted(Message):
    work: int
    manifest: Manifest


class WeightsProved(Message):
    """The trainer's proof of the version that it committed before."""

    proof: Proof


class WeightsApplied(Message):
    work: int
    version: int
    receipt: Receipt


ToCoordinator = (
    Hello | Ready | WeightsWanted | Heartbeat | Ack | SamplesFinished | Done | Failed
    | UpdateBegun | UpdateCommitted | WeightsProved | WeightsApplied
)  # fmt: skip


# ---------------------------------------------------------------- coordinator -> replica


class Welcome(Message):
    run: str
    cache_path: str
    run_directory: str
    shm_directory: str
    config: bytes
    """The whole resolved config as JSON."""


class Refused(Message):
    reason: str


class Rehello(Message):
    """To a sender that this coordinator does not know: say Hello again, with what you hold and have finished."""


class Lease(Message):
    work: int
    step: int
    phase: Phase
    deadline_s: float
    """Seconds from receipt after which the coordinator hands the work to another replica."""
    task: Task


class ApplyWeights(Message):
    work: int
    manifest: Manifest


class WeightsGranted(Message):
    """Answer to WeightsWanted: a handle of its own for memory on a GPU, the manifest for a consumer.

    ``created`` tells a writer that the memory is new; otherwise it holds what the last writer left.
    """

    request: int
    handle: CudaHandle | None = None
    manifest: Manifest | None = None
    created: bool = True


class WeightsDenied(Message):
    request: int
    reason: str


class Stop(Message):
    reason: str


ToReplica = (
    Welcome | Refused | Rehello | Heartbeat | Ack | Lease | ApplyWeights | WeightsGranted | WeightsDenied | Stop
)  # fmt: skip
