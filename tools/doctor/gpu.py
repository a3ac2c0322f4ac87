"""Checks of GPUs, by torch: what this container sees, and whether memory really crosses processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import msgspec

from common.config import Config
from common.config_values import gpu_present, uses_gpu
from common.service import ReplicaError
from tools.doctor.finding import Finding, error, errors, ok, warning
from tools.doctor.memory import GpuBuffer
from tools.launch import package_environment

ROUND_TRIP_S = 120.0
VALUE = 7
DRIVER = Path("/proc/driver/nvidia/version")


def examine(config: Config) -> list[Finding]:
    """Nothing for a run on the CPU."""
    if not uses_gpu(config):
        return []
    if find_spec("torch") is None:
        return [ok("GPU", "not looked at: this image has no torch")]
    if not gpu_present():
        return [
            error(
                "GPU", "no NVIDIA driver is seen, or CUDA_VISIBLE_DEVICES hides all GPUs", "the config asks for one",
                "a host with the NVIDIA runtime, or compose.cpu.yaml over compose.yaml",
            )
        ]  # fmt: skip
    found = list(seen())
    return found if errors(found) else [*found, *peers(), round_trip()]


def can_lend(config: Config, found: list[Finding]) -> bool:
    """Whether this container has the memory that weights would lie in, and nothing keeps others from it."""
    return not uses_gpu(config) or (find_spec("torch") is not None and not errors(found))


def seen() -> Iterator[Finding]:
    import torch

    from common.devices import gpu_uuid

    if not torch.cuda.is_available():
        yield error(
            "GPU", f"torch {torch.__version__} cannot use the driver", "it computes nothing then",
            "QUARTET_LOCK=requirements-gpu.lock and a driver that fits it, then build anew",
        )  # fmt: skip
        return
    if DRIVER.exists():
        yield ok("driver", DRIVER.read_text().partition("\n")[0].removeprefix("NVRM version: ").strip())
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield ok(gpu_uuid(index), f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")


def peers() -> Iterator[Finding]:
    import torch

    for one, other in permutations(range(torch.cuda.device_count()), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            yield warning(
                f"GPU {one} to {other}", "no peer access", "weights are copied through this host's memory",
                "services on one GPU, or GPUs that NVLink or one PCIe switch joins",
            )  # fmt: skip


def round_trip() -> Finding:
    """A buffer of this process, written to by another that maps it by a handle: what every weight set rests on."""
    buffer = GpuBuffer(VALUE)
    try:
        handle = msgspec.json.encode(buffer.handle()).decode()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tools.doctor.writes", handle, str(VALUE)], env=package_environment(),
            text=True, capture_output=True, timeout=ROUND_TRIP_S, check=False,
        )  # fmt: skip
        problem = "".join(done.stderr.strip().splitlines()[-1:]) or f"code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer within {ROUND_TRIP_S:g} s"
    except ReplicaError as refused:
        problem = str(refused)
    if problem or not buffer.arrived():
        return error(
            "CUDA IPC", problem or "what the other process wrote did not arrive",
            "weights are shared between processes by it",
            "ipc and pid namespaces as in compose.yaml; a whole GPU instead of a part (MIG)",
        )  # fmt: skip
    return ok("CUDA IPC", f"{buffer.kind} process")
