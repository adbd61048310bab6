"""The command line flags of one release: `add_argument` calls, followed from the parser of `vllm serve`.

In: the sources of a release. Out: `Flag` rows. Reads three styles: plain calls with `default=EngineArgs.x`, calls with
`**model_kwargs["x"]` made from a config dataclass, and a loop over all fields of a class.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagtable.sources import Computed, Field, Module, Sources

# Where the parser is built: module, function, and the only parser looked at (None: any).
ENTRIES = (
    ("vllm.entrypoints.cli.serve", "subparser_init", None),
    ("vllm.scripts", "main", "serve_parser"),
    ("vllm.entrypoints.common.cli_args", "make_arg_parser", None),
    ("vllm.entrypoints.launchers.cli_args", "make_arg_parser", None),
    ("vllm.entrypoints.openai.cli_args", "make_arg_parser", None),
    ("vllm.entrypoints.openai.api_server", "make_arg_parser", None),
    ("vllm.entrypoints.openai.api_server", "parse_args", None),
)
MAX_NESTED = 8  # calls followed
MAX_CHOICES = 24

_DEPRECATED = re.compile(
    r"^\W*deprecated\b|\b(?:this \w+|it|--[\w-]+)\s+(?:\w+ )?(?:is|has been|was) (?:now )?deprecated"
    r"|\bdeprecated and (?:will|has)\b",
    re.IGNORECASE,
)
_SWITCHES = ("store_true", "store_false")


@dataclass(frozen=True)
class Flag:
    """One flag. `default` is its literal as text; "=" before source text that only running the code would work out."""

    name: str
    aliases: tuple[str, ...]
    takes: str  # value, switch, list, json
    negated: bool  # --no-NAME exists too
    type: str | None
    choices: tuple[str, ...] | None
    default: str | None
    deprecated: bool  # its own help says so


def read_flags(sources: Sources) -> dict[str, Flag]:
    """The flags of `vllm serve` by their first long name; empty when no parser was found."""
    reader = _Reader(sources)
    for name, function, parser in ENTRIES:
        module = sources.module(name)
        for node in ast.walk(module.tree) if module else ():
            if isinstance(node, ast.FunctionDef) and node.name == function:
                assert module is not None
                reader.run(node, _Scope(module, only=parser))
    return reader.flags


@dataclass
class _Scope:
    """Where the reader is: module, class of `cls`, and what local names hold argparse keywords."""

    module: Module
    owner: tuple[Module, ast.ClassDef] | None = None
    only: str | None = None
    names: dict[str, Any] = field(default_factory=dict)
    depth: int = 0


class _Reader:
    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.flags: dict[str, Flag] = {}

    def run(self, function: ast.FunctionDef, scope: _Scope) -> None:
        """Reads the statements of a function in order, both branches of an `if`."""
        if scope.depth <= MAX_NESTED:
            self._block(function.body, scope)

    def _block(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        for statement in body:
            if isinstance(statement, ast.For) and isinstance(statement.iter, (ast.List, ast.Tuple)):
                for item in statement.iter.elts:
                    self._block(_with_item(statement, item), scope)
            elif isinstance(statement, (ast.If, ast.For, ast.With, ast.Try)):
                self._block(statement.body, scope)
                self._block(getattr(statement, "orelse", ()), scope)
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], statement.value, scope)
            elif isinstance(statement, ast.Delete):
                for target in statement.targets:
                    self._delete(target, scope)
            elif isinstance(statement, (ast.Expr, ast.Return)) and statement.value is not None:
                self._follow(statement.value, scope)

    def _assign(self, target: ast.expr, value: ast.expr, scope: _Scope) -> None:
        if self._follow(value, scope):
            return
        held = self._keywords(value, scope)
        if isinstance(target, ast.Name) and held is not None:
            scope.names[target.id] = held
        elif isinstance(target, ast.Subscript):
            place = self._keywords(target.value, scope)
            if place is not None:
                place[self.sources.value(target.slice, scope.module)] = (
                    (value, scope.module) if held is None else held
                )

    def _delete(self, target: ast.expr, scope: _Scope) -> None:
        if isinstance(target, ast.Subscript):
            place = self._keywords(target.value, scope)
            if place is not None:
                place.pop(self.sources.value(target.slice, scope.module), None)

    # --- calls ------------------------------------------------------------------------------------------------

    def _follow(self, node: ast.expr, scope: _Scope) -> bool:
        """Handles `x.add_argument(...)` and steps into functions that get the parser; False for other calls."""
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            if scope.only is None or ast.unparse(node.func.value) == scope.only:
                self._add(node, scope)
            return True
        handed = [arg.id for arg in node.args if isinstance(arg, ast.Name)]
        if any(name.endswith("_kwargs") for name in handed) and self._customize(node, scope):
            return True
        if not any("parser" in name for name in handed):
            return False
        if scope.only is not None and scope.only not in handed:
            return False
        return self._step_into(node.func, scope)

    def _step_into(self, function: ast.expr, scope: _Scope) -> bool:
        deeper = scope.depth + 1
        if isinstance(function, ast.Name):
            found = self.sources.find(scope.module, function.id)
            if found is None or not isinstance(found.node, ast.FunctionDef):
                return False
            self.run(found.node, _Scope(found.module, depth=deeper))
            return True
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            owner = self._class(function.value.id, scope)
            methods = self.sources.method(*owner, function.attr) if owner else []
            if methods and owner is not None:
                module, node = methods[-1]
                self.run(node, _Scope(module, owner=owner, depth=deeper))
                return True
        return False

    def _class(self, name: str, scope: _Scope) -> tuple[Module, ast.ClassDef] | None:
        if name in ("cls", "self"):
            return scope.owner
        return self.sources.find_class(scope.module, name)

    def _customize(self, node: ast.Call, scope: _Scope) -> bool:
        """`kwargs = cls._customize(kwargs)`: every definition along the bases changes the same keywords."""
        function = node.func
        held = self._keywords(node.args[0], scope)
        if held is None or scope.owner is None or not isinstance(function, ast.Attribute):
            return False
        for module, method in self.sources.method(*scope.owner, function.attr):
            inner = _Scope(module, owner=scope.owner, depth=scope.depth + 1)
            inner.names = {argument.arg: held for argument in method.args.args[1:]}
            self.run(method, inner)
        return True

    def _add(self, call: ast.Call, scope: _Scope) -> None:
        looped = [arg for arg in call.args if isinstance(arg, ast.JoinedStr)]
        if looped:
            for held in list(scope.names.values()):
                for name, made in held.items():
                    if isinstance(made, dict):
                        self._keep([f"--{name}"], made)
            return
        names = [self.sources.value(arg, scope.module) for arg in call.args]
        names = [name for name in names if isinstance(name, str) and name.startswith("-")]
        keywords: dict[str, Any] = {}
        for word in call.keywords:
            if word.arg is None:
                keywords.update(self._keywords(word.value, scope) or {})
            else:
                keywords[word.arg] = self._held(word.value, scope)
        if names:
            self._keep(names, keywords)

    # --- argparse keywords ------------------------------------------------------------------------------------

    def _keywords(self, node: ast.expr, scope: _Scope) -> dict[Any, Any] | None:
        """What an expression for argparse keywords holds: a dict that later statements may change."""
        if isinstance(node, ast.Name):
            return scope.names.get(node.id)
        if isinstance(node, ast.Subscript):
            held = self._keywords(node.value, scope)
            inner = held.get(self.sources.value(node.slice, scope.module)) if held else None
            return inner if isinstance(inner, dict) else None
        if isinstance(node, ast.Dict):
            merged: dict[Any, Any] = {}
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    merged.update(self._keywords(value, scope) or {})
                else:
                    merged[self.sources.value(key, scope.module)] = (value, scope.module)
            return merged
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            first = node.args[0]
            if name == "deepcopy":
                return self._keywords(first, scope)
            if name == "get_kwargs" and isinstance(first, ast.Name):
                owner = self._class(first.id, scope)
                if owner is not None:
                    fields = self.sources.fields(*owner).values()
                    return {item.name: self._from_field(item) for item in fields}
        return None

    def _held(self, node: ast.expr, scope: _Scope) -> Any:
        """One keyword's value: taken out of held keywords, `model_kwargs["x"]["default"]`, or an expression."""
        if isinstance(node, ast.Subscript):
            held = self._keywords(node.value, scope)
            key = self.sources.value(node.slice, scope.module)
            if held is not None and key in held:
                return held[key]
        return node, scope.module

    def _from_field(self, item: Field) -> dict[str, Any]:
        """The keywords that vLLM's `get_kwargs` makes of a dataclass field."""
        hints = _Hints(self.sources)
        hints.read(item.annotation, item.module)
        keywords: dict[str, Any] = {"default": self.sources.default(item), "help": item.doc}
        keywords.update(hints.keywords())
        return keywords

    def _keep(self, names: list[str], keywords: Mapping[str, Any]) -> None:
        """One row; the first definition of a name stays."""
        names = [name.replace("_", "-") for name in names]
        long = [name for name in names if name.startswith("--")] or names
        if long[0] in self.flags:
            return
        known = {key: self._plain(key, value) for key, value in keywords.items()}
        takes, negated, kind = _shape(known)
        choices = known.get("choices")
        default = known.get("default")
        if default is None and known.get("action") in _SWITCHES:
            default = known["action"] == "store_false"
        self.flags[long[0]] = Flag(
            name=long[0],
            aliases=tuple(name for name in names if name != long[0]),
            takes=takes,
            negated=negated,
            type=kind,
            choices=_in_order(choices),
            default=as_text(default),
            deprecated=known.get("deprecated") is True
            or bool(_DEPRECATED.search(str(known.get("help") or ""))),
        )

    def _plain(self, key: str, value: Any) -> Any:
        """A keyword's value; names of types and actions as text."""
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Module)):
            return value
        node, module = value
        if key in ("type", "action") and not isinstance(node, ast.Constant):
            return ast.unparse(node)
        if key == "help":
            return _words(node, module, self.sources)
        return self.sources.value(node, module)


