"""Samples from the token cache as padded tensors, against each sample by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from common.batch import Batch, read_batch, read_columns, response_logits, write_columns
from common.config import ModelConfig
from common.messages import SlotRef
from common.model import canary_ids, canary_logprobs, load_causal_lm, token_entropy, token_logprobs
from common.models import resolve_model
from common.token_cache import TokenCache
from services.critic.value_model import ValueModel
from tests.unit.model_support import (
    CPU,
    FAMILIES,
    full_logits,
    model_path,
    put_column,
    put_sample,
    random_ids,
    token_cache,
)

PAD = 96
"""Also an ordinary token of the prompts: padding must be told by the mask, never by its id."""
SHAPES = [(1, 1), (1, 12), (35, 1), (3, 5), (16, 12), (17, 2)]
"""Prompt and response lengths."""

Tokens = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def cache() -> Iterator[TokenCache]:
    with token_cache() as cache:
        yield cache


def put_all(cache: TokenCache) -> tuple[list[SlotRef], Tokens]:
    tokens: Tokens = []
    for i, (prompt, response) in enumerate(SHAPES):
        tokens.append((random_ids(i, prompt).tolist(), random_ids(50 + i, response).tolist()))
    tokens[4][0][0] = tokens[4][1][-1] = PAD
    return [put_sample(cache, *both) for both in tokens], tokens


def read(cache: TokenCache, refs: list[SlotRef]) -> Batch:
    return read_batch(cache, refs, PAD, CPU)


def test_layout(cache: TokenCache) -> None:
    refs = [put_sample(cache, [5, 6, 7], [8]), put_sample(cache, [9], [10, 11, 12])]
    cache.column("response_mask", refs[1])[1] = 0
    batch = read(cache, refs)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, PAD, PAD], [PAD, PAD, 9, 10, 11, 12]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert batch.position_ids[0, :4].tolist() == [0, 1, 2, 3]
    assert batch.position_ids[1, 2:].tolist() == [0, 1, 2, 3]
    assert batch.position_ids.min() >= 0
    assert batch.position_ids.max() == 3
    assert batch.response_ids.tolist() == [[8, PAD, PAD], [10, 11, 12]]
    assert batch.response_mask.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]]
    assert batch.lengths.tolist() == [1, 3]
    assert (batch.width, batch.tokens) == (3, 8)
    assert batch.input_ids.dtype == batch.position_ids.dtype == torch.int64
    assert batch.response_mask.dtype == torch.float32


def test_smallest_sample(cache: TokenCache) -> None:
    batch = read(cache, [put_sample(cache, [5], [6])])
    assert (batch.input_ids.tolist(), batch.response_ids.tolist(), batch.width) == ([[5, 6]], [[6]], 1)


def test_rows_follow_the_refs(cache: TokenCache) -> None:
    refs, tokens = put_all(cache)
    batch = read(cache, [refs[3], refs[0], refs[2]])
    for row, sample in enumerate((3, 0, 2)):
        assert batch.input_ids[row][batch.attention_mask[row] == 1].tolist() == [*tokens[sample][0], *tokens[sample][1]]


def test_what_was_written_after_the_end_is_not_read(cache: TokenCache) -> None:
    refs = [put_sample(cache, [5], [6, 7]), put_sample(cache, [5], [6, 7, 8, 9])]
    cache.column("response_ids", refs[0])[2:] = 50
    cache.column("response_mask", refs[0])[2:] = 1
    put_column(cache, "values", refs[0], [0.5, 0.25, np.nan, 3.0])
    put_column(cache, "values", refs[1], [1.0, 2.0, 3.0, 4.0])
    batch = read(cache, refs)
    assert batch.response_ids[0].tolist() == [6, 7, PAD, PAD]
    assert batch.response_mask[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert read_columns(cache, "values", batch).tolist() == [[0.5, 0.25, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]


def test_columns_are_written_as_far_as_the_response_goes(cache: TokenCache) -> None:
    refs = [put_sample(cache, [5], [6, 7]), put_sample(cache, [5], [6, 7, 8])]
    batch = read(cache, refs)
    written = torch.tensor([[0.5, -1.5, 9.0], [1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    write_columns(cache, "logprobs", batch, written)
    assert cache.column("logprobs", refs[0])[:4].tolist() == [0.5, -1.5, 0.0, 0.0]
    assert cache.column("logprobs", refs[1])[:4].tolist() == [1.0, 2.0, 3.0, 0.0]
    assert read_columns(cache, "logprobs", batch).tolist() == [[0.5, -1.5, 0.0], [1.0, 2.0, 3.0]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_in_a_padded_batch_are_those_of_each_sample_alone(
    cache: TokenCache, folder: Path, family: str, attention: Any
) -> None:
    refs, tokens = put_all(cache)
    model = load_causal_lm(ModelConfig(path=model_path(family, folder), attention=attention), CPU)
    batch = read(cache, refs)
    with torch.no_grad():
        logits = response_logits(model, batch)
        together = token_logprobs(logits, batch.response_ids, 0.8)
        entropies = token_entropy(logits, 0.8)
    assert together.shape == (len(refs), batch.width)
    for row, (prompt, response) in enumerate(tokens):
        expected = torch.log_softmax(full_logits(model, prompt, response).double() / 0.8, -1)
        length = len(response)
        chosen = expected[torch.arange(length), torch.tensor(response)]
        assert together[row, :length].numpy() == pytest.approx(chosen.numpy(), abs=1e-5), f"sample {row}"
        entropy = -(expected.exp() * expected).sum(-1)
        assert entropies[row, :length].numpy() == pytest.approx(entropy.numpy(), abs=1e-5), f"sample {row}"


def test_gradients_in_a_padded_batch_are_those_of_each_sample_alone(cache: TokenCache, folder: Path) -> None:
    refs, tokens = put_all(cache)
    model = load_causal_lm(ModelConfig(path=model_path("opt", folder)), CPU)
    batch = read(cache, refs)
    (token_logprobs(response_logits(model, batch), batch.response_ids, 1.0) * batch.response_mask).sum().backward()
    together = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    for prompt, response in tokens:
        ids = torch.tensor([prompt + response])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        torch.log_softmax(logits, -1)[torch.arange(len(response)), torch.tensor(response)].sum().backward()
    alone = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert torch.isfinite(together).all()
    assert float((together - alone).norm() / alone.norm()) < 1e-5


@pytest.mark.parametrize("family", ["tiny", "opt", "gpt2"])
def test_value_t_is_of_the_state_before_token_t_and_bootstrap_of_the_one_after_the_last(
    cache: TokenCache, folder: Path, family: str
) -> None:
    refs, tokens = put_all(cache)
    config = ModelConfig(path=model_path(family, folder))
    model = ValueModel(config, CPU)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    backbone = AutoModel.from_pretrained(resolve_model(config.path), dtype=torch.float32).eval()
    with torch.no_grad():
        values, bootstrap = model(read(cache, refs))
        for row, (prompt, response) in enumerate(tokens):
            for t in range(len(response) + 1):
                seen = torch.tensor([prompt + response[:t]])
                expected = float(model.head(backbone(input_ids=seen, use_cache=False).last_hidden_state[0, -1]))
                found = float(values[row, t] if t < len(response) else bootstrap[row])
                assert found == pytest.approx(expected, abs=1e-4), f"sample {row}, state {t}"


def test_token_logprobs_are_in_float32_at_the_temperature() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(3)).bfloat16()
    ids = torch.tensor([[0, 7, 49], [3, 3, 1]])
    found = token_logprobs(logits, ids, 0.5)
    assert found.dtype == token_entropy(logits, 0.5).dtype == torch.float32
    expected = torch.log_softmax(logits.double() / 0.5, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_canary_is_within_the_vocabulary_and_its_logprobs_are_plain(folder: Path) -> None:
    ids = canary_ids(97)
    assert max(ids) < 97
    assert len(set(ids)) > 8
    model = load_causal_lm(ModelConfig(path=model_path("llama", folder)), CPU)
    expected = token_logprobs(full_logits(model, ids[:1], ids[1:]), torch.tensor(ids[1:]), 1.0)
    assert canary_logprobs(model, ids) == pytest.approx(expected.tolist(), abs=1e-5)
