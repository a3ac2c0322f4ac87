"""Checks that need no GPU and import no torch."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.config import Config
from common.config_values import cache_prompts, cache_slots, has_critic, uses_gpu
from common.models import ModelError, resolve_model
from common.processes import pid_space
from common.run_files import SHM_ROOT, SharedDirectory
from common.token_cache import Geometry
from common.token_cache.layout import Layout
from common.versions import library_versions
from tools.doctor.finding import Finding, error, ok, warning

MIB = 2**20
FEWEST_FILES = 1024
EXPANDABLE = "expandable_segments:true"
STATE_PER_BYTE = {"float32": 4, "bfloat16": 7}
"""A saved state of a learner, in bytes of its model's files: weights, float32 masters and two moments of AdamW."""


def model_bytes(config: Config) -> int:
    """Of the model's files on disk. Raises ModelError where it is not there."""
    return sum(file.stat().st_size for file in resolve_model(config.model.path).glob("*.safetensors"))


def model(config: Config) -> Iterator[Finding]:
    try:
        directory = resolve_model(config.model.path)
    except ModelError as problem:
        yield error("model", str(problem), "every service loads it", "model.path, or fetch it: quartet get-model")
        return
    nbytes = model_bytes(config)
    if nbytes:
        yield ok("model", f"{directory}, {nbytes / MIB:.0f} MiB")
    else:
        yield error(
            "model", f"{directory} has no *.safetensors", "weights are read from such files alone",
            "model.path: a directory with safetensors",
        )  # fmt: skip


def shared_memory(config: Config) -> Iterator[Finding]:
    geometry = Geometry(
        slots=cache_slots(config), max_prompt_tokens=config.prompts.max_tokens,
        max_response_tokens=config.rollout.max_new_tokens, prompts=cache_prompts(config),
    )  # fmt: skip
    tokens, weights = Layout.of(geometry).file_size, 0
    if not uses_gpu(config):
        try:
            weights = model_bytes(config)
        except ModelError:
            return  # told by its own check
    free = os.statvfs(SHM_ROOT).f_bavail * os.statvfs(SHM_ROOT).f_frsize
    found = f"{free / MIB:.0f} MiB free; token cache {tokens / MIB:.0f} MiB, weights {weights / MIB:.0f} MiB"
    if free < tokens + weights:
        yield error(
            str(SHM_ROOT), found, "both lie there", "QUARTET_SHM in .env (docker: shm_size), or a smaller cache.slots"
        )
    else:
        yield ok(str(SHM_ROOT), found)


def rights(config: Config) -> Iterator[Finding]:
    shared = SharedDirectory.of_run(config.run.name)
    try:
        yield ok("socket", shared.endpoint)
    except ValueError as problem:
        yield error("socket", str(problem), "replicas meet the coordinator there", "run.name")
    if not os.access(SHM_ROOT, os.W_OK | os.X_OK):
        yield error(str(SHM_ROOT), "not writable", "a run's socket and token cache are made there", "mode 1777")
    for path in (SHM_ROOT / f"quartet-{config.run.name}",):
        if path.exists() and path.stat().st_uid != os.geteuid():
            yield error(
                str(path), f"belongs to user {path.stat().st_uid}", "it is the run's own directory",
                "another run.name, or remove it as that user",
            )  # fmt: skip


def limits(config: Config) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < FEWEST_FILES:
        yield warning(
            "open files", f"at most {files}", f"sockets, mappings and pidfds; {FEWEST_FILES} are enough",
            "ulimit -n, or ulimits.nofile in compose.yaml",
        )  # fmt: skip
    else:
        yield ok("open files", f"at most {files}")
    folder = tempfile.gettempdir()
    if uses_gpu(config) and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        yield error(folder, "mounted noexec", "Triton loads what it compiles from there", "tmpfs: [/tmp:exec]")


def disk(config: Config) -> Iterator[Finding]:
    folder = next(
        path for path in (Path(config.run.directory), *Path(config.run.directory).resolve().parents) if path.exists()
    )
    try:
        learners = 2 if has_critic(config) else 1
        state = model_bytes(config) * STATE_PER_BYTE[config.model.dtype] * learners
    except ModelError:
        return
    wanted = state * (config.checkpoint.keep + 1)
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    found = f"{free / MIB:.0f} MiB free; a saved state takes about {state / MIB:.0f} MiB"
    if free < wanted:
        yield warning(
            str(folder), found, f"{config.checkpoint.keep} are kept (checkpoint.keep) while one more is written",
            "run.directory, or a smaller checkpoint.keep",
        )  # fmt: skip
    else:
        yield ok(str(folder), found)
    if not os.access(folder, os.W_OK):
        yield error(str(folder), "not writable", "the run's records are written there", "run.directory, or its owner")


def allocator(config: Config) -> Iterator[Finding]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if EXPANDABLE in value.lower():
            yield error(
                name, value, "memory of expandable segments cannot be exported by CUDA IPC", f"{name} without it"
            )


def place(config: Config) -> Iterator[Finding]:
    """To be compared between containers: those that share pids and memory say the same."""
    ipc = os.readlink("/proc/self/ns/ipc")
    yield ok("namespaces", f"{pid_space().split()[1]}, {ipc}")
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in library_versions().items()))


CHECKS = (model, shared_memory, rights, limits, disk, allocator, place)


def examine(config: Config) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(config)]
