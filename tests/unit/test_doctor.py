"""What the doctor finds, on hosts that are made to be ill."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.config import Config
from common.config_loading import load_config
from tools.cli import main
from tools.doctor import host
from tools.doctor.finding import Finding, errors
from tools.doctor.report import examine, lines


def config(*settings: str) -> Config:
    return load_config("tiny", settings)


def of(findings: list[Finding], check: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    return found


def test_a_host_that_is_well() -> None:
    findings = host.examine(config())
    assert errors(findings) == []
    assert {"model", "/dev/shm", "socket", "open files", "namespaces", "versions"} <= {one.check for one in findings}
    assert os.readlink("/proc/self/ns/ipc") in of(findings, "namespaces").found


def test_a_cache_larger_than_shared_memory() -> None:
    found = of(host.examine(config("cache.slots=100000000", "prompts.max_tokens=4096")), "/dev/shm")
    assert found.level == "error"
    assert "shm_size" in found.change


def test_a_model_that_is_not_there_and_one_without_weights(tmp_path: Path) -> None:
    found = of(host.examine(config("model.path=/none/such")), "model")
    assert (found.level, "/none/such" in found.found) == ("error", True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    found = of(host.examine(config(f"model.path={tmp_path}")), "model")
    assert found.level == "error"


def test_an_allocator_that_breaks_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    found = of(host.examine(config()), "PYTORCH_CUDA_ALLOC_CONF")
    assert (found.level, "CUDA IPC" in found.why) == ("error", True)


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_open_files(few_files: None) -> None:
    found = of(host.examine(config()), "open files")
    assert (found.level, found.found) == ("warning", "at most 256")


def test_states_that_do_not_fit_the_disk(tmp_path: Path) -> None:
    (found,) = [
        finding
        for finding in host.disk(config(f"run.directory={tmp_path}", "checkpoint.keep=1000000000"))
        if finding.level == "warning"
    ]
    assert "checkpoint.keep" in found.change


def test_a_run_directory_of_another_user(tmp_path: Path) -> None:
    found = host.rights(config("run.name=" + "x" * 40))
    assert of(list(found), "socket").level == "ok"


def test_a_gpu_that_is_asked_for_and_not_there() -> None:
    wanted = config()
    wanted = replace(wanted, trainer=replace(wanted.trainer, device="cuda:0"))
    if Path("/dev/nvidiactl").exists():
        assert examine(wanted)
        return
    found = of(examine(wanted), "GPU")
    assert (found.level, "compose.cpu.yaml" in found.change) == ("error", True)


def test_the_command_prints_lines_or_json_and_fails_on_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tiny"]) == 0
    assert "ok      model: " in capsys.readouterr().out
    assert main(["doctor", "tiny", "--set", "model.path=/none/such", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [entry["check"] for entry in found if entry["level"] == "error"] == ["model"]


def test_an_error_says_what_to_change() -> None:
    shown = lines(host.examine(config("model.path=/none/such")))
    place = next(number for number, line in enumerate(shown) if line.startswith("error"))
    assert shown[place + 1].strip().startswith("every service loads it; change: model.path")
