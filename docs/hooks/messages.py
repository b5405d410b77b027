"""The warnings that the package gives, read from its sources, with their remedies."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python" / "fastenc"
PATCHED = PACKAGE / "integrations" / "transformers"


def reasons() -> list[str]:
    """Why a patched model takes its own forward: what its functions of the type ``str | None`` return."""
    found = []
    for path in sorted(PATCHED.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _gives_reasons(node):
                returned = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
                found += [text for value in returned for text in _texts(value)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warn_once":
                found += [text for value in node.args for text in _texts(value)]
    return _distinct(found)


def other_warnings() -> list[str]:
    """What the package's calls of ``warnings.warn`` say, but for the one whose reasons :func:`reasons` gives."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PATCHED / "patch_state.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in WARN:
                    found += [text for value in node.args for text in _texts(value)]
    return _distinct(found)


WARN = ("warnings.warn", "_warn_once")


def _gives_reasons(node: ast.FunctionDef) -> bool:
    kinds = () if node.returns is None else ast.unparse(node.returns)
    return "str | None" in kinds or "Reading" in kinds


def _texts(node: ast.AST | None) -> Iterator[str]:
    """The texts that an expression may be; … stands for what is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
    elif isinstance(node, ast.IfExp):
        yield from [*_texts(node.body), *_texts(node.orelse)]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Reading":
        yield from (text for each in node.args for text in _texts(each))
    elif isinstance(node, ast.Tuple):
        yield from (text for each in node.elts for text in _texts(each))


def _distinct(texts: list[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if " " in text]
