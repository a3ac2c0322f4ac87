"""The documentation of a config field, read from where it is defined: the string below it in ``common/config.py``."""

from __future__ import annotations

import ast
import difflib
import inspect
from dataclasses import dataclass

from common import config

ALIASES = {
    "Positive": "int, at least 1",
    "NonNegative": "int, at least 0",
    "PositiveFloat": "float, over 0",
    "NonNegativeFloat": "float, at least 0",
    "Fraction": "float, 0 to 1",
    "Share": "float, over 0 and at most 1",
}
"""Types of ``common/config.py`` in words."""


@dataclass(frozen=True)
class FieldDoc:
    """A key, or a section where ``default`` is empty."""

    key: str
    kind: str
    default: str
    text: str


def field_docs() -> dict[str, FieldDoc]:
    """Every key and section of ``Config`` by its dotted name, in the order of the file."""
    tree = ast.parse(inspect.getsource(config))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    docs: dict[str, FieldDoc] = {}
    _collect(classes, "Config", "", docs)
    return docs


def _collect(classes: dict[str, ast.ClassDef], name: str, prefix: str, docs: dict[str, FieldDoc]) -> None:
    node = classes[name]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            _collect(classes, base.id, prefix, docs)
    for index, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        key, kind = prefix + statement.target.id, ast.unparse(statement.annotation)
        text = _string(node.body[index + 1]) if index + 1 < len(node.body) else ""
        section = classes.get(kind)
        if section is not None:
            docs[key] = FieldDoc(key, "section", "", text or ast.get_docstring(section) or "")
            _collect(classes, kind, f"{key}.", docs)
        else:
            kind = ALIASES.get(kind, kind)
            docs[key] = FieldDoc(key, kind, _default(statement.value), text)


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    if isinstance(value, ast.Call):  # field(default_factory=list) and the like
        return "{}" if "dict" in ast.unparse(value) else "[]"
    return ast.unparse(value)


def _string(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return inspect.cleandoc(str(statement.value.value))
    return ""


def explain(key: str) -> list[str]:
    """Lines that document a key, or a section and all its keys. Raises KeyError with a suggestion."""
    docs = field_docs()
    if key not in docs:
        close = difflib.get_close_matches(key, docs, n=1)
        raise KeyError(f"{key}: no such key.{f' Did you mean {close[0]}?' if close else ''}")
    found = docs[key]
    if found.kind != "section":
        return [f"{found.key} = {found.default}   ({found.kind})", f"  {found.text}"]
    lines = [f"[{found.key}]  {found.text}"]
    for name, doc in docs.items():
        if name.startswith(f"{key}."):
            lines.append(f"  {doc.key} = {doc.default}: {doc.text}" if doc.default else f"  [{doc.key}]  {doc.text}")
    return lines
