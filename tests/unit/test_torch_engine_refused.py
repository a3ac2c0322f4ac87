"""Models and requests that engine ``torch`` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM

from services.rollout.engines.torch import bucket_width
from tests.unit.engine_support import (
    LENGTHS,
    make_engine,
    request,
    sampled,
)
from tests.unit.model_support import (
    MAX_NEW,
    MAX_PROMPT,
    engine_config,
    model_path,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("length", "max_new"), [(0, 1), (MAX_PROMPT + 1, 1), (MAX_PROMPT, MAX_NEW + 1)])
def test_what_does_not_fit_is_refused(length: int, max_new: int, folder: Path) -> None:
    engine = make_engine(engine_config(model_path("llama", folder)))
    with pytest.raises(ValueError, match=f"sample 6: a prompt of {length} tokens and {max_new} new ones do not fit"):
        list(engine.generate([request(1, 5), request(6, length)], sampled(max_new), 1))


def test_window_smaller_than_the_capacity_is_refused(tmp_path: Path) -> None:
    narrow = model_path("mistral", tmp_path, sliding_window=24)
    with pytest.raises(ValueError, match=r"sliding_attention.*window 24.*max_tokens"):
        make_engine(engine_config(narrow))


def test_window_of_some_layers_is_refused(tmp_path: Path) -> None:
    mixed = model_path(
        "qwen3",
        tmp_path,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention"],
    )
    with pytest.raises(ValueError, match=r"sliding_attention.*window 24"):
        make_engine(engine_config(mixed))


def test_too_few_positions_are_refused(tmp_path: Path) -> None:
    short = model_path("gpt2", tmp_path, max_position_embeddings=MAX_PROMPT + MAX_NEW - 1)
    with pytest.raises(
        ValueError, match=f"prompts.max_tokens .* = {MAX_PROMPT + MAX_NEW}, but gpt2 .* only {MAX_PROMPT + MAX_NEW - 1}"
    ):
        make_engine(engine_config(short))


def test_models_that_count_positions_themselves_are_refused(tmp_path: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "bloom"
    )
    falcon = FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, alibi=True)
    FalconForCausalLM(falcon).save_pretrained(tmp_path / "falcon")
    for name in ("bloom", "falcon"):
        with pytest.raises(ValueError, match=f"position_ids and a KV cache; {name} does not"):
            make_engine(engine_config(str(tmp_path / name), attention="eager"))


def test_buckets() -> None:
    assert [bucket_width(length) for length in LENGTHS] == [0, 8, 16, 16, 16, 24, 40]
