"""The torch-free tokenizer gives the ids, texts and end tokens that transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from common.config_loading import PRESETS
from common.tokenizer import ChatMessage, TokenizerError, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TINY = Path(PRESETS, "tiny", "model")
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
    {% if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] }}{% endgeneration %}
    {%- else %}{{ message['content'] | trim }}{% endif %}
{{ '<|im_end|>\\n' }}
    {%- if loop.index > 8 %}{% break %}{% endif %}
{% endfor %}
{{ {'a': '<é>', 'b': [1, 2]} | tojson }} {{ {'a': 1} | tojson(indent=2) }} {{ strftime_now('%Y') }}
{%- if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MESSAGES: list[ChatMessage] = [
    {"role": "system", "content": " be <brief> "},
    {"role": "user", "content": "What is 2+3?\nI'll wait"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "and 12 + 30 é?"},
]


def make_model(directory: Path, declared: dict[str, Any], template: str | None = None) -> Path:
    """A directory with a small byte-level BPE tokenizer; ``around`` is what it puts around a text."""
    directory.mkdir(exist_ok=True)
    declared = dict(declared)
    around = declared.pop("around", "$A")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user said what is the sum of it and the assistant said the sum is it"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around, pair=f"{around} $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.save(str(directory / "tokenizer.json"))
    write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **declared})
    write(directory / "config.json", {"model_type": "llama", "eos_token_id": 2, "vocab_size": 512})
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def hugging_face(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {**NAMES},
    "bos": {**NAMES, "around": "<s> $A"},
    "bos and eos": {**NAMES, "around": "<s> $A </s>"},
    "bos that only the config asks for": {**NAMES, "add_bos_token": True},
    "token objects": {**NAMES, "bos_token": {"content": "<s>", "__type": "AddedToken"}},
    "token of the config only": {**NAMES, "pad_token": "<new-pad>"},
}
TEXTS = ["", "the sum of 12 + 30 is", " lead", "é 日 🙂\n\t<|im_end|>x<s></s>", "x" * 50]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ids_and_texts_equal_those_of_transformers(tmp_path: Path, variant: str) -> None:
    directory = make_model(tmp_path / "model", VARIANTS[variant], TEMPLATE)
    ours, theirs = load_tokenizer(directory), hugging_face(directory)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_bos_is_added_where_it_should_be(tmp_path: Path) -> None:
    with_bos = load_tokenizer(make_model(tmp_path / "a", VARIANTS["bos"]))
    without = load_tokenizer(make_model(tmp_path / "b", VARIANTS["plain"]))
    assert with_bos.encode("sum") == [1, *without.encode("sum")]


@given(st.text(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_text_on_the_embedded_model(text: str) -> None:
    ours, theirs = load_tokenizer(TINY), hugging_face(TINY)
    assert ours.encode(text) == theirs(text).input_ids


def test_the_embedded_model(tmp_path: Path) -> None:
    ours, theirs = load_tokenizer(TINY), hugging_face(TINY)
    ids = ours.encode("29+34=")
    assert ids == theirs("29+34=").input_ids
    assert ours.decode([*ids, theirs.eos_token_id]) == "29+34="
    assert ours.eos_ids == {theirs.eos_token_id}
    assert ours.pad_id == theirs.pad_token_id
    assert not ours.has_chat_template


@pytest.mark.parametrize("variant", ["plain", "bos"])
def test_chat_equals_that_of_transformers_without_a_second_bos(tmp_path: Path, variant: str) -> None:
    directory = make_model(tmp_path / "model", VARIANTS[variant], TEMPLATE)
    ours, theirs = load_tokenizer(directory), hugging_face(directory)
    text = ours.render_chat(MESSAGES)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert '"<é>"' in text
    ids = ours.encode(text, chat=True)
    assert ids == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True).input_ids
    assert ids.count(1) == 1
    assert ours.has_chat_template


@pytest.mark.parametrize(
    "declared",
    ["{{ messages[0].content }}", [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]],
)
def test_templates_in_the_tokenizer_config(tmp_path: Path, declared: object) -> None:
    directory = make_model(tmp_path / "model", {**NAMES, "chat_template": declared})
    expected = hugging_face(directory).apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert load_tokenizer(directory).render_chat(MESSAGES) == expected


def test_a_refusing_a_broken_and_a_missing_template(tmp_path: Path) -> None:
    refusing = load_tokenizer(make_model(tmp_path / "a", NAMES, TEMPLATE))
    with pytest.raises(TokenizerError, match="refuses the messages: no tools here"):
        refusing.render_chat([{"role": "tool", "content": ""}])
    broken = load_tokenizer(make_model(tmp_path / "b", NAMES, "x\n{% for %}"))
    with pytest.raises(TokenizerError, match="chat template, line 2"):
        broken.render_chat(MESSAGES)
    with pytest.raises(TokenizerError, match=r"no chat template; add chat_template\.jinja"):
        load_tokenizer(TINY).render_chat(MESSAGES)


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(TokenizerError, match="unsafe"):
        load_tokenizer(make_model(tmp_path / "a", NAMES, escape)).render_chat(MESSAGES)
    with pytest.raises(TokenizerError, match="unsafe"):
        load_tokenizer(make_model(tmp_path / "b", NAMES, "{{ messages.append(1) }}")).render_chat(MESSAGES)


def test_where_the_end_token_comes_from(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", {**NAMES, "eos_token": "<|im_end|>"})
    assert load_tokenizer(directory).eos_ids == {2}
    write(directory / "generation_config.json", {"eos_token_id": [4, 2]})
    assert load_tokenizer(directory).eos_ids == {2, 4}
    write(directory / "generation_config.json", {"eos_token_id": 4})
    assert load_tokenizer(directory).eos_ids == {4}
    (directory / "generation_config.json").unlink()
    write(directory / "config.json", {"text_config": {"eos_token_id": 3}})
    assert load_tokenizer(directory).eos_ids == {3}
    write(directory / "config.json", {})
    assert load_tokenizer(directory).eos_ids == {4}
    write(directory / "tokenizer_config.json", {})
    with pytest.raises(TokenizerError, match="nothing says which token ends a response; set eos_token_id"):
        load_tokenizer(directory)


def test_padding(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", NAMES)
    assert load_tokenizer(directory).pad_id == 2
    write(directory / "config.json", {"eos_token_id": 2, "pad_token_id": 3})
    assert load_tokenizer(directory).pad_id == 3
    write(directory / "tokenizer_config.json", {**NAMES, "pad_token": "<unk>"})
    assert load_tokenizer(directory).pad_id == 0


def test_the_fingerprint_follows_what_decides_the_ids(tmp_path: Path) -> None:
    made = [
        load_tokenizer(make_model(tmp_path / str(index), declared, template)).fingerprint
        for index, (declared, template) in enumerate(
            [(NAMES, None), (NAMES, "x"), (VARIANTS["bos"], None), ({**NAMES, "pad_token": "<unk>"}, None)]
        )
    ]
    assert len(set(made)) == 4
    assert load_tokenizer(make_model(tmp_path / "again", NAMES)).fingerprint == made[0]


def test_a_directory_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json there.*AutoTokenizer.*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    make_model(tmp_path, NAMES)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not a JSON object"):
        load_tokenizer(tmp_path)


def test_it_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from pathlib import Path; from common.tokenizer import load_tokenizer\n"
        f"load_tokenizer(Path({str(TINY)!r})).encode('1+1=')\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
