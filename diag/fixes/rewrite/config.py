"""vLLM's own configuration (`vllm serve --config FILE`): a flat YAML mapping with flags as keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from diag.errors import RewriteError
from diag.facts.model import Value
from diag.fixes.command import flag_name, written
from diag.fixes.flags import takes
from diag.fixes.model import Change
from diag.fixes.rewrite.container import plain_text
from diag.fixes.rewrite.model import (
    CannotPutError,
    Seen,
    Splice,
    is_container_setting,
    same,
)
from diag.fixes.rewrite.yamltext import MapNode, Node, YamlFile, own_entry, read, scalar, text_of


def edit(text: str, change: Change, service: str | None) -> list[Splice]:  # noqa: ARG001 - one interface
    """The splices that make a change. Raises RewriteError, or CannotPutError for what is no flag of vLLM's."""
    if is_container_setting(change):
        raise CannotPutError(f"start the container with {change.flag} {written(change.to or '')}")
    if change.env is not None:
        raise CannotPutError(_for_environment(change))
    assert change.flag is not None
    file = read(text)
    return _set_key(file, _root(file), change.flag, change.to)


def seen(text: str, service: str | None) -> Seen:  # noqa: ARG001
    """What the file says, for the check."""
    file = read(text)
    _root(file)
    data: dict[str, Any] = file.data()[0]
    words: list[str] = []
    for key, value in data.items():
        words += [f"--{key}", *_values(value)]
    return Seen(words=tuple(words))


def arguments(text: str, service: str | None) -> Sequence[str]:  # noqa: ARG001
    """The words of the command line that the file stands for."""
    file = read(text)
    _root(file)
    words: list[str] = []
    for key, value in file.data()[0].items():
        name = key.replace("_", "-")
        values = _values(value)
        if name in ("model", "model-tag"):
            words[0:0] = values
        elif values in (["true"], ["false"]):
            words += [f"--{name}"] if values == ["true"] else []
        else:
            words += [f"--{name}", *values]
    return words


def _for_environment(change: Change) -> str:
    if change.to is None:
        return f"take {change.env} out of the environment that vLLM is started in"
    return f"start vLLM with {change.env}={written(change.to)} in its environment"


def _root(file: YamlFile) -> MapNode:
    if len(file.roots) != 1 or not isinstance(file.roots[0], MapNode) or file.roots[0].flow_style:
        raise RewriteError("the file is no mapping of flags to values, one on a line")
    return file.roots[0]


def _set_key(file: YamlFile, root: MapNode, flag: str, value: Value | None) -> list[Splice]:
    name = flag_name(flag)
    keys = {flag_name(f"--{key.value}"): str(key.value) for key, _ in root.value}
    edits = []
    if f"no-{name}" in keys and value:
        edits.append(file.remove_entry(root, keys[f"no-{name}"]))
    key = keys.get(name)
    pair: tuple[Node, Node] | None = own_entry(file, root, key) if key else None
    switch = takes(flag) == "switch" or isinstance(value, bool)
    shown = "" if value is None else str(bool(value)).lower() if switch else written(value)
    if pair is None or key is None:
        if value is None or value is False:
            return edits
        underscores = sum("_" in item for item in keys.values()) > sum(
            "-" in item for item in keys.values()
        )
        new = name.replace("-", "_") if underscores else name
        return [*edits, file.add_entry(root, new, scalar(shown, as_text=False))]
    if value is None:
        return [*edits, file.remove_entry(root, key)]
    now = text_of(pair[1])
    if now is not None and (now == shown or (not switch and same(now, value))):
        return edits
    return [*edits, file.replace(pair[1], shown, as_text=False)]


def _values(plain: Any) -> list[str]:
    if isinstance(plain, list):
        return [plain_text(item) for item in plain]
    if isinstance(plain, dict):
        return [json.dumps(_loaded(plain))]
    return [plain_text(plain)]


def _loaded(plain: Any) -> Any:
    """Plain data with numbers and truth values as JSON has them."""
    if isinstance(plain, dict):
        return {key: _loaded(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_loaded(item) for item in plain]
    if isinstance(plain, str):
        return plain
    try:
        return json.loads(plain_text(plain) or "null")
    except ValueError:
        return plain_text(plain)
