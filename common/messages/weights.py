"""Weight sets: what a committed version is, what its writer proves, what an engine finds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.messages.base import Count, Index, Name, Part, PathName, Seconds, Transport, Version, Whole

TENSORS = Meta(max_length=2**18)
Canary = Meta(max_length=4096)
Handle = Annotated[bytes, Meta(max_length=4096)]


class TensorEntry(Part):
    """One tensor of a weight set: where it lies, in bytes from the start of the set's memory."""

    name: Name
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    offset: Count


class AdapterInfo(Part):
    """LoRA: what the engine must know beside the tensors. ``targets`` are names of projections."""

    rank: Index
    alpha: Index
    targets: Annotated[tuple[Name, ...], Meta(max_length=4096)]


class Manifest(Part):
    """A committed version of a weight set."""

    name: Name
    version: Version
    path: PathName
    """File with the set's state page; on CPU the tensors follow in it."""
    identity: Name
    """Names the memory itself: random bytes that lie in a GPU buffer, or the file's inode."""
    gpu: Name
    """UUID of the GPU whose memory holds the tensors; empty: the file does."""
    nbytes: Count
    tensors: Annotated[tuple[TensorEntry, ...], TENSORS]
    canary_ids: Annotated[tuple[Index, ...], Canary] = ()
    """Tokens whose logprobs writer and consumer both compute."""
    adapter: AdapterInfo | None = None
    """Set for a LoRA policy, whose adapter's tensors are named ``<module>.lora_A.weight`` and ``….lora_B.weight``."""

    @property
    def label(self) -> str:
        """For messages: ``policy@17``."""
        return f"{self.name}@{self.version}"


class Proof(Part):
    """What the writer of a version says of it. Computed beside the consumers' receipts, so it comes after the manifest.

    ``checksums`` are those of the manifest's tensors, in its order; ``canary_logprobs`` those of canary_ids[1:].
    """

    version: Version
    checksums: Annotated[tuple[Whole, ...], TENSORS]
    canary_logprobs: Annotated[tuple[float, ...], Canary]


class Receipt(Part):
    """An engine's proof that it runs a version: where each of its tensors lies, what it sums to, and what it computes.

    ``offsets`` and ``checksums`` are in the order of the manifest's tensors; an offset of -1 says that this tensor is
    the engine's own copy.
    """

    transport: Transport
    identity: Name
    offsets: Annotated[tuple[Whole, ...], TENSORS]
    checksums: Annotated[tuple[Whole, ...], TENSORS]
    canary_logprobs: Annotated[tuple[float, ...], Canary]
    unchecked: Annotated[tuple[Index, ...], TENSORS] = ()
    """Indices of tensors that the engine keeps in a form of its own: the canary alone proves them."""
    stale_tokens: Count = 0
    """Tokens of the canary that a prefix cache answered from before this version; must be 0."""
    copied_bytes: Count = 0
    held: Seconds = 0.0
    """``time.monotonic()`` when the engine held the version, before it proved it."""
    device_used_bytes: Count = 0
    """Memory of the engine's GPU in use by all processes, the KV cache being there again; 0 on CPU."""


HANDLE_BYTES, EVENT_BYTES, COUNTER_BYTES = range(64, 129), range(64, 65), range(1, 256)
"""CUDA_IPC_HANDLE_SIZE is 64; before a handle torch puts what kind it is, and a counter is a file's name. CUDA copies
64 bytes from wherever a handle lies: a shorter one would be read beyond its end."""


class CudaHandle(Part):
    """One export of a GPU buffer through CUDA IPC, for one consumer: what torch's storage gives, as plain values."""

    gpu: Name
    handle: Handle
    nbytes: Count
    offset: Count
    counter: Handle
    counter_offset: Count
    event: Handle
    event_sync: bool

    def wrong_length(self) -> str:
        """Which of the three is no handle by its length; empty where none."""
        for what, value, sizes in (
            ("CUDA handle", self.handle, HANDLE_BYTES), ("CUDA event", self.event, EVENT_BYTES),
            ("counter's name", self.counter, COUNTER_BYTES),
        ):  # fmt: skip
            if len(value) not in sizes:
                expected = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
                return f"a {what} of {len(value)} bytes, expected {expected}"
        return ""
