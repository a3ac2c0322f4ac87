"""Engine ``vllm`` on other models than preset tiny's, on a wrong manifest, and killed: with its service or without."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import torch

from common.processes import descendants, process_start
from common.weights.receipts import OWN_COPY, problem
from services.rollout.engines.interface import EngineDead
from tests.process.vllm_driver import EXCHANGED, OUTCOME, Outcome
from tests.process.vllm_support import CLOSE, WIDE, EnginePair, engine_pair, prompts, sampled
from tests.unit.model_support import random_model
from tests.unit.weights_support import fused_model

ENDED_WITHIN = 15.0
STARTED_WITHIN = 110.0
DRIVER = Path(__file__).with_name("vllm_driver.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def untied(folder: Path) -> Iterator[EnginePair]:
    """Qwen2: biases on q, k and v, a head of its own, 97 tokens that vLLM pads to 128; the transport is chosen."""
    fused_model("qwen2", **WIDE, tie_word_embeddings=False).save_pretrained(folder / "untied")
    with engine_pair(f"model.path={folder / 'untied'}") as pair:
        yield pair


@pytest.fixture(scope="module")
def unknown(folder: Path) -> Iterator[EnginePair]:
    """A family whose layout in vLLM nobody has written down."""
    random_model("gpt2", hidden_size=128, max_position_embeddings=128).save_pretrained(folder / "gpt2")
    with engine_pair(f"model.path={folder / 'gpt2'}") as pair:
        yield pair


@pytest.fixture(scope="module")
def uneven() -> Iterator[EnginePair]:
    """Preset tiny's family, whose layout is known; but the trainer keeps two norms in another dtype than the engine."""

    def change(model: Any) -> None:
        for norm in (model.model.norm, model.model.layers[1].input_layernorm):
            norm.to(torch.bfloat16)

    with engine_pair(change=change) as pair:
        yield pair


# ---------------------------------------------------------------- other models


def test_an_untied_head_with_padding_is_shared_as_well(untied: EnginePair) -> None:
    receipt = untied.apply()
    assert untied.engine.facts.transport == receipt.transport == "alias"
    names = [entry.name for entry in untied.commit().tensors]
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"} <= set(names)
    assert not untied.engine.call_worker("quartet_test_tied")
    offsets = untied.engine.call_worker("quartet_test_offsets")
    assert offsets["lm_head.weight"] == receipt.offsets[names.index("lm_head.weight")]
    assert set(offsets.values()) <= set(receipt.offsets)


def test_biases_and_a_head_of_its_own_compute_what_the_trainer_does(untied: EnginePair) -> None:
    untied.require_same_computing()


def test_a_family_that_is_not_known_is_copied_and_says_why(unknown: EnginePair) -> None:
    facts = unknown.engine.facts
    assert facts.transport == "copy"
    assert facts.why_copy.startswith("layout not known: GPT2LMHeadModel is not one of LlamaForCausalLM, ")
    receipt = unknown.apply()
    assert unknown.worst_difference(prompts(8), sampled()) < CLOSE
    unknown.update()
    assert unknown.apply().unchecked == receipt.unchecked
    assert unknown.worst_difference(prompts(8), sampled()) < CLOSE
    names = [entry.name for entry in unknown.commit().tensors]
    unchecked = {names[index] for index in receipt.unchecked}
    assert 0 < len(unchecked) < len(names), "what vLLM keeps under the same name and shape is checked"
    assert receipt.copied_bytes > 0
    assert set(receipt.offsets) == {OWN_COPY}


def test_a_known_family_with_an_odd_tensor_is_built_anew_and_copied(uneven: EnginePair) -> None:
    facts = uneven.engine.facts
    assert (facts.transport, facts.reloads) == ("copy", True)
    assert re.fullmatch(r"layout not known: 'model\.\S+norm\.weight' is not float32 as the engine's .*", facts.why_copy)
    uneven.require_same_computing()
    manifest = uneven.commit()
    unchecked = {manifest.tensors[index].name for index in uneven.apply().unchecked}
    odd = {entry.name for entry in manifest.tensors if entry.dtype == "bfloat16"}
    assert len(odd) == 2
    assert odd <= unchecked