def _in_order(choices: Any) -> tuple[str, ...] | None:
    """Each choice once, numbers by size: releases list the same ones in different orders. None: no literal list."""
    if not isinstance(choices, (list, tuple)) or not 0 < len(choices) <= MAX_CHOICES:
        return None
    return tuple(str(item) for item in sorted(set(choices), key=lambda c: (type(c).__name__, c)))


def _with_item(loop: ast.For, item: ast.expr) -> list[ast.stmt]:
    """The body of `for arg, type in [("--x", str), ...]` with the loop's names replaced by one item."""
    if isinstance(loop.target, ast.Tuple) and isinstance(item, ast.Tuple):
        known = dict(zip(map(ast.unparse, loop.target.elts), item.elts, strict=False))
    else:
        known = {ast.unparse(loop.target): item}

    class _Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return known.get(node.id, node)

    return [_Replace().visit(copy.deepcopy(statement)) for statement in loop.body]


def _words(node: ast.expr, module: Module, sources: Sources) -> str:
    """The text of a help string, also of an f-string or a named constant."""
    value = sources.value(node, module)
    if isinstance(value, str):
        return value
    return "".join(
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def _shape(known: Mapping[str, Any]) -> tuple[str, bool, str | None]:
    """What follows the flag, whether `--no-` works, and the type's name."""
    action, kind = str(known.get("action") or ""), str(known.get("type") or "")
    nargs = known.get("nargs")
    if action in _SWITCHES or action.endswith("BooleanOptionalAction"):
        return "switch", action.endswith("BooleanOptionalAction"), None
    if action.endswith("StoreBoolean"):
        return "switch", False, None
    if nargs in ("+", "*") or isinstance(nargs, int):
        return "list", False, _type(kind)
    if "json" in kind or kind == "dict":
        return "json", False, None
    return "value", False, _type(kind)


def _type(kind: str) -> str | None:
    """`float` of `float`, `optional_type(float)` or `nullable_float`; None for text and what is not plain."""
    for name in ("float", "int"):
        if re.search(rf"(?<![a-z]){name}(?![a-z])", kind):
            return name
    return None


def as_text(value: Any) -> str | None:
    """A default as it is written down: text bare, other literals as Python writes them, source text after "="."""
    if isinstance(value, Computed):
        return f"={value.text}" if value.text else None
    if isinstance(value, str):
        return value
    return repr(value)


class _Hints:
    """The plain types inside an annotation, through unions, aliases and `Annotated`."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.found: set[str] = set()
        self.options: list[Any] = []
        self.items = ""  # type of the elements of a list

    def read(self, node: ast.expr, module: Module, depth: int = 8) -> None:
        """Collects the types of one annotation."""
        if depth == 0:
            return
        if isinstance(node, ast.Constant):
            if node.value is None:
                self.found.add("None")
            elif isinstance(node.value, str):
                self.read(ast.parse(node.value, mode="eval").body, module, depth - 1)
        elif isinstance(node, ast.BinOp):
            self.read(node.left, module, depth - 1)
            self.read(node.right, module, depth - 1)
        elif isinstance(node, ast.Subscript):
            self._subscript(node, module, depth)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            self._name(ast.unparse(node).rsplit(".", 1)[-1], module, depth)

    def _subscript(self, node: ast.Subscript, module: Module, depth: int) -> None:
        name = ast.unparse(node.value).rsplit(".", 1)[-1]
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name in ("Union", "Optional"):
            for item in inside:
                self.read(item, module, depth - 1)
            if name == "Optional":
                self.found.add("None")
        elif name == "Literal":
            self.found.add("Literal")
            for item in inside:
                value = self.sources.value(item, module)
                if isinstance(value, (str, int)):
                    self.options.append(value)
                else:  # Literal["auto", OtherLiteral]
                    self.read(item, module, depth - 1)
        elif name.lower() in ("list", "tuple", "set", "sequence"):
            self.found.add("list")
            self.items = ast.unparse(inside[0])
        elif name.lower() == "dict":
            self.found.add("dict")
        elif name == "type":
            self.found.add("other")
        else:  # Annotated[x, ...], SkipValidation[x]
            self.read(inside[0], module, depth - 1)

    def _name(self, name: str, module: Module, depth: int) -> None:
        if name in ("bool", "int", "float", "str", "None"):
            self.found.add(name)
            return
        if name in ("dict", "Dict", "list", "List", "set"):
            self.found.add(name.lower().replace("set", "list"))
            return
        found = self.sources.find(module, name)
        if found is None:
            self.found.add("other")
        elif isinstance(found.node, ast.ClassDef):
            self.found.add(_class_kind(found.node))
        elif isinstance(found.node, (ast.Assign, ast.AnnAssign)) and found.node.value is not None:
            self.read(found.node.value, found.module, depth - 1)

    def keywords(self) -> dict[str, Any]:
        """`action`, `type`, `nargs` and `choices` in the order vLLM decides them."""
        has = self.found
        if "dataclass" in has:
            return {"type": "json"}
        if has == {"bool", "str", "None"}:
            return {"type": "str"}
        if "bool" in has:
            return {"action": "BooleanOptionalAction"}
        if "Literal" in has:
            numbers = all(isinstance(option, int) for option in self.options)
            open_ended = "str" in has or "other" in has
            choices = {} if open_ended else {"choices": sorted(self.options)}
            return {"type": "int" if numbers else "str", **choices}
        if "list" in has:
            return {"type": self.items, "nargs": "+"}
        for name in ("int", "float"):
            if name in has:
                return {"type": name}
        return {"type": "json" if "dict" in has else "str"}


def _class_kind(node: ast.ClassDef) -> str:
    marks = [ast.unparse(item).split("(")[0].rsplit(".", 1)[-1] for item in node.decorator_list]
    if "dataclass" in marks or "config" in marks:
        return "dataclass"
    is_dict = any(ast.unparse(base).startswith("dict") for base in node.bases)
    return "dict" if is_dict else "other"
