"""What a container runs: entry point, command and arguments as one row of words, and its variables.

Serves compose services, Kubernetes containers and Dockerfiles, which differ only in names and in what is the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diag.errors import RewriteError
from diag.facts.args import is_flag
from diag.facts.model import Value
from diag.fixes.command import flag_name, vllm_commands, written
from diag.fixes.rewrite.arguments import Segment, Words
from diag.fixes.rewrite.model import CannotPutError, Splice, same
from diag.fixes.rewrite.shelltext import (
    Command,
    TextSegment,
    find_commands,
    script_word,
    tokens,
)
from diag.fixes.rewrite.views import View, as_is_view
from diag.fixes.rewrite.yamltext import (
    ListNode,
    MapNode,
    Node,
    Scalar,
    YamlFile,
    find,
    is_empty,
    own_entry,
    scalar,
    text_of,
)

# Flags that no other server has: a command with one of them is vLLM's though it doesn't say so.
_TELLING = frozenset(
    "gpu-memory-utilization max-model-len tensor-parallel-size max-num-batched-tokens kv-cache-dtype".split()
)


class ListSegment:
    """A YAML list of strings, or one in brackets within other text."""

    def __init__(self, file: YamlFile, node: ListNode) -> None:
        self.file = file
        self.node = node
        bad = next((item for item in node.value if not isinstance(item, Scalar)), None)
        if bad is not None:
            raise RewriteError(f"the command is no list of strings (line {file.line(bad)})")

    @property
    def values(self) -> list[str]:
        """The strings."""
        return [str(item.value) for item in self.node.value]

    def replace(self, index: int, value: str) -> Splice:
        """Another string in the place of one."""
        return self.file.replace(self.node.value[index], value, as_text=True)

    def insert(self, after: int, values: Sequence[str]) -> Splice:
        """New strings after one, quoted as the flags beside them are."""
        near = self.node.value[: after + 1]
        flags = [item for item in near if is_flag(str(item.value)) and item.style not in ("|", ">")]
        like = (flags or near or [None])[-1]
        return self.file.insert_items(self.node, after, values, like)

    def remove(self, start: int, stop: int) -> Splice:
        """Strings taken out."""
        return self.file.remove_items(self.node, start, stop)

    def script(self, index: int) -> View:
        """The text of a string that a shell runs."""
        return self.file.view(self.node.value[index], lines=True)


def yaml_segment(file: YamlFile, node: Node) -> Segment | None:
    """The words of a command in YAML; None for null."""
    if isinstance(node, ListNode):
        return ListSegment(file, node)
    if isinstance(node, Scalar) and text_of(node) is not None:
        return TextSegment(file.text, file.view(node, lines=False))
    return None


@dataclass(frozen=True, slots=True)
class Launch:
    """vLLM's words in a container; `command` when a shell script there starts it."""

    words: Words
    command: Command | None = None


def launch(segments: Sequence[Segment], *, own_entry_point: bool, last: Segment | None) -> Launch:
    """How a container starts vLLM.

    Args: segments in the order they are run; own_entry_point, whether the image starts vLLM by itself; last, the
        segment of its arguments then.
    Raises: RewriteError when nothing there starts vLLM.
    """
    slots = [(segment, index) for segment in segments for index in range(len(segment.values))]
    values = [segment.values[index] for segment, index in slots]
    inside = script_word(values)
    view = None if inside is None else _script(*slots[inside])
    if view is not None:
        file = segments[0].file  # type: ignore[attr-defined]  # both kinds know their file
        whole = TextSegment(file if isinstance(file, str) else file.text, view)
        command = next(find_commands(whole), None)
        if command is not None:
            return Launch(words_of(command), command)
    parts = next(vllm_commands(values), None)
    if parts is not None:
        return Launch(Words(slots, parts.args, len(values), slots[-1][0]))
    if last is not None and (own_entry_point or _telling(last.values)):
        start = len(values) - len(last.values)
        return Launch(Words(slots, start, len(values), last))
    raise RewriteError("no command that starts vLLM was found")


def words_of(command: Command) -> Words:
    """The words of a command in a text."""
    segment, parts = command.segment, command.parts
    slots = [(segment, index) for index in range(len(segment.tokens))]
    return Words(slots, parts.args, parts.end, segment)


def _script(segment: Segment, index: int) -> View | None:
    if isinstance(segment, ListSegment):
        return segment.script(index)
    return segment.inside(index) if isinstance(segment, TextSegment) else None


def _telling(values: Sequence[str]) -> bool:
    return any(is_flag(value) and flag_name(value) in _TELLING for value in values)


def starts_vllm(values: Sequence[str], image: str | None) -> bool:
    """Whether words or an image's name say that this is vLLM."""
    if image and re.search(r"vllm(?!.*router)", image):
        return True
    return _telling(values) or any(re.search(r"\bvllm\b", value) for value in values)


# --- variables ------------------------------------------------------------------------------------------------


def set_script_variable(command: Command, name: str, value: Value | None) -> list[Splice] | None:
    """The edit of a variable that a script sets itself before the command; None when it doesn't."""
    segment = command.segment
    for index in range(command.parts.args - 1, -1, -1):
        word = segment.values[index]
        if word.startswith(f"{name}="):
            if value is None:
                exported = index > 0 and segment.values[index - 1] == "export"
                return [segment.remove(index - int(exported), index + 1)]
            if same(word.partition("=")[2], value):
                return []
            return [segment.assign(index, name, written(value))]
    return None


