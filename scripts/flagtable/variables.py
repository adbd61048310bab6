"""The environment variables of one release: the table of `vllm/envs.py`.

In: the sources of a release. Out: name -> default as text. The getter's own fallback counts; without a literal one,
the default that the file annotates for type checkers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flagtable.arguments import as_text
from flagtable.sources import Computed, Module, Sources

TABLES = ("environment_variables", "env_variables")
_GETTERS = ("getenv", "get")
_WITH_DEFAULT = ("env_with_choices", "env_list_with_choices", "env_set_with_choices")


def read_variables(sources: Sources) -> dict[str, str | None] | None:
    """Defaults by variable, None for one that can't be read; None for a release without `vllm/envs.py`."""
    module = sources.module("vllm.envs")
    if module is None:
        return None
    annotated = _annotated(sources, module)
    found: dict[str, str | None] = {}
    for name, getter in _rows(module):
        default = _default(sources, module, name, getter)
        if isinstance(default, Computed):
            default = annotated.get(name, default)
        # People write 1 and 0 for a switch; the files write both ways.
        found.setdefault(name, {"True": "1", "False": "0"}.get(str(default), as_text(default)))
    return found


def _rows(module: Module) -> Iterator[tuple[str, ast.expr]]:
    """Key and getter of every entry of the tables."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        named = any(isinstance(item, ast.Name) and item.id in TABLES for item in targets)
        if named and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value


def _default(sources: Sources, module: Module, name: str, getter: ast.expr) -> object:
    """The fallback of the call that reads the variable; None without one, Computed when something else decides."""
    body = getter.body if isinstance(getter, ast.Lambda) else getter
    if isinstance(body, ast.IfExp) and ast.unparse(body.test) == f"{name!r} in os.environ":
        return sources.value(body.orelse, module)
    if any(isinstance(node, (ast.BoolOp, ast.IfExp)) for node in ast.walk(body)):
        return Computed("")
    for node in ast.walk(body):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func).rsplit(".", 1)[-1]
        if called in (*_GETTERS, *_WITH_DEFAULT) and sources.value(node.args[0], module) == name:
            return sources.value(node.args[1], module) if len(node.args) > 1 else None
    return Computed("")


def _annotated(sources: Sources, module: Module) -> dict[str, object]:
    """`VLLM_X: int = 5` below `if TYPE_CHECKING`."""
    return {
        name: sources.value(node.value, module)
        for name, node in module.names.items()
        if isinstance(node, ast.AnnAssign) and node.value is not None and name not in TABLES
    }
