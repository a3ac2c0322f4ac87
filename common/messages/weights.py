"""Weight sets: what a committed version is, what its writer proves, what an engine finds."""

from __future__ import annotations

from common.messages.base import Part, Transport


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
