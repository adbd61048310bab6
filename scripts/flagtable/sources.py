"""vLLM's Python files as syntax trees: names followed through imports, constants and class fields evaluated.

In: a folder that holds `vllm/`. Out: the tree node of a name, or the value of an expression. Nothing is imported or
executed; what can't be worked out stays as its source text (`Computed`).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

MAX_DEPTH = 12  # imports, aliases and base classes followed
SHOWN = 60  # characters of an expression that is kept as text

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.LShift: operator.lshift,
}
_EMPTY = {"list": list, "dict": dict, "set": set, "tuple": tuple}
_LARGEST = 1 << 62  # numbers of sources are small; a shift must not eat the memory


@dataclass(frozen=True)
class Computed:
    """A value that only running the code would tell."""

    text: str


@dataclass(frozen=True, eq=False)
class Module:
    """One file: its dotted name, and what its top level (and imports anywhere in it) define."""

    name: str
    tree: ast.Module = field(repr=False)
    names: Mapping[str, ast.stmt] = field(repr=False)
    package: bool = False


@dataclass(frozen=True)
class Found:
    """The definition of a name and the module it stands in."""

    module: Module
    node: ast.stmt


@dataclass(frozen=True)
class Field:
    """A class attribute: annotation, default expression, and the docstring below it."""

    name: str
    annotation: ast.expr
    default: ast.expr | None
    doc: str
    module: Module = field(repr=False)


class Sources:
    """The sources of one release below `root`, the folder that holds `vllm/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = lru_cache(maxsize=None)(self._module)
        self.fields = lru_cache(maxsize=None)(self._fields)
        self._readers: tuple[tuple[type[ast.expr], Callable[..., Any]], ...] = (
            (ast.Name, self._constant),
            (ast.Attribute, self._attribute),
            (ast.Call, self._call),
            (ast.BinOp, self._sum),
            (ast.UnaryOp, self._negation),
            (ast.List, self._items),
            (ast.Tuple, self._items),
        )

    def _module(self, name: str) -> Module | None:
        path = self.root.joinpath(*name.split("."))
        package = (path / "__init__.py").is_file()
        file = path / "__init__.py" if package else path.with_suffix(".py")
        if not file.is_file():
            return None
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names: dict[str, ast.stmt] = {}
        for statement in _top_level(tree.body):
            for bound in _bound(statement):
                names.setdefault(bound, statement)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):  # those inside functions too
                for bound in _bound(node):
                    names.setdefault(bound, node)
        return Module(name, tree, names, package)

    def find(self, module: Module, name: str, depth: int = MAX_DEPTH) -> Found | None:
        """Where a name is defined, seen from `module`; None when outside vLLM or not found."""
        node = module.names.get(name)
        if node is None or depth == 0:
            return None
        if not isinstance(node, ast.ImportFrom):
            return Found(module, node)
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        source = _absolute(module, node)
        target = self.module(source) if source.startswith("vllm") else None
        if target is None:
            return None
        return self.find(target, original, depth - 1)

    def find_class(self, module: Module, name: str) -> tuple[Module, ast.ClassDef] | None:
        """The class of that name."""
        found = self.find(module, name)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        return found.module, found.node

    def lineage(
        self, module: Module, node: ast.ClassDef, depth: int = MAX_DEPTH
    ) -> list[tuple[Module, ast.ClassDef]]:
        """The class's bases, farthest first, and itself."""
        line: list[tuple[Module, ast.ClassDef]] = []
        for base in node.bases if depth else ():
            found = self.find_class(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None:
                line += [item for item in self.lineage(*found, depth - 1) if item not in line]
        return [*line, (module, node)]

    def _fields(self, module: Module, node: ast.ClassDef) -> Mapping[str, Field]:
        """Annotated attributes of a class and its bases, in order."""
        fields: dict[str, Field] = {}
        for where, part in self.lineage(module, node):
            for index, statement in enumerate(part.body):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    if "ClassVar" in ast.unparse(statement.annotation):
                        continue
                    name = statement.target.id
                    doc = _docstring(part.body[index + 1 : index + 2])
                    fields[name] = Field(name, statement.annotation, statement.value, doc, where)
        return fields

    def method(
        self, module: Module, node: ast.ClassDef, name: str
    ) -> list[tuple[Module, ast.FunctionDef]]:
        """Every definition of a method along the lineage, the class's own last."""
        return [
            (where, item)
            for where, part in self.lineage(module, node)
            for item in part.body
            if isinstance(item, ast.FunctionDef) and item.name == name
        ]

    # --- values -----------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, module: Module, depth: int = MAX_DEPTH) -> Any:
        """The value of an expression: a Python literal, or Computed."""
        if depth == 0:
            return _computed(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
        for kind, read in self._readers:
            if isinstance(node, kind):
                return read(node, module, depth)
        return _computed(node)

    def _negation(self, node: ast.UnaryOp, module: Module, depth: int) -> Any:
        inner = self.value(node.operand, module, depth - 1)
        known = isinstance(node.op, ast.Not) and isinstance(inner, bool)
        return not inner if known else _computed(node)

    def _items(self, node: ast.List | ast.Tuple, module: Module, depth: int) -> Any:
        items = [self.value(item, module, depth - 1) for item in node.elts]
        return _computed(node) if any(isinstance(i, Computed) for i in items) else items

    def _constant(self, node: ast.Name, module: Module, depth: int) -> Any:
        found = self.find(module, node.id)
        value = getattr(found.node, "value", None) if found else None
        if (
            found is None
            or value is None
            or not isinstance(found.node, (ast.Assign, ast.AnnAssign))
        ):
            return _computed(node)
        return self.value(value, found.module, depth - 1)

    def _attribute(self, node: ast.Attribute, module: Module, depth: int) -> Any:
        """`CacheConfig.block_size`, a member of an enum, `argparse.SUPPRESS`."""
        if node.attr == "SUPPRESS":
            return None
        if node.attr == "value" and isinstance(node.value, ast.Attribute):  # a member of an enum
            return self._attribute(node.value, module, depth - 1)
        owner = self.find_class(module, node.value.id) if isinstance(node.value, ast.Name) else None
        if owner is None:
            return _computed(node)
        known = self.fields(*owner).get(node.attr)
        if known is not None:
            return self.default(known, depth - 1)
        for where, part in reversed(self.lineage(*owner)):
            for item in part.body:
                if isinstance(item, ast.Assign) and node.attr in _bound(item):
                    return self.value(item.value, where, depth - 1)
        return _computed(node)

    def _call(self, node: ast.Call, module: Module, depth: int) -> Any:
        """`field(...)`, `Field(...)`, `get_field(Class, "name")`, `frozenset()` and the like."""
        name = ast.unparse(node.func).rsplit(".", 1)[-1]
        keywords = {word.arg: word.value for word in node.keywords}
        if name == "get_field" and len(node.args) == 2 and isinstance(node.args[0], ast.Name):
            owner = self.find_class(module, node.args[0].id)
            wanted = self.value(node.args[1], module, depth - 1)
            known = self.fields(*owner).get(wanted) if owner else None
            return self.default(known, depth - 1) if known else _computed(node)
        if name in ("field", "Field"):
            if "default" in keywords:
                return self.value(keywords["default"], module, depth - 1)
            if "default_factory" in keywords:
                return self._made_by(keywords["default_factory"], module, depth - 1)
            return self.value(node.args[0], module, depth - 1) if node.args else _computed(node)
        if name == "cast" and len(node.args) == 2:
            return self.value(node.args[1], module, depth - 1)
        if name in _EMPTY and not node.args and not node.keywords:
            return _EMPTY[name]()
        return _computed(node)

    def _made_by(self, node: ast.expr, module: Module, depth: int) -> Any:
        if isinstance(node, ast.Lambda):
            return self.value(node.body, module, depth)
        if isinstance(node, ast.Name) and node.id in _EMPTY:
            return _EMPTY[node.id]()
        return Computed(f"{ast.unparse(node)[:SHOWN]}()")

    def _sum(self, node: ast.BinOp, module: Module, depth: int) -> Any:
        if type(node.op) not in _OPERATORS:
            return _computed(node)
        left, right = (self.value(side, module, depth - 1) for side in (node.left, node.right))
        numbers = all(
            isinstance(side, (int, float)) and abs(side) < _LARGEST for side in (left, right)
        )
        if isinstance(node.op, ast.LShift):
            numbers = numbers and isinstance(left, int) and isinstance(right, int) and right < 62
        lists = isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add)
        if not (numbers or lists):
            return _computed(node)
        try:
            return _OPERATORS[type(node.op)](left, right)
        except (ArithmeticError, ValueError):
            return _computed(node)

    def default(self, known: Field, depth: int = MAX_DEPTH) -> Any:
        """The default of a class attribute; Computed("") without one."""
        if known.default is None:
            return Computed("")
        return self.value(known.default, known.module, depth)


def _computed(node: ast.expr) -> Computed:
    text = " ".join(ast.unparse(node).split())
    return Computed(text if len(text) <= SHOWN else "")


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those below `if` and `try` too; the first branch comes first."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _top_level(statement.body)
            yield from _top_level(statement.orelse)
        else:
            yield statement


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + (1 if module.package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _docstring(following: list[ast.stmt]) -> str:
    """The string literal that stands below an attribute, in one line."""
    for statement in following:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return " ".join(str(statement.value.value).split())
    return ""
