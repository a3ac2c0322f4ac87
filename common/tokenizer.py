"""Text to token ids and back, from a Hugging Face model directory, without torch and transformers.

``tokenizer.json`` does the tokenising and says which special tokens go around a text; ``tokenizer_config.json`` names
them and holds the chat template, unless ``chat_template.jinja`` does. The ids are those of transformers' AutoTokenizer
(version 5), which reads the same files and takes no notice of ``add_bos_token`` beside a tokenizer.json either.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, cast

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

Json = dict[str, Any]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A model directory whose tokenizer cannot be used; the message names the file and says what to do."""


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class TextTokenizer:
    """The tokenizer of one model directory; see ``load_tokenizer``."""

    def __init__(self, directory: Path, backend: Tokenizer, settings: Json, eos_ids: frozenset[int]) -> None:
        self._directory = directory
        self._backend = backend
        self._special: dict[str, str] = settings["special"]
        self._template: str | None = settings["template"]
        self.eos_ids = eos_ids
        """Tokens that end a response."""
        pad: int | None = settings["pad_id"]
        self.pad_id = min(eos_ids) if pad is None else pad
        """Fills places that are masked out; the first end token where the model names none."""
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        """Every id is below this. The model's own vocabulary may be larger, for its padding."""

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` can be used."""
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """The template's source; empty if there is none."""
        return self._template or ""

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest over all that decides which ids a text gets, and which of them end a response."""
        parts = [self._backend.to_str(), self.chat_template, self._special, sorted(self.eos_ids), self.pad_id]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer puts around a text (such as bos).

        ``chat`` is for what ``render_chat`` returned: the template has written them already, so none are added.
        """
        return self._backend.encode(text, add_special_tokens=not chat).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The text of a conversation, up to where the assistant's next turn begins.

        Raises TokenizerError if there is no template, or if it refuses these messages.
        """
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TokenizerError(f"{self._directory}: the chat template refuses the messages: {error}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if self._template is None:
            raise TokenizerError(
                f"{self._directory}: the tokenizer has no chat template; add chat_template.jinja, or set "
                "prompts.chat_template = 'never' and give prompts as strings"
            )
        try:
            return _environment().from_string(self._template)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"{self._directory}: chat template, line {error.lineno}: {error.message}") from None


def load_tokenizer(model_dir: Path) -> TextTokenizer:
    """Reads a model directory's tokenizer; raises TokenizerError if it has none or does not say what ends a text."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{model_dir}: no tokenizer.json there. If the directory has another kind of tokenizer, convert it: "
            f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{model_dir}')"
            f".save_pretrained('{model_dir}')\""
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever is wrong with the file
        raise TokenizerError(f"{path}: not a tokenizer of the tokenizers library: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    declared = _read(model_dir / "special_tokens_map.json") | _read(model_dir / "tokenizer_config.json")
    special = {name: _content(declared[name]) for name in _NAMED if declared.get(name) is not None}
    missing = [token for token in special.values() if backend.token_to_id(token) is None]
    cast("Any", backend).add_special_tokens([AddedToken(token, special=True) for token in missing])
    config = _read(model_dir / "config.json")
    pad = backend.token_to_id(special["pad_token"]) if "pad_token" in special else config.get("pad_token_id")
    settings: Json = {"special": special, "template": _template(model_dir, declared), "pad_id": pad}
    return TextTokenizer(model_dir, backend, settings, _eos_ids(model_dir, backend, config, special))


def _read(path: Path) -> Json:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=Json)
    except msgspec.MsgspecError as error:
        raise TokenizerError(f"{path}: not a JSON object: {error}") from None


def _content(token: str | Json) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _template(model_dir: Path, declared: Json) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found: str | list[dict[str, str]] | None = declared.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        return named.get("default")
    return found


def _eos_ids(model_dir: Path, backend: Tokenizer, config: Json, special: dict[str, str]) -> frozenset[int]:
    for declared in (_read(model_dir / "generation_config.json"), config, config.get("text_config") or {}):
        found: int | list[int] | None = declared.get("eos_token_id")
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    if "eos_token" in special:
        return frozenset([cast("int", backend.token_to_id(special["eos_token"]))])
    raise TokenizerError(
        f"{model_dir}: nothing says which token ends a response; set eos_token_id in generation_config.json, or "
        "eos_token in tokenizer_config.json"
    )


class _Generation(Extension):
    """Templates may mark the assistant's turns with ``{% generation %}``; for rendering the mark means nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """What the templates on the hub are written for: block whitespace trimmed, JSON unescaped, dates, refusals."""

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def now(pattern: str) -> str:
        return datetime.datetime.now().astimezone().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    names = cast("dict[str, Callable[..., object]]", environment.globals)
    names.update(raise_exception=refuse, strftime_now=now)
    return environment
