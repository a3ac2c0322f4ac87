"""Where models come from: embedded, fetched, a directory, the hub; and what get-model writes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from common.config_loading import PRESETS
from common.models import ModelError, models_folder, resolve_model
from common.tokenizer import load_tokenizer
from tools.get_model import check_answer, convert_gguf, get_model

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(PRESETS, "tiny", "model")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "models"
    monkeypatch.setenv("QUARTET_MODELS", str(path))
    return path


def make(directory: Path, *names: str) -> Path:
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_text("{}")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as fetching one repository, ``owner/tiny``, needs."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _answer(self, body: bool) -> None:
        files = {path.name: path.read_bytes() for path in TINY.iterdir()}
        files["pytorch_model.bin"] = b"not wanted"
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/tiny/tree/"):
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()
            ]
            self._send(200, json.dumps(listing).encode(), body)
        elif path.startswith("/api/models/owner/tiny"):
            siblings = [{"rfilename": name} for name in files]
            facts = {"id": "owner/tiny", "modelId": "owner/tiny", "sha": COMMIT, "private": False, "tags": []}
            self._send(200, json.dumps({**facts, "downloads": 0, "siblings": siblings}).encode(), body)
        elif path.startswith("/owner/tiny/resolve/") and path.rpartition("/")[2] in files:
            self._send(200, files[path.rpartition("/")[2]], body)
        else:
            self._send(404, b"{}", body)

    def _send(self, status: int, data: bytes, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def in_process(code: str, tmp_path: Path, **environment: str) -> str:
    """Runs code in a new process, since the hub's library reads its settings when it is imported."""
    scene = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=scene, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_embedded_model() -> None:
    assert resolve_model("tiny") == TINY
    assert load_tokenizer(TINY).encode("1+1=")


def test_the_models_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_folder() == folder
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("QUARTET_MODELS", "")
    assert models_folder() == Path("/somewhere/.cache/quartet/models")


def test_a_fetched_model_and_a_directory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = make(folder / "smollm2", "config.json", "model.safetensors")
    assert resolve_model("smollm2") == fetched
    nested = make(folder / "owner" / "model", "config.json", "model-00001-of-00002.safetensors")
    assert resolve_model("owner/model") == nested
    own = make(tmp_path / "own", "config.json", "model.safetensors")
    assert resolve_model(str(own)) == own
    monkeypatch.chdir(tmp_path)
    assert resolve_model("own") == own
    assert resolve_model("./own") == own


def test_missing_models_say_what_to_run(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: 'smollm2' is no .*run: quartet get-model smollm2"):
        resolve_model("smollm2")
    with pytest.raises(ModelError, match="is no embedded model"):
        resolve_model("/no/such/directory")
    with pytest.raises(ModelError, match=r"holds no model \(no config\.json"):
        resolve_model(str(make(tmp_path / "a")))
    with pytest.raises(ModelError, match="holds no weights"):
        resolve_model(str(make(tmp_path / "b", "config.json")))
    with pytest.raises(ModelError, match="neither 'smollm2' nor a hub id"):
        get_model("smolm2")
    assert not list(folder.iterdir())


def test_a_hub_id_is_fetched_when_it_is_used(hub: str, tmp_path: Path) -> None:
    code = "from common.models import resolve_model; print(resolve_model('owner/tiny'))"
    found = Path(in_process(code, tmp_path, HF_ENDPOINT=hub))
    assert contents(found) == contents(TINY)
    assert load_tokenizer(found).fingerprint == load_tokenizer(TINY).fingerprint
    assert not (found / "pytorch_model.bin").exists()


def test_get_model_puts_a_hub_id_into_the_models_folder(hub: str, tmp_path: Path, folder: Path) -> None:
    code = "from tools.get_model import get_model; print(get_model('owner/tiny'))"
    assert in_process(code, tmp_path, HF_ENDPOINT=hub) == str(folder / "owner" / "tiny")
    assert resolve_model("owner/tiny") == folder / "owner" / "tiny"
    assert [path.name for path in (folder / "owner").iterdir()] == ["tiny"]
    assert contents(folder / "owner" / "tiny") == contents(TINY)
    # A second call needs no hub.
    assert in_process(code, tmp_path, HF_HUB_OFFLINE="1") == str(folder / "owner" / "tiny")


def test_a_hub_that_does_not_have_it_or_is_not_there(hub: str, tmp_path: Path, folder: Path) -> None:
    code = (
        "from common.models import ModelError, resolve_model\nfrom tools.get_model import get_model\n"
        "for call in (resolve_model, get_model):\n"
        "    try: call('owner/other')\n    except ModelError as error: print(error)"
    )
    for environment in ({"HF_ENDPOINT": hub}, {"HF_HUB_OFFLINE": "1"}):
        lines = in_process(code, tmp_path, **environment).splitlines()
        assert len(lines) == 2
        for line in lines:
            assert "'owner/other' is no directory, and fetching it from the hub failed" in line
    assert not list((folder / "owner").iterdir())


def write_gguf(path: Path) -> None:
    """A two-layer llama with random weights and a byte vocabulary, as GGUF."""
    import gguf
    import numpy as np

    width, inner, layers, tokens = 64, 96, 2, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "ĠĠ"]
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>")
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    for layer in range(layers):
        inside = {"attn_q": (width, width), "attn_k": (32, width), "attn_v": (32, width), "attn_output": (width, width)}
        inside |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
        inside |= {"attn_norm": (width,), "ffn_norm": (width,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in inside.items()}
    for name, shape in shapes.items():
        data = random.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 2:
            writer.add_tensor(
                f"{name}.weight",
                gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0),
                raw_dtype=gguf.GGMLQuantizationType.Q8_0,
            )
        else:
            writer.add_tensor(f"{name}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gguf_is_an_ordinary_directory(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "small.gguf")
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(tmp_path / "small.gguf", target)
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    tokenizer = load_tokenizer(target)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.decode(tokenizer.encode("a  1 12")) == "a  1 12"
    # Digits are taken one by one: the spaces before one stay together, instead of one of them going to the digit.
    assert tokenizer.encode("a  1")[1:2] == tokenizer.encode("  ")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|><|im_start|>"
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": "small.gguf"}
    original: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    converted: Any = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("what is 1+2")])
    with torch.inference_mode():
        expected, found = original(ids).logits, converted(ids).logits
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    with pytest.raises(ModelError, match=r"asked 'What is 2\+3\?' the model answers .*the conversion is wrong"):
        check_answer(target)
