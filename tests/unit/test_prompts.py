"""The prompt stream: seeded order, exact positions, chat templates, tokenising once, and rows that are too long."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config_loading import PRESETS, load_config
from common.token_cache import Geometry, TokenCache, prompt_key
from common.tokenizer import TextTokenizer, TokenizerError, load_tokenizer
from services.coordinator.prompts import PromptCache, PromptStream, permuted
from services.coordinator.row import RowError
from services.coordinator.rows import Split

TINY = Path(PRESETS, "tiny", "model")
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}a:"


@pytest.fixture
def tokenizer() -> TextTokenizer:
    return load_tokenizer(TINY)


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> TextTokenizer:
    model = tmp_path / "chat-model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (model / name).write_bytes((TINY / name).read_bytes())
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(model)


def stream(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    prompts: Sequence[object],
    *overrides: str,
    split: Split = "train",
    cache: PromptCache | None = None,
) -> PromptStream:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "ground_truth": "x"}) for prompt in prompts))
    files = [f"prompts.train=['{path}']", f"eval.data=['{path}']", "prompts.max_tokens=12"]
    return PromptStream(load_config("tiny", [*files, *overrides]), tokenizer, split, cache)


def texts(source: PromptStream, n: int) -> list[str]:
    return [prompt.text for prompt in source.next_batch(n)]


@given(st.integers(1, 700), st.binary(min_size=1, max_size=16))
def test_permuted_is_a_permutation(size: int, key: bytes) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_permuted_mixes_and_depends_on_its_key() -> None:
    one = [permuted(index, 1000, b"1") for index in range(1000)]
    assert one != [permuted(index, 1000, b"2") for index in range(1000)]
    assert sum(a == b for a, b in enumerate(one)) < 10
    assert abs(np.corrcoef(np.arange(1000), np.array(one))[0, 1]) < 0.15
    assert permuted(123_456_789, 10**9, b"1") < 10**9
    with pytest.raises(IndexError):
        permuted(3, 3, b"1")


def test_each_pass_takes_every_row_once_in_its_own_seeded_order(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = [f"{n}+1=" for n in range(20)]
    source = stream(tmp_path, tokenizer, rows)
    first, second = texts(source, 20), texts(source, 20)
    assert sorted(first) == sorted(second) == sorted(map(str, rows))
    assert first != second
    assert texts(stream(tmp_path, tokenizer, rows), 40) == first + second
    assert texts(stream(tmp_path, tokenizer, rows, "run.seed=2"), 20) != first
    assert texts(stream(tmp_path, tokenizer, rows, "prompts.shuffle=false"), 40) == [*rows, *rows]


def test_a_position_is_exact(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = [*(f"{n}+1=" for n in range(7)), "too long to be a prompt"]
    source = stream(tmp_path, tokenizer, rows)
    texts(source, 9)
    position = source.position
    assert position[0] == 1
    expected = texts(source, 20)
    resumed = stream(tmp_path, tokenizer, rows)
    resumed.seek(*position)
    assert resumed.position == position
    assert texts(resumed, 20) == expected
    for wrong in ((-1, 0), (0, 9), (0, -1)):
        with pytest.raises(ValueError, match="expected a pass of 8 rows"):
            source.seek(*wrong)


def test_evaluation_is_one_pass_in_the_order_of_the_file(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = [f"{n}+1=" for n in range(5)]
    source = stream(tmp_path, tokenizer, rows, split="eval")
    assert texts(source, 3) == rows[:3]
    assert texts(source, 3) == rows[3:]
    assert texts(source, 3) == []
    source.seek(0, 0)
    assert texts(source, 9) == rows
    assert texts(stream(tmp_path, tokenizer, rows, "eval.data=[]", split="eval"), 3) == []


def test_a_prompt_carries_text_key_ids_and_row(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (prompt,) = stream(tmp_path, tokenizer, ["12+30="]).next_batch(1)
    assert prompt.text == "12+30="
    assert prompt.ids == tokenizer.encode("12+30=")
    assert prompt.length == 7
    assert prompt.key == prompt_key("12+30=", "", tokenizer.fingerprint)
    assert (prompt.index, bytes(prompt.row.ground_truth)) == (0, b'"x"')


def test_too_long_prompts_are_skipped_counted_and_named_once(
    tmp_path: Path, tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ["1+1=", *["9" * 30] * 7]
    source = stream(tmp_path, tokenizer, rows)
    with caplog.at_level(logging.WARNING):
        assert texts(source, 4) == ["1+1="] * 4
    assert source.too_long == 7
    named = [record.getMessage() for record in caplog.records if "skipped, its prompt has 31 tokens" in record.message]
    assert len(named) == 5
    assert len({message.split(": ")[0] for message in named}) == 5
    assert source.tokenised == 7 + 4


def test_the_limit_itself_still_fits(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    source = stream(tmp_path, tokenizer, ["1" * 11, "1" * 12])
    assert texts(source, 2) == ["1" * 11] * 2
    assert source.too_long == 1


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_pass_that_yields_nothing_is_an_error(tmp_path: Path, tokenizer: TextTokenizer, split: Split) -> None:
    source = stream(tmp_path, tokenizer, ["9" * 30, "8" * 20], split=split)
    with pytest.raises(RowError, match=r"prompts\.max_tokens: 12, but all 2 usable \w+ rows are longer.* 21 tokens"):
        source.next_batch(1)


def test_a_prompt_is_tokenised_once(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = [*(f"{n}+1=" for n in range(6)), "0+1="]
    geometry = Geometry(slots=1, prompts=16, max_prompt_tokens=12, max_response_tokens=4)
    path = tmp_path / "cache"
    with TokenCache.create(path, run="r", fingerprint=tokenizer.fingerprint, geometry=geometry) as cache:
        source = stream(tmp_path, tokenizer, rows, cache=cache)
        first = source.next_batch(7)
        assert source.tokenised == 6
        assert [prompt.ids is None for prompt in first].count(True) == 1
        second = source.next_batch(7)
        assert source.tokenised == 6
        for prompt in first + second:
            stored = cache.get_prompt(prompt.key)
            assert stored is not None
            assert stored.tolist() == tokenizer.encode(prompt.text)
            assert prompt.length == len(stored)


def test_chat_templates(tmp_path: Path, tokenizer: TextTokenizer, chat_tokenizer: TextTokenizer) -> None:
    rows: list[object] = ["1+1", [{"role": "user", "content": "2+2"}], [{"role": "system", "content": "s"}]]
    order = ["prompts.shuffle=false", "prompts.max_tokens=40"]
    auto = stream(tmp_path, chat_tokenizer, rows, *order, "prompts.chat_template=auto")
    batch = auto.next_batch(3)
    assert [prompt.text for prompt in batch] == ["u:1+1;a:", "u:2+2;a:", "s:s;a:"]
    assert batch[0].ids == chat_tokenizer.encode("u:1+1;a:", chat=True)
    assert batch[0].key == prompt_key("u:1+1;a:", TEMPLATE, chat_tokenizer.fingerprint)
    told = stream(tmp_path, chat_tokenizer, rows, *order, "prompts.chat_template=always", "prompts.system=be")
    assert texts(told, 3) == ["s:be;u:1+1;a:", "s:be;u:2+2;a:", "s:s;a:"]
    never = stream(tmp_path, chat_tokenizer, rows, *order, "prompts.chat_template=never")
    assert texts(never, 1) == ["1+1"]
    with pytest.raises(RowError, match=r"rows\.jsonl:2: the prompt is a list of chat messages, but .*'never'"):
        never.next_batch(1)
    without = stream(tmp_path, tokenizer, rows, *order, "prompts.chat_template=auto")
    assert texts(without, 1) == ["1+1"]
    with pytest.raises(RowError, match=r"rows\.jsonl:2: .*the tokenizer has no chat template"):
        without.next_batch(1)
    with pytest.raises(TokenizerError, match=r"prompts\.chat_template: 'always', but"):
        stream(tmp_path, tokenizer, rows, "prompts.chat_template=always")


def test_rows_without_ground_truth_are_counted_and_named(
    tmp_path: Path, tokenizer: TextTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1="}\n{"prompt": "1+2=", "ground_truth": "3"}\n')
    with caplog.at_level(logging.WARNING):
        source = PromptStream(load_config("tiny", [f"prompts.train=['{path}']"]), tokenizer, "train")
    assert (source.rows, source.without_ground_truth) == (1, 1)
    assert any(f"1 without ground truth ({path}:1)" in record.getMessage() for record in caplog.records)
