"""Checks that need no GPU and import no torch."""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.config import Config
from common.config_values import cache_prompts, cache_slots, uses_gpu
from common.models import ModelError, resolve_model
from common.processes import pid_space
from common.run_files import SHM_ROOT, SharedDirectory
from common.token_cache import Geometry
from common.token_cache.layout import Layout
from common.versions import library_versions
from tools.doctor.finding import Finding, error, ok, warning
from tools.doctor.sizes import held_bytes, model_bytes, state_bytes

MIB = 2**20
FEWEST_FILES = 1024
EXPANDABLE = "expandable_segments:true"


def model(config: Config) -> Iterator[Finding]:
    try:
        nbytes = model_bytes(config)
        yield ok("model", f"{resolve_model(config.model.path)}, {nbytes / MIB:.0f} MiB of weights")
    except ModelError as problem:
        yield error("model", str(problem), "every service loads it", "model.path, or fetch it: quartet get-model")


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
    # A coordinator that is started again finds its own files there, which it uses or replaces.
    held = held_bytes(SharedDirectory.of_run(config.run.name).path)
    free = free_bytes(SHM_ROOT)
    found = (
        f"{free / MIB:.0f} MiB free and {held / MIB:.0f} MiB held by this run; "
        f"token cache {tokens / MIB:.0f} MiB, weights {weights / MIB:.0f} MiB"
    )
    if free + held < tokens + weights:
        yield error(
            str(SHM_ROOT),
            found,
            "both lie there",
            "QUARTET_SHM in .env (docker: shm_size), a smaller cache.slots, or less of what others keep there",
        )
    else:
        yield ok(str(SHM_ROOT), found)


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def rights(config: Config) -> Iterator[Finding]:
    shared = SharedDirectory.of_run(config.run.name)
    try:
        yield ok("socket", shared.endpoint)
    except ValueError as problem:
        yield error("socket", str(problem), "replicas meet the coordinator there", "run.name")
    if not os.access(SHM_ROOT, os.W_OK | os.X_OK):
        yield error(str(SHM_ROOT), "not writable", "a run's socket and token cache are made there", "mode 1777")
    try:
        own = os.lstat(shared.path)
    except FileNotFoundError:
        return
    except OSError as problem:  # nobody gets into the folder above it
        yield error(str(shared.path), f"{problem.strerror}", "it is the run's own directory", "another run.name")
        return
    if not stat.S_ISDIR(own.st_mode):
        yield error(str(shared.path), "is not a directory", "it is the run's own", "another run.name, or remove it")
    elif own.st_uid != os.geteuid() and own.st_mode & stat.S_IXGRP:
        yield ok(str(shared.path), f"of user {own.st_uid}, who lets this one read the token cache")
    elif own.st_uid != os.geteuid():
        yield error(
            str(shared.path), f"belongs to user {own.st_uid}", "it is the run's own directory",
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
    wanted = Path(config.run.directory, config.run.name).resolve()
    folder = next(path for path in (wanted, *wanted.parents) if os.path.exists(path))
    writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    if not os.path.exists(config.run.directory) and not writable:
        yield warning(
            config.run.directory, "is not there", "the coordinator writes the run's records there, others need it not",
            "run.directory, or the volume ./runs",
        )  # fmt: skip
        return
    if not writable:
        yield error(
            str(folder), "not a folder that this user may write", "the run's records are written there",
            "run.directory, or its owner",
        )  # fmt: skip
    try:
        state = state_bytes(config)
    except ModelError:
        return  # told by its own check
    free = free_bytes(folder)
    found = f"{free / MIB:.0f} MiB free; a saved state takes about {state / MIB:.0f} MiB"
    if free < state * (config.checkpoint.keep + 1):
        yield warning(
            str(folder), found, f"{config.checkpoint.keep} are kept (checkpoint.keep) while one more is written",
            "run.directory, or a smaller checkpoint.keep",
        )  # fmt: skip
    else:
        yield ok(str(folder), found)


def allocator(config: Config) -> Iterator[Finding]:
    """Only the holder exports memory, and is started without: for all others it is a matter of choice."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if uses_gpu(config) and EXPANDABLE in value.replace(" ", "").lower():
            yield warning(
                name, value, "CUDA IPC cannot export memory of expandable segments, which the holder alone does",
                f"nothing under `quartet up` and compose.yaml, which start the holder without; else {name} for it",
            )  # fmt: skip


def place(config: Config) -> Iterator[Finding]:
    """To be compared between containers: those that share pids and memory say the same."""
    ipc = os.readlink("/proc/self/ns/ipc")
    yield ok("namespaces", f"{pid_space().split()[1]}, {ipc}")
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in library_versions().items()))


CHECKS = (model, shared_memory, rights, limits, disk, allocator, place)


def examine(config: Config) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(config)]
