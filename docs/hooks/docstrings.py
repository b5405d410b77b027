"""A module's public names as Markdown: signatures from the source, docstrings with lists in the place of sections."""

import ast
import inspect
import re
import textwrap
from dataclasses import MISSING, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, cast, is_typeddict

ROLE = re.compile(r":(?:func|class|meth|mod):`~?([^`]+)`")
SECTION = re.compile(r"^([A-Z]\w+): *(.*)$")


def public_names(module: ModuleType) -> list[str]:
    """The functions, classes and tables that a module offers, in alphabetical order; no modules."""
    home = module.__name__
    defined = [name for name, value in vars(module).items() if _is_from(value, home)]
    names = getattr(module, "__all__", defined)
    values = {name: getattr(module, name) for name in sorted(names) if not name.startswith("_")}
    return [name for name, value in values.items() if not isinstance(value, ModuleType)]


def _is_from(value: Any, home: str) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == home


def members(module_name: str) -> str:
    module = import_module(module_name)
    return "\n".join(
        line
        for name in public_names(module)
        for line in _member(f"{module_name}.{name}", getattr(module, name))
    )


def _member(path: str, value: Any) -> list[str]:
    name = path.rpartition(".")[2]
    if inspect.isclass(value):
        return _class(name, value)
    if inspect.isfunction(value):
        node = _definition(value)
        return [f"## {name}", "", *_function(name, node, ast.get_docstring(node)), ""]
    keys = f" of {', '.join(f'`{key}`' for key in value)}" if isinstance(value, dict) else ""
    return [f"## {name}", "", f"A {type(value).__name__}{keys}.", ""]


def _class(name: str, value: type) -> list[str]:
    node = _definition(value)
    functions = {
        each.name: each
        for each in node.body
        if isinstance(each, ast.FunctionDef) and not _decorated(each, ".setter")
    }
    for each in node.body:  # a method that is a function of another module
        if isinstance(each, ast.Assign) and inspect.isfunction(
            function := getattr(value, ast.unparse(each.targets[0]), None)
        ):
            functions[ast.unparse(each.targets[0])] = definition = _definition(function)
            _bind(definition)
    arguments = _constructor(value)
    # The docstring of the value and not of the source: a dataclass of options gets its fields' help.
    text = value.__doc__ if ast.get_docstring(node) else None
    called = name if arguments is None else _call(name, arguments)
    lines = [f"## {name}", "", "```python", f"class {called}", "```", ""]
    lines += [markdown(text), ""] if text else []
    bases = {base.__name__ for base in value.__mro__[1:]}
    if "PretrainedModel" in bases:
        lines += ["It also has the methods of [`PretrainedModel`](models.md#pretrainedmodel).", ""]
    if "Task" in bases:
        lines += [
            "Its arguments are options of [`fastenc finetune`](commands.md#fastenc-finetune).",
            "",
        ]
    for method, each in functions.items():
        described = ast.get_docstring(each)
        if not method.startswith("_") and described:
            lines += [f"### {name}.{method}", "", *_function(method, each, described), ""]
    return lines


def _function(name: str, node: ast.FunctionDef, text: str | None) -> list[str]:
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    bound = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
    shown = name if _decorated(node, "property") else _call(name, _arguments(node, bound))
    return ["```python", shown + result, "```", "", markdown(text or "")]


def _bind(function: ast.FunctionDef) -> None:
    """Make a function a method: its first argument becomes self, and the docstring's entry for it is dropped."""
    first = function.args.args[0]
    text = cast(ast.Constant, cast(ast.Expr, function.body[0]).value)
    text.value = re.sub(rf"\n( +){first.arg}: .*(\n\1 +.*)*", "", str(text.value), count=1)
    first.arg = "self"


def _decorated(node: ast.FunctionDef, end: str) -> bool:
    """Whether the name of a decorator ends so."""
    return any(ast.unparse(each).endswith(end) for each in node.decorator_list)


