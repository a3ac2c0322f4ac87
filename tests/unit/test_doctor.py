"""What the doctor finds, on hosts that are made to be ill."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from common.config import Config, OptimizerConfig
from common.config_loading import load_config
from common.devices import DeviceError, export_cuda
from common.learner import Learner
from common.messages import CudaHandle
from common.run_files import SHM_ROOT, SharedDirectory
from common.token_cache import Geometry
from common.token_cache.layout import Layout
from tests.conftest import ROOT
from tools.cli import main
from tools.doctor import gpu, host
from tools.doctor.finding import Finding, errors
from tools.doctor.host import MIB, free_bytes
from tools.doctor.memory import Offer
from tools.doctor.report import examine, lines
from tools.doctor.sizes import STATE, held_bytes, model_bytes, state_bytes


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


def test_what_the_run_itself_holds_counts_as_free(run_name: str) -> None:
    """A coordinator that is started again finds its token cache there. As many slots as memory has room for."""
    shared = SharedDirectory.of_run(run_name)
    shared.path.mkdir(mode=0o700)
    shared.weights.mkdir()
    (shared.weights / "policy").write_bytes(bytes(64 * MIB))
    with shared.tokens.open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert held_bytes(shared.path) == 64 * MIB
    one, two = (Layout.of(Geometry(slots, 4096, 4096, 1024)).file_size for slots in (1 << 10, 1 << 11))
    slots = (free_bytes(SHM_ROOT) + 32 * MIB - 2 * one + two) * (1 << 10) // (two - one)  # the file is linear in them
    large = ("prompts.max_tokens=4096", "rollout.max_new_tokens=4096", f"cache.slots={slots}", "cache.prompts=1024")
    mine = of(list(host.shared_memory(config(f"run.name={run_name}", *large))), "/dev/shm")
    other = of(list(host.shared_memory(config("run.name=none-such", *large))), "/dev/shm")
    assert (mine.level, other.level) == ("ok", "error"), (mine, other)


def without_weights(folder: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def test_a_model_that_is_not_there_and_one_without_weights(tmp_path: Path) -> None:
    found = of(host.examine(config("model.path=/none/such")), "model")
    assert (found.level, "/none/such" in found.found) == ("error", True)
    found = of(host.examine(config(f"model.path={without_weights(tmp_path)}")), "model")
    assert (found.level, f"{tmp_path} holds no weights" in found.found) == ("error", True)


def test_weights_are_counted_in_the_type_that_they_are_loaded_in(tmp_path: Path) -> None:
    """Whatever their type on disk: 1000 numbers; a saved state adds masters, where they are separate, and moments."""
    model = f"model.path={without_weights(tmp_path)}"
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {"a": torch.zeros(30, 30, dtype=dtype), "b": torch.zeros(100, dtype=dtype)}
        save_file(tensors, tmp_path / "model.safetensors")
        assert model_bytes(config(model, "model.dtype=float32")) == 4000
        assert model_bytes(config(model, "model.dtype=bfloat16")) == 2000
    assert state_bytes(config(model, "ppo.advantage=grpo", "model.dtype=bfloat16")) == 14000
    assert state_bytes(config(model, "ppo.advantage=gae", "model.dtype=bfloat16")) == 28000
    assert state_bytes(config(model, "ppo.advantage=grpo", "model.dtype=float32")) == 12000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_has_the_bytes_that_the_learner_gives_it(dtype: str) -> None:
    layer = torch.nn.Linear(100, 100, bias=False, dtype=getattr(torch, dtype))
    learner = Learner(layer, OptimizerConfig(), 1)
    assert layer.weight.nbytes + learner.full_bytes() == STATE[dtype] * 100 * 100 + 4  # AdamW's count of steps


def test_files_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    without_weights(tmp_path)
    for name in ("shard-1", "shard-2", "consolidated"):
        save_file({"a": torch.zeros(100)}, tmp_path / f"{name}.safetensors")
    weights = {"a": "shard-1.safetensors", "b": "shard-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    assert model_bytes(config(f"model.path={tmp_path}", "model.dtype=float32")) == 800
    (tmp_path / "shard-2.safetensors").unlink()
    found = of(host.examine(config(f"model.path={tmp_path}")), "model")
    assert (found.level, f"{tmp_path}/shard-2.safetensors: No such file" in found.found) == ("error", True)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    found = of(host.examine(config(f"model.path={tmp_path}")), "model")
    assert (found.level, "model.safetensors.index.json is damaged" in found.found) == ("error", True)


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def safetensors(header: bytes, data: int = 8) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(data)


@pytest.mark.parametrize(
    ("content", "how"),
    [
        (b"version https://git-lfs.github.com/spec/v1", "do not begin with a header"),
        (b"", "do not begin with a header"),
        (safetensors(HEADER[:-1]), "its header cannot be read"),
        (safetensors(b'["a"]'), "its header cannot be read"),
        (safetensors(HEADER.replace(b"[2]", b'"2"')), "its header cannot be read"),
        (safetensors(HEADER.replace(b"F32", b"\xff\xfe")), "its header cannot be read"),
        (safetensors(HEADER.replace(b"[2]", b"[-2]")), "its header cannot be read"),
        (safetensors(HEADER, 7), "it has 69 bytes, its header says 70"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, how: str) -> None:
    file = without_weights(tmp_path) / "model.safetensors"
    file.write_bytes(safetensors(HEADER))
    assert of(host.examine(config(f"model.path={tmp_path}")), "model").level == "ok"
    file.write_bytes(content)
    found = host.examine(config(f"model.path={tmp_path}"))
    assert [one.check for one in errors(found)] == ["model"]
    assert f"{file} is damaged: " in of(found, "model").found
    assert how in of(found, "model").found


def on_a_gpu() -> Config:
    wanted = config()
    return replace(wanted, trainer=replace(wanted.trainer, device="cuda:0"))


def test_an_allocator_that_breaks_ipc_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder alone exports, and is started without."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    found = of(list(host.allocator(on_a_gpu())), "PYTORCH_CUDA_ALLOC_CONF")
    assert (found.level, "CUDA IPC" in found.why) == ("warning", True)
    assert list(host.allocator(config("rollout.device=cpu", "trainer.device=cpu", "critic.device=cpu"))) == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert list(host.allocator(on_a_gpu())) == []


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


DISK = """
import os
import sys
import msgspec
from common.config_loading import load_config
from tools.doctor import host
config = load_config("tiny", ["model.path=/none/such", f"run.directory={sys.argv[1]}"])
os.setgroups([])
os.setgid(1)
os.setuid(1)
print(msgspec.json.encode(list(host.disk(config))).decode())
"""


@pytest.mark.parametrize(
    ("directory", "level", "words"),
    [("/usr", "error", "may write"), ("/usr/quartet-runs", "warning", "is not there")],
)
def test_records_that_cannot_be_written_though_there_is_no_model_either(directory: str, level: str, words: str) -> None:
    """Rights mean nothing to root, so another user tries. Only the coordinator's container has the folder of runs."""
    command = [sys.executable, "-c", DISK, directory]
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    (found,) = json.loads(tried.stdout)
    assert (found["level"], words in found["found"]) == (level, True)


