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
from tools.doctor.memory import GpuBuffer, Offer, first_line, missing
from tools.launch import package_environment

ROUND_TRIP_S = 120.0
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
    return found if errors(found) else [*found, *peers(), *round_trip()]


def cannot_lend(config: Config, found: list[Finding]) -> Finding | None:
    """Why this container has nothing to lend to others, by what ``examine`` has found; None where it has."""
    if not uses_gpu(config):
        return None
    if find_spec("torch") is None:
        return warning(
            "memory", "not tried with others: this image has no torch", "weights lie on a GPU",
            "--meet in containers of trainer, critic, rollout or holder",
        )  # fmt: skip
    if wrong := errors(found):
        return error(
            "memory", f"not tried with others: {wrong[0].check}: {wrong[0].found}", "weights lie on a GPU",
            "what is said there",
        )  # fmt: skip
    return None


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
        try:
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield ok(gpu_uuid(index), f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        except (RuntimeError, ReplicaError) as refused:
            yield error(
                f"GPU {index}", first_line(refused), "it computes nothing then",
                "another GPU by CUDA_VISIBLE_DEVICES, or see nvidia-smi for who uses it",
            )  # fmt: skip


def peers() -> Iterator[Finding]:
    import torch

    for one, other in permutations(range(torch.cuda.device_count()), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            yield warning(
                f"GPU {one} to {other}", "no peer access", "weights are copied through this host's memory",
                "services on one GPU, or GPUs that NVLink or one PCIe switch joins",
            )  # fmt: skip


def round_trip() -> Iterator[Finding]:
    """A buffer on each GPU, written to by another process that maps it by a handle: what every weight set rests on."""
    import torch

    buffers: list[GpuBuffer] = []
    for index in range(torch.cuda.device_count()):
        try:
            buffers.append(GpuBuffer(1 + index, index))
        except ReplicaError as refused:
            yield _broken(f"GPU {index}", str(refused))
    problems = written_elsewhere([Offer(buffer.value, buffer.handle) for buffer in buffers])
    for buffer, problem in zip(buffers, problems, strict=True):
        wrong = problem or missing(buffer)
        yield _broken(buffer.name, wrong) if wrong else ok(f"CUDA IPC on {buffer.name}", f"{buffer.kind} process")


def written_elsewhere(offers: list[Offer], within: float = ROUND_TRIP_S) -> list[str]:
    """What kept another process from writing into each of these, or nothing."""
    if not offers:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tools.doctor.writes"], input=msgspec.json.encode(offers),
            env=package_environment(), capture_output=True, timeout=within, check=True,
        )  # fmt: skip
        return msgspec.json.decode(done.stdout, type=list[str])
    except subprocess.TimeoutExpired:
        problem = f"no answer within {within:g} s"
    except subprocess.CalledProcessError as failed:
        said = failed.stderr.decode(errors="replace").strip().splitlines()
        problem = said[-1] if said else f"the other process ended with code {failed.returncode}"
    except (OSError, msgspec.DecodeError) as failed:
        problem = f"no answer: {failed}"
    return [problem] * len(offers)


def _broken(gpu: str, problem: str) -> Finding:
    return error(
        f"CUDA IPC on {gpu}", problem, "weights are shared between processes by it",
        "ipc and pid namespaces as in compose.yaml; a whole GPU instead of a part (MIG); no expandable segments",
    )  # fmt: skip