def _definition(value: Any) -> Any:
    value = inspect.unwrap(value)
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _arguments(node: ast.FunctionDef, bound: bool) -> list[str]:
    arguments = node.args
    if bound:
        arguments.args = arguments.args[1:]
    # Split at the commas of the outermost level.
    pieces, depth = [""], 0
    for character in ast.unparse(arguments):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


def _constructor(value: type) -> list[str] | None:
    """The arguments of a class; None if it takes those of another library's class."""
    for base in value.__mro__:
        if not base.__module__.startswith("fastenc"):
            return None
        for each in _definition(base).body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                return _arguments(each, bound=True)
        if is_dataclass(base) or is_typeddict(base) or hasattr(base, "_fields"):
            return _fields(value)
    return None


def _fields(value: type) -> list[str]:
    """The fields of a dataclass and its bases, or of a named tuple, as arguments. A default that is computed is left
    out."""
    fields: dict[str, str] = {}
    for base in reversed(value.__mro__):
        of_class = _definition(base).body if base is value or is_dataclass(base) else ()
        for each in of_class:
            if isinstance(each, ast.AnnAssign):
                name, annotation = ast.unparse(each.target), ast.unparse(each.annotation)
                if not annotation.startswith("Class"):
                    fields[name] = f"{name}: {annotation}{_default(value, name, each.value)}"
    return list(fields.values())


def _default(value: type, name: str, node: ast.expr | None) -> str:
    """The default of a field as in the source, or that of an option (:func:`fastenc._base.options.option`)."""
    if isinstance(node, ast.Constant | ast.Tuple | ast.UnaryOp):
        return f" = {ast.unparse(node)}"
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "option":
        return ""
    default = value.__dataclass_fields__[name].default
    return "" if default is MISSING else f" = {default!r}"


def _call(name: str, arguments: list[str]) -> str:
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= 90:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in arguments), ")"])


def markdown(text: str) -> str:
    """A docstring: sections become lists, formulas code, roles names in code."""
    lines = ROLE.sub(r"`\1`", inspect.cleandoc(text)).splitlines()
    shown: list[str] = []
    position = 0
    while position < len(lines):
        line = lines[position].rstrip()
        position += 1
        block = []
        while line and position < len(lines) and _continues(lines, position):
            block.append(lines[position][4:])
            position += 1
        if SECTION.match(line) and shown and shown[-1]:
            shown.append("")
        shown += _with_block(line, block)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(shown)).strip()


def _with_block(line: str, block: list[str]) -> list[str]:
    """A line and the indented lines below it, as Markdown."""
    if line.startswith("    "):  # a formula
        return _code([line, *("    " + each for each in block)])
    if section := SECTION.match(line):
        title = f"**{section[1]}** {section[2]}".rstrip()
        return [title, *([each.strip() for each in block] if section[2] else ["", *_items(block)])]
    if not block:
        return [line]
    if line.endswith("::"):
        return [line[:-1], "", *_code(block, "python"), ""]
    return [line, "", *_code(block), ""]


def _code(lines: list[str], language: str = "") -> list[str]:
    return [f"```{language}", textwrap.dedent("\n".join(lines)).strip("\n"), "```"]


def _continues(lines: list[str], position: int) -> bool:
    """Whether a line belongs to the indented block above it."""
    return lines[position].startswith("    ") or _is_gap(lines, position)


def _is_gap(lines: list[str], position: int) -> bool:
    """Whether an empty line stands inside an indented block."""
    following = next((line for line in lines[position + 1 :] if line.strip()), "")
    return not lines[position].strip() and following[:4] == "    "


def _items(block: list[str]) -> list[str]:
    items: list[str] = []
    for line in block:
        if line and line[0] not in " -":
            name, colon, rest = line.partition(": ")
            is_name = colon and re.fullmatch(r"[\w*]+(, [\w*]+)*", name)
            items.append(f"- `{name}`: {rest}" if is_name else f"- {line}")
        elif line.strip():
            items.append(f"  {line.strip()}")
    return items
