"""What scripted replicas write, commit, prove and export: known to the test as well."""

from __future__ import annotations

from common.messages import CudaHandle, HostBuffer, Manifest, Proof, TensorEntry


def tokens_of(sample: int) -> list[int]:
    """The response that a scripted rollout writes: its length and its tokens tell the sample."""
    return [5 + (sample + place) % 7 for place in range(1 + sample % 4)]


def committed(version: int, gpu: str = "") -> Manifest:
    tensors = (
        TensorEntry(name="embedding", dtype="float32", shape=(2, 2), offset=4096),
        TensorEntry(name="head", dtype="float32", shape=(2, 2), offset=4112),
    )
    return Manifest(
        name="policy", version=version, path="", identity="inode-17", gpu=gpu, nbytes=4128, tensors=tensors,
        canary_ids=(3, 1, 2),
    )  # fmt: skip


def proved(version: int) -> Proof:
    return Proof(version=version, checksums=(version, -version), canary_logprobs=(-1.5, -0.25))


def exported(task: HostBuffer, count: int) -> CudaHandle:
    """A handle as the holder would give it; the number in it tells one export from the next."""
    return CudaHandle(
        gpu=task.gpu, handle=(b"handle-%d" % count).ljust(66, b"\0"), nbytes=task.nbytes, offset=0, counter=b"counter",
        counter_offset=1, event=bytes(64), event_sync=True,
    )  # fmt: skip
