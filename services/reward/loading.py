"""Finds reward functions: built in by name, the user's by file and name. Used in the child process only."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType

from services.reward import functions
from services.reward.calling import Convention, ScoreFunction
from services.reward.wire import FunctionSpec

VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
REASONING_GYM = "reasoning_gym"


class FunctionError(Exception):
    """A reward function that cannot be used; the message names its config key, file and name."""


def load_function(spec: FunctionSpec) -> ScoreFunction:
    """The function, its convention found out and its options checked; raises FunctionError."""
    path, colon, attribute = spec.name.rpartition(":")
    if colon:
        function, name = from_file(spec.key, Path(path), attribute), f"{Path(path).name}:{attribute}"
    else:
        function, name = built_in(spec.key, spec.name), spec.name
    convention = convention_of(spec, function)
    loaded = ScoreFunction(name, function, convention, spec.options, path)
    if not colon:
        try:
            function([], [], [], [], **spec.options)  # a built-in checks its options before it looks at samples
        except (TypeError, ValueError) as error:
            raise FunctionError(f"{spec.key}: {name}: {error}") from None
    return loaded


def built_in(key: str, name: str) -> Callable[..., object]:
    """A function of ``services.reward.functions``, or the scorers of the package reasoning-gym."""
    if name == REASONING_GYM:
        from services.reward import reasoning  # its package takes most of a second to import

        return reasoning.score
    known = [*functions.BUILT_IN, REASONING_GYM]
    if name not in functions.BUILT_IN:
        near = get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise FunctionError(
            f"{key}: no built-in reward function {name!r}.{hint} Known: {', '.join(known)}; "
            "a function of your own is given as path/to/file.py:function"
        )
    return functions.BUILT_IN[name]


def from_file(key: str, path: Path, attribute: str) -> Callable[..., object]:
    """A function of the user's file. The file's folder is importable from it, as if it were run as a script."""
    found = getattr(import_file(key, path), attribute, None)
    if found is None:
        raise FunctionError(f"{key}: {path} has no function {attribute!r}")
    if not callable(found):
        raise FunctionError(f"{key}: {attribute!r} in {path} is a {type(found).__name__}, expected a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise FunctionError(
            f"{key}: {attribute!r} in {path} is async or a generator; expected a function that returns floats"
        )
    return found


def import_file(key: str, path: Path) -> ModuleType:
    """Imports a file under a private name, once however many of its functions are used."""
    name = f"quartet_reward_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FunctionError(f"{key}: no such file: {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FunctionError(f"{key}: {path} is no Python file; expected path/to/file.py:function")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise FunctionError(f"{key}: {error.filename}, line {error.lineno}: syntax error: {error.msg}") from None
    except Exception as error:  # noqa: BLE001  whatever the user's module raises, its file must be named
        traceback.print_exc()
        raise FunctionError(f"{key}: importing {path} raised {type(error).__name__}: {error}") from None
    return module


def convention_of(spec: FunctionSpec, function: Callable[..., object]) -> Convention:
    """How the function wants to be called; raises FunctionError where it does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "batch"  # written in C: it does not say what it takes
    if tuple(signature.parameters)[: len(VERL_PARAMETERS)] == VERL_PARAMETERS:
        convention: Convention = "verl"
        bind = partial(signature.bind, **dict.fromkeys(VERL_PARAMETERS), **spec.options)
    else:
        convention = "batch"
        bind = partial(signature.bind, [], [], [], [], **spec.options)
    try:
        bind()
    except TypeError as error:
        raise FunctionError(
            f"{spec.key}: {spec.name}{signature} cannot be called: {error}. Expected (prompts, responses, "
            f"ground_truths, metadata) or ({', '.join(VERL_PARAMETERS)}), and a parameter for each of the options "
            f"{sorted(spec.options)}"
        ) from None
    return convention