def set_variable(
    file: YamlFile, owner: MapNode, key: str, name: str, value: Value | None, *, named: bool
) -> list[Splice]:
    """A variable in `environment:` (a map, or a list of NAME=value) or, `named`, in a list of {name, value}."""
    pair = own_entry(file, owner, key)
    if pair is None or is_empty(pair[1]):
        if value is None:
            return []
        block = _named(name, value) if named else f"{name}: {scalar(written(value))}"
        if pair is not None:
            return [file.fill(*pair, block)]
        after = next((near for near in ("args", "command", "image") if find(owner, near)), None)
        return [file.add_entry(owner, key, "\n" + block, after)]
    node = pair[1]
    if isinstance(node, MapNode):
        if value is None and len(node.value) == 1 and find(node, name):
            return [file.remove_entry(owner, key)]
        return _in_map(file, node, name, value)
    if not isinstance(node, ListNode):
        raise RewriteError(f"{key} is neither a map nor a list (line {file.line(pair[0])})")
    edits = (_in_named if named else _in_list)(file, node, name, value)
    return edits if edits is not None else [file.remove_entry(owner, key)]


def _in_map(file: YamlFile, node: MapNode, name: str, value: Value | None) -> list[Splice]:
    pair = own_entry(file, node, name)
    if value is None:
        return [file.remove_entry(node, name)] if pair else []
    if pair is None:
        like = next((v for _, v in reversed(node.value) if isinstance(v, Scalar) and v.style), None)
        return [file.add_entry(node, name, scalar(written(value), like=like))]
    if same(text_of(pair[1]), value):
        return []
    return [file.replace(pair[1], written(value), as_text=True)]


def _in_list(file: YamlFile, node: ListNode, name: str, value: Value | None) -> list[Splice] | None:
    """None: nothing would be left of the list."""
    segment = ListSegment(file, node)
    for index in range(len(segment.values) - 1, -1, -1):
        head, sign, now = segment.values[index].partition("=")
        if head != name:
            continue
        if value is None:
            if len(segment.values) == 1:
                return None
            return [segment.remove(index, index + 1)]
        return (
            []
            if sign and same(now, value)
            else [segment.replace(index, f"{name}={written(value)}")]
        )
    if value is None:
        return []
    last = len(segment.values) - 1
    return [file.insert_items(node, last, [f"{name}={written(value)}"], node.value[last])]


def _in_named(
    file: YamlFile, node: ListNode, name: str, value: Value | None
) -> list[Splice] | None:
    """None: nothing would be left of the list."""
    for index, item in enumerate(node.value):
        known = find(item, "name")
        if known is None or text_of(known[1]) != name:
            continue
        if value is None:
            if len(node.value) == 1:
                return None
            return [file.remove_items(node, index, index + 1)]
        now = find(item, "value")
        if now is None:
            raise CannotPutError(f"{name} comes from a reference; set it to {written(value)} there")
        if same(text_of(now[1]), value):
            return []
        return [file.replace(now[1], written(value), as_text=True)]
    if value is None:
        return []
    if node.flow_style:
        new = f"{{name: {name}, value: {scalar(written(value))}}}"
    else:
        new = _named(name, value, dash=False)
    return [file.insert_raw(node, len(node.value) - 1, [new])]


def _named(name: str, value: Value, *, dash: bool = True) -> str:
    shown = scalar(written(value), like=None)
    shown = shown if shown[0] in "\"'" else f'"{shown}"'
    return f"- name: {name}\n  value: {shown}" if dash else f"name: {name}\nvalue: {shown}"


# --- for the check --------------------------------------------------------------------------------------------


def seen_words(*commands: Any) -> tuple[str, ...]:
    """All words of commands given as plain data (lists, texts, null), those of shell scripts included."""
    words: list[str] = []
    for command in commands:
        if isinstance(command, list):
            words += [plain_text(item) for item in command]
        elif isinstance(command, str):
            words += [
                token.value for token in tokens(as_is_view(command, 0, len(command), lines=False))
            ]
    inside = script_word(words)
    if inside is not None:
        script = words[inside]
        view = as_is_view(script, 0, len(script), lines="\n" in script)
        words[inside : inside + 1] = [";", *(token.value for token in tokens(view))]
    return tuple(words)


def seen_variables(plain: Any) -> dict[str, str | None]:
    """The variables of `environment:` or `env:` as plain data; one that comes from elsewhere has the value None."""
    if isinstance(plain, Mapping):
        return {str(key): plain_text(value) for key, value in plain.items()}
    found: dict[str, str | None] = {}
    for item in plain if isinstance(plain, list) else []:
        if isinstance(item, Mapping):
            value = item.get("value")
            others = {key: part for key, part in item.items() if key not in ("name", "value")}
            found[plain_text(item.get("name"))] = repr(others) if others else plain_text(value)
        else:
            name, sign, value = plain_text(item).partition("=")
            found[name] = value if sign else None
    return found


def inner(plain: Any, *keys: str) -> dict[str, Any]:
    """The mapping within mappings of plain data; an empty one when anything on the way is none."""
    for key in keys:
        plain = plain.get(key) if isinstance(plain, dict) else None
    return plain if isinstance(plain, dict) else {}


def plain_text(plain: Any) -> str:
    """A scalar of plain data as text; "" for null."""
    if plain is None:
        return ""
    if isinstance(plain, tuple):
        return str(plain[1])
    return plain if isinstance(plain, str) else repr(plain)


# --- sizes ----------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)


def large_enough(now: str, wanted: str) -> bool:
    """Whether a written size is at least another; False when one can't be read.

    >>> large_enough("32gb", "16g"), large_enough("512Mi", "16Gi")
    (True, False)
    """
    one, other = _SIZE.fullmatch(now), _SIZE.fullmatch(wanted)
    return one is not None and other is not None and _bytes(one) >= _bytes(other)


def _bytes(match: re.Match[str]) -> float:
    return float(match[1]) * 1024.0 ** " kmgt".index(match[2].lower() or " ")
