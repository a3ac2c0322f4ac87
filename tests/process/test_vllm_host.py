"""What surrounds engine ``vllm`` in the service's process: its loop, its log, its environment. No engine is started."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.rollout.engines.choice import LEVEL, quiet_vllm
from services.rollout.engines.interface import EngineError
from services.rollout.engines.vllm.arguments import ENVIRONMENT, gpu_free_bytes, set_environment, visible_devices
from services.rollout.engines.vllm.host import LoopThread, Overdue, cancelled, last_lines, log_size
from tests.unit.model_support import CPU


@pytest.fixture(scope="module")
def thread() -> LoopThread:
    return LoopThread("test")


def test_a_deadline_is_told_from_a_jobs_own_timeout(thread: LoopThread) -> None:
    async def own() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        thread.run(own(), 10.0)
    with pytest.raises(Overdue, match="not within 0 s"):
        thread.run(asyncio.sleep(60.0), 0.05)


def test_cancelling_waits_for_what_a_job_still_has_to_do(thread: LoopThread) -> None:
    begun, seen = time.monotonic(), list[str]()

    async def tidy() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0.1)
            seen.append("tidied")

    async def stubborn() -> None:
        while time.monotonic() < begun + 20.0 and "released" not in seen:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                seen.append("ignored")

    async def ended() -> None:
        return None

    for job in (tidy, ended):
        task = thread.start(job())
        thread.run(asyncio.sleep(0.0), 10.0)
        thread.run(cancelled(task), 10.0)
        assert task.done()
    assert seen == ["tidied"]
    task = thread.start(stubborn())
    thread.run(asyncio.sleep(0.05), 10.0)
    with pytest.raises(Overdue):
        thread.run(cancelled(task), 0.2)
    assert seen[1:] == ["ignored"]
    seen.append("released")
    thread.run(cancelled(task), 10.0)


def test_a_process_that_has_ended_is_not_watched(thread: LoopThread) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(10.0)
        pid = process.pid
    with pytest.raises(ProcessLookupError):
        thread.when_ended(pid, lambda: None)


def test_the_last_lines_are_of_this_engine_alone(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert log_size(log) == 0
    log.write_text("ValueError: of the engine before\n" + "line\n" * 20)
    start = log_size(log)
    with log.open("a") as file:
        file.write("RuntimeError: of this one\n" + "more\n" * 20)
    assert last_lines(log, start) == "RuntimeError: of this one\n" + "\n".join(["more"] * 8)
    assert "ValueError: of the engine before" in last_lines(log)
    assert last_lines(log, log_size(log)) == ""


@pytest.mark.parametrize(
    ("given", "index", "expected"),
    [
        ("0,1,2", 1, "1,0,2"),
        (" 3 , 5 ", 1, "5,3"),
        ("GPU-a,GPU-b", 0, "GPU-a,GPU-b"),
        ("4,-1,5", 0, "4"),
        ("4,,5", 0, "4"),
    ],
)
def test_the_engines_gpu_comes_first(given: str, index: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices(index) == expected


@pytest.mark.parametrize(("given", "index", "count"), [("", 0, 0), ("-1", 0, 0), ("0,1", 2, 2), ("0,-1,1", 1, 1)])
def test_a_gpu_that_is_hidden_is_told(given: str, index: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(
        EngineError, match=rf"rollout\.device: .* GPU {index}, but CUDA_VISIBLE_DEVICES = '{given}' shows"
    ):
        visible_devices(index)


def test_a_driver_that_does_not_answer_is_told_with_what_to_do() -> None:
    with pytest.raises(EngineError, match=r"how much memory of GPU GPU-1 is free .*rollout\.vllm\.kv_cache_mib"):
        gpu_free_bytes("GPU-1")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_NUM_THREADS", *ENVIRONMENT)
    for name in names:
        monkeypatch.setenv(name, "the user's")
    set_environment(CPU, 2)
    assert {os.environ[name] for name in names} == {"the user's"}


@pytest.mark.parametrize("given", [None, "DEBUG"])
def test_vllm_is_quiet_while_it_is_imported_alone(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL, raising=False)
    if given is not None:
        monkeypatch.setenv(LEVEL, given)
    with quiet_vllm():
        assert os.environ[LEVEL] == "ERROR"
    assert os.environ.get(LEVEL) == given
