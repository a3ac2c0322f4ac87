"""Reads a run's config: a preset or TOML file, then overrides ``section.key=value``, checked against ``Config``.

Every error names the full dotted key, where it was set, what was expected and what was found. This module is imported
by every service before anything heavy, so it loads only the standard library and msgspec, and the rest on demand.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from common.config import Config

PRESETS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "presets")
"""Folder of the presets and of the files and models embedded in the package."""

EMBEDDED_PREFIX = "quartet:"

_ERROR_PATH = re.compile(r" - at `([^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_PATH_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")

Path = tuple[str | int, ...]
Tree = dict[str, Any]


class ConfigError(ValueError):
    """The config cannot be used. The message names the key, where it was set and what to do."""


class _Override(NamedTuple):
    """The value of an override as text, and the whole of it as its user wrote it."""

    text: str
    written: str


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(name[:-5] for name in os.listdir(PRESETS) if name.endswith(".toml"))


def embedded_file(name: str) -> str:
    """The path that a config's file name stands for: ``quartet:NAME`` lies in the package, anything else is itself."""
    return os.path.join(PRESETS, name[len(EMBEDDED_PREFIX) :]) if name.startswith(EMBEDDED_PREFIX) else name


def load_config(source: str, overrides: Sequence[str] = (), written: Mapping[str, str] | None = None) -> Config:
    """Reads a preset (by name) or a TOML file (by path) and applies ``section.key=value`` overrides in order.

    A value is TOML; what is not TOML is taken as a bare string. An override replaces the key's whole value, tables and
    lists included. Fields that nobody sets have the defaults of ``common.config``. ``written`` says how an override was
    written where that was not ``--set``, for errors.

    Raises ConfigError for a missing file, broken TOML, an unknown key, a wrong type or a value out of bounds. Rules
    between fields are ``common.config_checks.check_config``'s.
    """
    path = _find(source)
    tree = _read(path)
    texts: dict[Path, _Override] = {}
    for override in overrides:
        as_written = (written or {}).get(override, f"--set {override}")
        key, text = _apply(tree, override, as_written)
        texts[key] = _Override(text, as_written)
    while True:
        try:
            config = msgspec.convert(tree, Config)
            break
        except msgspec.ValidationError as error:
            message, where = _split(str(error))
            # ``run.name=7`` means the string "7": the field decides, not the look of the value.
            if message.startswith("Expected `str`, got") and where in texts and not isinstance(_at(tree, where), str):
                _assign(tree, where, texts[where].text)
                continue
            raise _explain(tree, message, where, texts, path) from None
    for where, value in _leaves(tree):
        if isinstance(value, float) and not math.isfinite(value):
            raise _error(where, texts, path, f"expected a finite number, found {value}")
    return config


def to_toml(config: Config) -> str:
    """The complete config as TOML, every default written out; ``load_config`` reads it back to an equal one."""
    import tomli_w

    return tomli_w.dumps(msgspec.to_builtins(config))


def to_json(config: Config) -> bytes:
    """The complete config as canonical JSON: equal configs give equal bytes."""
    return msgspec.json.encode(config, order="deterministic")


def from_json(data: bytes | memoryview) -> Config:
    """Inverse of ``to_json``; raises ConfigError if the data is not a config of this version."""
    try:
        return msgspec.json.decode(data, type=Config)
    except msgspec.MsgspecError as error:
        message, where = _split(str(error))
        raise ConfigError(
            f"{_dotted(where) or 'config'}: {message}. The config was sent by another version of quartet?"
        ) from None


def config_digest(config: Config) -> str:
    """Hex digest over every field: two runs may share a directory only if their digests are equal."""
    import hashlib

    return hashlib.sha256(to_json(config)).hexdigest()


def _find(source: str) -> str:
    preset = os.path.join(PRESETS, f"{source}.toml")
    if _BARE_KEY.match(source) and os.path.isfile(preset):
        return preset
    if os.path.isfile(source):
        return source
    known = preset_names()
    raise ConfigError(
        f"{source}: neither a preset nor a file.{_hint(source, known)} Presets: {', '.join(known)}. "
        "A config of your own is given by the path of its TOML file."
    )


