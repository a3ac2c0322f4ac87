"""Nothing in the code base reads what could run code: no pickle, no eval, no shell. Found in the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("common", "services", "tools")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "eval": "runs text", "exec": "runs text", "compile": "makes code of text", "__import__": "hides what is imported",
    "os.system": "runs a shell", "os.popen": "runs a shell", "yaml.load": "makes any object",
    "read_pickle": "unpickles",
    "hub.load": "runs foreign code", "multiprocessing.Queue": "pickles", "multiprocessing.Pipe": "pickles",
    "recv_pyobj": "unpickles", "send_pyobj": "pickles",
}  # fmt: skip
"""By name, or by the end of a dotted name."""
REVIEWED = {
    ("common/checkpoints/reader.py", "imports pickle"): "its unpickler knows a fixed list of plain classes",
    ("services/reward/loading.py", "exec_module runs a file"): "a reward file that the user's config names",
}


def modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if MODULES & set(name.split(".")):
                yield node.lineno, f"imports {name}"  # pyright: ignore[reportAttributeAccessIssue]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def keyword(call: ast.Call, name: str) -> object:
    """The constant that is given for an argument; None where there is none."""
    for argument in call.keywords:
        if argument.arg == name:
            return argument.value.value if isinstance(argument.value, ast.Constant) else argument.value
    return None


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = dotted(call.func)
        last = name.rpartition(".")[2]
        for known, why in CALLS.items():
            builtin = known in ("eval", "exec", "compile", "__import__")
            if name == known or (not builtin and name.endswith(f".{known}")):
                yield call.lineno, f"{name} {why}"
        if last == "exec_module":
            yield call.lineno, "exec_module runs a file"
        if name in ("torch.load", "torch.serialization.load") and keyword(call, "weights_only") is not True:
            yield call.lineno, "torch.load without weights_only=True unpickles"
        if name in ("np.load", "numpy.load") and keyword(call, "allow_pickle") is not False:
            yield call.lineno, f"{name} without allow_pickle=False"
        if keyword(call, "shell") not in (None, False):
            yield call.lineno, f"{name} runs a shell"
        if last == "from_pretrained" and name.startswith(("Auto", "transformers.Auto")):
            trusted = keyword(call, "trust_remote_code")
            passed_on = any(argument.arg is None and is_loading(argument.value) for argument in call.keywords)
            if trusted is True or (trusted is None and not passed_on):
                yield call.lineno, f"{name} without trust_remote_code=False"


def is_loading(value: ast.expr) -> bool:
    """``**loading(config)`` of common/model.py says whom it trusts."""
    return isinstance(value, ast.Call) and dotted(value.func) == "loading"


def found_in(source: str) -> set[str]:
    tree = ast.parse(source)
    return {what for _, what in (*modules(tree), *calls(tree))}


def files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_nothing_reads_what_could_run_code() -> None:
    found = {(str(path.relative_to(ROOT)), what) for path in files() for what in found_in(path.read_text())}
    assert found - REVIEWED.keys() == set()


def test_every_exception_is_there_and_is_needed() -> None:
    for name, what in REVIEWED:
        path = ROOT / name
        assert path.is_file(), f"{name} is gone: take it off the list"
        assert what in found_in(path.read_text()), f"{name} no longer {what}: take it off the list"


@pytest.mark.parametrize(
    "source",
    [
        # Texts for the search alone: none of them is run.
        "import pickle", "import cloudpickle as c", "from multiprocessing.reduction import pickle, x\nimport pickle",
        "from marshal import loads", "import shelve", "eval('1')", "exec(text)", "compile(text, '', 'exec')",
        "__import__(name)", "import os\nos.system('ls')", "torch.load(path)", "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)", "np.load(path)", "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)", "subprocess.run(text, shell=True)", "subprocess.Popen(text, shell=flag)",
        "pandas.read_pickle(path)", "socket.recv_pyobj()", "spec.loader.exec_module(module)",
        "AutoModel.from_pretrained(path)", "transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "torch.hub.load(name)", "AutoModel.from_pretrained(**place)",
    ],
)  # fmt: skip
def test_the_search_finds_it(source: str) -> None:
    assert found_in(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()", "re.compile('x')", "torch.compile(model)", "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)", "subprocess.run(words, shell=False)", "json.load(file)",
        "AutoModel.from_pretrained(path, trust_remote_code=False)", "Adapter.load(path)",
        "AutoModel.from_pretrained(path, **loading(config))",
    ],
)  # fmt: skip
def test_the_search_finds_nothing_else(source: str) -> None:
    assert not found_in(source)