def test_an_unknown_family_is_still_proved_where_it_can_be(unknown: EnginePair) -> None:
    manifest, proof = unknown.update()
    unknown.spoil("transformer.ln_f.weight", 3, 1e-6)
    found = problem(manifest, proof, unknown.engine.apply_weights(manifest))
    assert found.startswith("its tensor transformer.ln_f.weight has checksum")
    unknown.mend()
    unknown.spoil("transformer.h.0.attn.c_attn.weight", 3, 3.0)
    found = problem(manifest, proof, unknown.engine.apply_weights(manifest))
    assert "its logprob of canary token" in found, "a tensor without a checksum is the canary's"
    unknown.mend()
    unknown.apply()


# ---------------------------------------------------------------- deaths; each ends its engine, so they come last


def test_a_killed_engine_is_a_death_with_its_last_words(untied: EnginePair, wait_until: Callable[..., None]) -> None:
    """In the middle of generating: long responses, many of them."""
    untied.apply()
    pid = untied.engine.facts.pid
    started = process_start(pid)
    batches = untied.engine.generate(prompts(200), sampled(), untied.version)
    next(batches)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDead) as died:
        for _ in batches:
            pass
    wait_until(lambda: process_start(pid) != started, "the end of the engine's process", ENDED_WITHIN)
    for error in (died.value, _death_in_an_update(untied)):
        text = str(error)
        assert text.startswith("the vLLM engine died; the end of its log, ")
        assert str(untied.log) in text
        assert text.splitlines()[-1] in untied.log.read_text()  # which may have grown since
        assert re.search(r"^.*(EngineCore|Worker).*$", text, re.MULTILINE), "no line of the engine's own"


def _death_in_an_update(pair: EnginePair) -> EngineDead:
    with pytest.raises(EngineDead) as died:
        pair.engine.apply_weights(pair.commit())
    return died.value


def test_a_wrong_offset_is_told_and_no_engine_outlives_its_service(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """Two norms of equal values, each in the other's place: nothing that is computed differs, yet."""
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        with (Path(directory) / "driver.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(DRIVER), directory], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=tmp_path
            )
        written = Path(directory, OUTCOME)
        with process:
            try:
                wait_until(
                    lambda: written.exists() or process.poll() is not None, "an engine's receipt", STARTED_WITHIN
                )
                assert written.exists(), Path(directory, "driver.log").read_text()
                outcome = msgspec.json.decode(written.read_bytes(), type=Outcome)
                living = {pid: process_start(pid) for pid in descendants(process.pid)}
            finally:
                process.kill()
    assert outcome.facts.pid in living
    offsets = {entry.name: entry.offset for entry in outcome.manifest.tensors}
    assert problem(outcome.manifest, outcome.proof, outcome.receipt) == (
        f"its tensor {EXCHANGED[0]} lies at offset {offsets[EXCHANGED[1]]} (transport alias), "
        f"expected offset {offsets[EXCHANGED[0]]}"
    )
    assert outcome.receipt.canary_logprobs == pytest.approx(outcome.proof.canary_logprobs, abs=CLOSE)
    wait_until(
        lambda: all(process_start(pid) != started for pid, started in living.items()),
        "the end of every process of the engine", ENDED_WITHIN,
    )  # fmt: skip


def test_no_engine_outlives_a_service_that_is_killed_while_it_starts(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """Once the loader has mapped the weights, long before the engine can take an order."""
    with TemporaryDirectory(dir="/dev/shm", prefix="test-quartet-") as directory:
        with (Path(directory) / "driver.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(DRIVER), directory], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=tmp_path
            )
        policy = str(Path(directory, "policy"))

        def loading() -> bool:
            return any(policy in maps(pid) for pid in descendants(process.pid))

        with process:
            try:
                wait_until(lambda: loading() or process.poll() is not None, "a loading engine", STARTED_WITHIN)
                living = {pid: process_start(pid) for pid in descendants(process.pid)}
                assert not Path(directory, OUTCOME).exists(), "the engine had started: nothing is tested"
            finally:
                process.kill()
        assert living
        wait_until(
            lambda: all(process_start(pid) != started for pid, started in living.items()),
            "the end of every process of the engine", ENDED_WITHIN,
        )  # fmt: skip


def maps(pid: int) -> str:
    """What a process has mapped; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