def _read(path: str) -> Tree:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _apply(tree: Tree, override: str, written: str) -> tuple[Path, str]:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(_BARE_KEY.match(part) for part in parts):
        raise ConfigError(f"{written}: expected section.key=value, for example rollout.temperature=0.8")
    if len(parts) < 2:
        known = _fields(Config)
        kind = "is a whole section." if parts[0] in known else f"is no key.{_elsewhere(parts[0])}"
        raise ConfigError(f"{written}: {parts[0]} {kind} Expected section.key=value")
    key: Path = tuple(parts)
    _assign(tree, key, _value(text.strip()))
    return key, text.strip()


def _value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if table.keys() == {"value"} else text


def _assign(tree: Tree, key: Path, value: Any) -> None:
    for index, part in enumerate(key[:-1]):
        child = tree.setdefault(str(part), {})
        if not isinstance(child, dict):
            outer = _dotted(key[: index + 1])
            raise ConfigError(f"{_dotted(key)}: {outer} has the value {child!r}, so that nothing can be set inside it")
        tree = cast("Tree", child)
    tree[str(key[-1])] = value


def _split(message: str) -> tuple[str, Path]:
    found = _ERROR_PATH.search(message)
    if not found:
        return message, ()
    parts = _PATH_PART.findall(found.group(1))
    path = tuple(int(index) if index.isdigit() else (name or index) for name, index in parts)
    return message[: found.start()], path


def _explain(tree: Tree, message: str, where: Path, texts: dict[Path, _Override], path: str) -> ConfigError:
    unknown = _UNKNOWN.match(message)
    if unknown:
        name, known = unknown.group(1), _fields(_kind(where))
        hint = _elsewhere(name) or _hint(name, known, prefix=_dotted(where))
        return _error((*where, name), texts, path, f"no such key.{hint} Known here: {', '.join(known)}")
    if message.startswith("Invalid enum value"):
        import typing

        expected = f"expected one of {', '.join(map(repr, typing.get_args(_kind(where))))}"
    else:
        expected = re.sub(r", got `[^`]*`$", "", message).replace("`", "")
        expected = expected[:1].lower() + expected[1:].replace("object", "a table").replace("array", "a list")
    return _error(where, texts, path, f"{expected}, found {_at(tree, where)!r}")


def _error(where: Path, texts: dict[Path, _Override], path: str, problem: str) -> ConfigError:
    """Names the override that set the key, or a part of it, else the file."""
    for key, override in texts.items():
        common = min(len(key), len(where)) if "..." not in where else len(where) - 1
        if where[:common] == key[:common]:
            longest = key if len(key) > len(where) else where
            return ConfigError(f"{_dotted(longest)}: {problem} (set by {override.written})")
    return ConfigError(f"{_dotted(where)}: {problem} (set in {path})")


def _hint(name: str, known: Sequence[str], prefix: str = "") -> str:
    import difflib

    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f" Did you mean {prefix + '.' if prefix else ''}{close[0]}?" if close else ""


def _elsewhere(name: str) -> str:
    """A key that exists, but in another section."""
    places = [key for key in _all_keys(Config) if key.rpartition(".")[2] == name]
    return f" Did you mean {' or '.join(places)}?" if places else ""


def _all_keys(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    import typing

    hints = typing.get_type_hints(section)
    for field in msgspec.structs.fields(section):
        kind = hints[field.name]
        yield prefix + field.encode_name
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _all_keys(kind, f"{prefix}{field.encode_name}.")


def _kind(where: Path) -> Any:
    """The declared type at ``where``, without its bounds."""
    import typing

    kind: Any = Config
    for part in where:
        kind = typing.get_args(kind)[0] if isinstance(part, int) else typing.get_type_hints(kind)[part]
    return kind


def _fields(section: Any) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(section)]


def _at(tree: Any, where: Path) -> Any:
    for part in where:
        if part == "...":  # msgspec does not say which key of a free table: show the table
            return tree
        tree = tree[part]
    return tree


def _leaves(tree: Any, where: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, dict):
        for key, value in cast("Tree", tree).items():
            yield from _leaves(value, (*where, key))
    elif isinstance(tree, list):
        for index, value in enumerate(cast("list[Any]", tree)):
            yield from _leaves(value, (*where, index))
    else:
        yield where, tree


def _dotted(where: Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return text.removeprefix(".").removesuffix("....").removesuffix(".")