def test_records_in_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    found = errors(list(host.disk(config(f"run.directory={tmp_path}/runs"))))
    assert [one.check for one in found] == [f"{tmp_path}/runs"]


def test_a_run_directory_of_another_user_or_that_is_none(run_name: str, tmp_path: Path) -> None:
    mine, path = config(f"run.name={run_name}"), SharedDirectory.of_run(run_name).path
    path.symlink_to(tmp_path)
    link = of(list(host.rights(mine)), str(path))
    path.unlink()
    path.mkdir(mode=0o700)
    assert errors(list(host.rights(mine))) == []
    os.chown(path, 4242, 4242)
    found = list(host.rights(mine))
    os.chown(path, os.geteuid(), -1)
    others = of(found, str(path))
    assert (link.level, link.found) == ("error", "is not a directory")
    assert (others.level, others.found) == ("error", "belongs to user 4242")


def test_a_name_that_makes_no_socket() -> None:
    named = config()
    assert of(list(host.rights(named)), "socket").level == "ok"
    named = replace(named, run=replace(named.run, name="x" * 100))
    found = of(list(host.rights(named)), "socket")
    assert (found.level, "longer than 107 bytes" in found.found, found.change) == ("error", True, "run.name")


def test_a_gpu_that_is_asked_for_and_not_there() -> None:
    wanted = on_a_gpu()
    if Path("/dev/nvidiactl").exists():
        assert examine(wanted)
        return
    found = of(examine(wanted), "GPU")
    assert (found.level, "compose.cpu.yaml" in found.change) == ("error", True)


def test_memory_that_cannot_be_exported_is_a_device_error() -> None:
    """A tensor that is on a GPU by name alone: torch refuses with a RuntimeError."""
    with FakeTensorMode():
        tensor = torch.empty(4, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(DeviceError, match="cannot export 4 bytes of cuda:0 by CUDA IPC"):
        export_cuda(tensor)


def test_the_other_process_answers_for_each_handle() -> None:
    """GPUs that nobody has: each is refused by its own name."""
    parts = (bytes(64), 4, 0, b"", 0, b"", False)
    offers = [Offer(1, CudaHandle(f"GPU-none-{number}", *parts)) for number in range(3)]
    problems = gpu.written_elsewhere(offers)
    assert len(problems) == 3
    assert all(problem.startswith("DeviceError: memory of GPU 'GPU-none-") for problem in problems), problems
    assert gpu.written_elsewhere([Offer(1)]) == ["neither a handle nor a file was given"]
    assert gpu.written_elsewhere([]) == []


def test_the_other_process_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.written_elsewhere([Offer(1)] * 2, within=0.001) == ["no answer within 0.001 s"] * 2
    monkeypatch.setattr(sys, "executable", "/none/such")
    (problem,) = gpu.written_elsewhere([Offer(1)])
    assert "no answer: " in problem
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert gpu.written_elsewhere([Offer(1)]) == ["the other process ended with code 1"]


def test_one_that_has_no_memory_to_lend_says_so() -> None:
    assert gpu.cannot_lend(config("rollout.device=cpu", "trainer.device=cpu", "critic.device=cpu"), []) is None
    assert gpu.cannot_lend(on_a_gpu(), []) is None
    refused = gpu.cannot_lend(on_a_gpu(), [Finding("GPU", "error", "broken", "why", "change")])
    assert refused is not None
    assert (refused.level, refused.found) == ("error", "not tried with others: GPU: broken")


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
