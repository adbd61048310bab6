"""YAML edited as text: nodes say where things stand, only the lines in question change.

In: the text of a file. Out: `YamlFile`, with splices for a scalar, a list item or an entry; comments, order, quotes and
indentation stay. Aliases are never expanded, so that a small file can't become a large one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import yaml

from diag.errors import RewriteError
from diag.fixes.rewrite.model import MAX_CHARACTERS, Splice
from diag.fixes.rewrite.views import (
    View,
    as_is_view,
    double_quoted,
    plain_scalar_view,
    single_quoted,
)

_MAX_EVENTS = 60_000
_MAX_DEPTH = 60
_MAX_EXPANDED = 100_000  # nodes, aliases counted as often as they are used

Node = yaml.Node
MapNode = yaml.MappingNode
ListNode = yaml.SequenceNode
Scalar = yaml.ScalarNode
Path = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")  # anchor and tag in front of a value
_STRING = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"


class YamlFile:
    """The documents of a YAML file. Raises RewriteError for text that is no YAML or too large."""

    def __init__(self, text: str, *, as_json: bool = False) -> None:
        _check_size(text)
        self.text = text
        self.as_json = as_json  # no quotes but double ones
        self.newline = "\r\n" if "\r\n" in text else "\n"
        try:
            self.roots = list(yaml.compose_all(text, Loader=_LOADER))
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise _not_yaml(error) from error
        _check_expansion(self.roots)
        _check_keys(self.roots)

    # --- reading ----------------------------------------------------------------------------------------------

    def at(self, path: Path) -> Node | None:
        """The node at (document, key or index, ...); None where there is none."""
        node: Node | None = self.roots[int(path[0])]
        for step in path[1:]:
            node = _child(node, step)
        return node

    def line(self, node: Node) -> int:
        """The line of a node, from 1."""
        return int(node.start_mark.line) + 1

    def data(self) -> list[Any]:
        """The documents as plain data: dicts, lists, strings, None; (tag, text) for other scalars."""
        return [_plain(root) for root in self.roots]

    def view(self, node: Scalar, *, lines: bool) -> View:
        """The text of a scalar without its quotes. `lines`: a line of a `|` block is a command of its own."""
        start, end = self._body(node), self.end(node)
        whole = as_is_view(self.text, 0, len(self.text), lines=False)
        if node.style in ('"', "'"):
            quoted = double_quoted if node.style == '"' else single_quoted
            return quoted(whole, start + 1, end - 1, lines=False, of_shell=False)
        if node.style in ("|", ">"):
            start = min(self._line_end(start) + len(self.newline), end)
            return as_is_view(self.text, start, end, lines=lines and node.style == "|")
        return plain_scalar_view(self.text, start, end)

    def end(self, node: Node) -> int:
        """The offset after the last character of a value; comments and empty lines after it don't belong to it."""
        if isinstance(node, (MapNode, ListNode)) and not node.flow_style:
            children = (
                [part for pair in node.value for part in pair]
                if isinstance(node, MapNode)
                else node.value
            )
            return max((self.end(child) for child in children), default=node.start_mark.index)
        start, end = int(node.start_mark.index), int(node.end_mark.index)
        if isinstance(node, Scalar) and node.style in ("|", ">"):
            return start + len(self.text[start:end].rstrip())
        return end

    # --- scalars ----------------------------------------------------------------------------------------------

    def written(self, value: str, like: Scalar | None, *, as_text: bool = True) -> str:
        """A value as this file writes it; see `scalar`."""
        return quoted(value) if self.as_json else scalar(value, like=like, as_text=as_text)

    def replace(self, node: Node, value: str, *, as_text: bool) -> Splice:
        """Another value in the place of one, in the same quotes. `as_text`: it must stay a string."""
        like = node if isinstance(node, Scalar) and node.style not in ("|", ">") else None
        start = self._body(node) if isinstance(node, Scalar) else int(node.start_mark.index)
        new = self.written(value, like, as_text=as_text)
        if (
            isinstance(node, Scalar) and not node.value and start == self.end(node)
        ):  # nothing after "key:"
            new = f" {new}"
        end = self.end(node)
        if not isinstance(node, Scalar) and self.text[:start].rstrip().endswith(":"):
            start = len(self.text[:start].rstrip())
            new = f" {new}"
        return Splice(start, end, new)

    # --- lists ------------------------------------------------------------------------------------------------

    def insert_items(
        self, node: ListNode, after: int, values: Sequence[str], like: Scalar | None
    ) -> Splice:
        """New string items after item `after` (-1: in front)."""
        items = [self.written(value, like) for value in values]
        return self.insert_raw(node, after, items)

    def insert_raw(self, node: ListNode, after: int, items: Sequence[str]) -> Splice:
        """New items, already written as YAML; those of a block list may have lines, indented from zero."""
        if not node.value:
            start = int(node.start_mark.index)
            return Splice(start, self.end(node), f"[{', '.join(items)}]")
        near = node.value[max(after, 0)]
        if node.flow_style:
            if after < 0:
                return Splice(near.start_mark.index, near.start_mark.index, ", ".join(items) + ", ")
            gap = self._flow_gap(node, after)
            place = self.end(near)
            return Splice(place, place, f",{gap}" + ", ".join(items))
        dash, gap = self._dash(near)
        pad = " " * (dash - self._line_start(dash))
        lines = [f"{pad}-{gap}" + item.replace("\n", f"\n{pad} {gap}") for item in items]
        block = "\n".join(lines).replace("\n", self.newline)
        if after < 0:
            place = self._line_start(dash)
            return Splice(place, place, block + self.newline)
        place = self._line_end(self.end(near))
        return Splice(place, place, self.newline + block)

    def remove_items(self, node: ListNode, start: int, stop: int) -> Splice:
        """Items taken out; at least one must stay."""
        first, last = node.value[start], node.value[stop - 1]
        if node.flow_style:
            if start > 0:
                return Splice(self.end(node.value[start - 1]), self.end(last), "")
            return Splice(first.start_mark.index, node.value[stop].start_mark.index, "")
        begin = self._line_start(self._dash(first)[0])
        return Splice(begin, self._after_line(self.end(last)), "")

    # --- mappings ---------------------------------------------------------------------------------------------

    def add_entry(self, node: MapNode, key: str, value: str, after: str | None = None) -> Splice:
        """A new entry behind the entry `after`, or as the last; `value` is YAML, further lines indented from zero."""
        near = find(node, after) if after else None
        if node.flow_style:
            if not node.value:
                return Splice(node.start_mark.index, self.end(node), f"{{{key}: {value}}}")
            place = self.end(node.value[-1][1])
            return Splice(place, place, f", {key}: {value}")
        last_key, last_value = near or node.value[-1]
        pad = " " * int(node.value[0][0].start_mark.column)
        if "\n" in value:
            flush = value.startswith("\n- ") and _has_flush_list(node)
            value = value.replace("\n", f"{self.newline}{pad}{'' if flush else '  '}")
        elif value:
            value = f" {value}"
        place = self._line_end(max(self.end(last_key), self._end_here(last_key, last_value)))
        return Splice(place, place, f"{self.newline}{pad}{key}:{value}")

    def remove_entry(self, node: Node | None, key: str) -> Splice:
        """An entry taken out. Raises RewriteError where it can't be told from what stands beside it."""
        assert isinstance(node, MapNode)
        position = next(k for k, pair in enumerate(node.value) if pair[0].value == key)
        key_node, value_node = node.value[position]
        end = max(self.end(key_node) + 1, self._end_here(key_node, value_node))
        if node.flow_style:
            if position > 0:
                return Splice(self.end(node.value[position - 1][1]), end, "")
            if len(node.value) > 1:
                return Splice(key_node.start_mark.index, node.value[1][0].start_mark.index, "")
            return Splice(key_node.start_mark.index, end, "")
        begin = self._line_start(key_node.start_mark.index)
        if self.text[begin : key_node.start_mark.index].strip():
            raise RewriteError(
                f"line {self.line(key_node)} holds more than {key}", hint="take it out by hand"
            )
        return Splice(begin, self._after_line(end), "")

    def fill(self, key: Node, value: Node, block: str) -> Splice:
        """A block, its lines indented from zero, as the value of a key that has none: null, `[]` or `{}`."""
        pad = " " * (int(key.start_mark.column) + 2)
        text = self.newline + self.newline.join(pad + line for line in block.split("\n"))
        if value.start_mark.index < self.end(key):  # an alias
            raise shared(str(getattr(key, "value", "it")), self.line(key))
        if self.end(value) > value.start_mark.index:
            begin = len(self.text[: value.start_mark.index].rstrip(" "))
            return Splice(begin, self.end(value), text)
        place = self._line_end(self.end(key))
        return Splice(place, place, text)

    # --- places -----------------------------------------------------------------------------------------------

    def _end_here(self, key: Node, value: Node) -> int:
        """The end of a value that may be an alias, whose node stands elsewhere."""
        if value.start_mark.index < key.end_mark.index:
            match = re.compile(r"\s*:\s*\*[^\s,\]}]+").match(self.text, self.end(key))
            return match.end() if match else self.end(key) + 1
        return self.end(value)

    def _body(self, node: Node) -> int:
        """The start of a scalar behind its anchor and tag."""
        start, end = int(node.start_mark.index), int(node.end_mark.index)
        match = _PROPERTIES.match(self.text, start, end)
        return (
            match.end()
            if match and isinstance(node, Scalar) and self.text[start : start + 1] in "&!"
            else start
        )

    def _dash(self, item: Node) -> tuple[int, str]:
        """The offset of the dash of a block list's item, and what is between them."""
        start = int(item.start_mark.index)
        dash = self.text.rindex("-", 0, start)
        gap = self.text[dash + 1 : start]
        if gap.strip() or "\n" in gap or self.text[self._line_start(dash) : dash].strip():
            raise RewriteError(
                f"line {self.line(item)} is laid out unusually", hint="put one item on a line"
            )
        return dash, gap or " "

    def _flow_gap(self, node: ListNode, after: int) -> str:
        """What stands between a comma and the last item that begins a line; a blank when all are on one line."""
        items = node.value
        starts = [k for k in range(1, after + 1) if "\n" in self._between(items, k)]
        flags = [k for k in starts if str(items[k].value).startswith("-")]
        return self._between(items, (flags or starts)[-1]) if starts else " "

    def _between(self, items: Sequence[Node], index: int) -> str:
        text = self.text[self.end(items[index - 1]) : items[index].start_mark.index]
        head, _, gap = text.partition(",")
        blank = " \t\r\n\\"  # a Dockerfile continues its lines
        return gap if not head.strip(blank) and not gap.strip(blank) else " "

    def _line_start(self, place: int) -> int:
        return self.text.rfind("\n", 0, place) + 1

    def _line_end(self, place: int) -> int:
        end = self.text.find("\n", place)
        end = len(self.text) if end < 0 else end
        return end - 1 if end > place and self.text[end - 1] == "\r" else end

    def _after_line(self, place: int) -> int:
        end = self.text.find("\n", place)
        return len(self.text) if end < 0 else end + 1


@lru_cache(maxsize=4)
def read(text: str) -> YamlFile:
    """The file of a text; the last few are kept. Raises RewriteError."""
    return YamlFile(text)


def find(node: Node | None, key: str) -> tuple[Node, Node] | None:
    """Key and value of an entry of a mapping; merged (`<<`) entries are not looked at."""
    if isinstance(node, MapNode):
        for key_node, value_node in node.value:
            if isinstance(key_node, Scalar) and key_node.value == key:
                return key_node, value_node
    return None


def own_entry(file: YamlFile, node: MapNode, key: str) -> tuple[Node, Node] | None:
    """As `find`, but an entry that an anchor shares is refused with RewriteError."""
    pair = find(node, key)
    if pair is not None:
        if pair[1].start_mark.index < pair[0].end_mark.index:
            raise shared(key, file.line(pair[0]))
        return pair
    if merged(node, key) is not None:
        raise shared(key, file.line(node))
    return None


def merged(node: MapNode, key: str) -> Node | None:
    """The value that a mapping gets for a key through `<<`."""
    pair = find(node, "<<")
    parts = [] if pair is None else pair[1].value if isinstance(pair[1], ListNode) else [pair[1]]
    found = [below[1] for below in (find(part, key) for part in parts) if below]
    return found[0] if found else None


def shared(key: str, line: int) -> RewriteError:
    """The error for a value that belongs to others as well."""
    return RewriteError(
        f"{key} comes from an anchor that other parts may share (line {line})",
        hint="change the anchor by hand, or write the value out here",
    )


def text_of(node: Node | None) -> str | None:
    """The text of a scalar that is not null."""
    if isinstance(node, Scalar) and node.tag != _NULL:
        return str(node.value)
    return None


def is_empty(node: Node) -> bool:
    """Whether a value is null, `[]` or `{}`."""
    return node.tag == _NULL or node.value in ([], "")


def walk(file: YamlFile) -> Iterator[tuple[Path, Node]]:
    """Every mapping and list with its path, each node once."""
    waiting: list[tuple[Path, Node]] = []
    waiting += [((k,), root) for k, root in enumerate(file.roots)][::-1]
    seen: set[int] = set()
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen or isinstance(node, Scalar):
            continue
        seen.add(id(node))
        yield path, node
        below: list[tuple[Path, Node]] = []
        if isinstance(node, MapNode):
            below = [
                ((*path, str(key.value)), value)
                for key, value in node.value
                if isinstance(key, Scalar)
            ]
        elif isinstance(node, ListNode):
            below = [((*path, k), item) for k, item in enumerate(node.value)]
        waiting += below[::-1]


def scalar(value: str, *, like: Scalar | None = None, as_text: bool = True) -> str:
    r"""A string as YAML, in the quotes of another scalar where they do; `as_text` False: 4096 may stay a number.

    >>> scalar("4096"), scalar("4096", as_text=False), scalar("--x=1"), scalar('{"image": 2}')
    ('"4096"', '4096', '--x=1', '\'{"image": 2}\'')
    """
    style = like.style if like is not None else None
    if style == '"' and '"' in value and "'" not in value and "\n" not in value:
        style = "'"  # easier on the eye than backslashes
    if style == '"':
        return quoted(value)
    if style == "'" and "\n" not in value:
        return "'" + value.replace("'", "''") + "'"
    as_text = as_text and not (like is not None and like.tag != _STRING)
    if _stays(value, as_text=as_text):
        return value
    if '"' in value and "\n" not in value:
        return "'" + value.replace("'", "''") + "'"
    return quoted(value)


def _has_flush_list(node: MapNode) -> bool:
    """Whether lists in a mapping begin in the column of their keys."""
    return any(
        isinstance(value, ListNode)
        and not value.flow_style
        and value.start_mark.column == key.start_mark.column
        for key, value in node.value
    )


def quoted(value: str) -> str:
    """A string as YAML in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def _stays(value: str, *, as_text: bool) -> bool:
    """Whether a value needs no quotes, in a flow list or anywhere else."""
    try:
        found = yaml.compose(f"[{value}]", Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return False
    items = found.value if isinstance(found, ListNode) else []
    return (
        len(items) == 1
        and isinstance(items[0], Scalar)
        and items[0].value == value
        and items[0].style is None
        and (not as_text or items[0].tag == _STRING)
    )


def _child(node: Node | None, step: str | int) -> Node | None:
    if isinstance(step, int):
        inside = node.value if isinstance(node, ListNode) else []
        return inside[step] if step < len(inside) else None
    pair = find(node, step)
    return pair[1] if pair else None


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise RewriteError(f"the file has more than {MAX_CHARACTERS:,} characters")
    depth = 0
    try:
        for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if count > _MAX_EVENTS or depth > _MAX_DEPTH:
                raise RewriteError("the file is too large or too deep to be a deployment")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _not_yaml(error) from error


def _check_expansion(roots: Sequence[Node]) -> None:
    """Refuses aliases that stand for a very large tree, or for themselves."""
    sizes: dict[int, int] = {}

    def size(node: Node) -> int:
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise RewriteError("an anchor of the file contains itself")
            return sizes[id(node)]
        sizes[id(node)] = 0
        parts: list[Node] = []
        if isinstance(node, MapNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, ListNode):
            parts = node.value
        sizes[id(node)] = 1 + sum(size(part) for part in parts)
        return sizes[id(node)]

    if sum(size(root) for root in roots) > _MAX_EXPANDED:
        raise RewriteError("the aliases of the file stand for too much")


def _check_keys(roots: Sequence[Node]) -> None:
    """Refuses a mapping with a key given twice: readers differ in which one counts."""
    waiting, seen = list(roots), set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node, (MapNode, ListNode)):
            continue
        seen.add(id(node))
        if isinstance(node, ListNode):
            waiting += node.value
            continue
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, Scalar) and key.value in keys and key.value != "<<":
                line = int(key.start_mark.line) + 1
                raise RewriteError(f"{key.value} is given twice (line {line})")
            keys.add(str(key.value))
            waiting += [key, value]


def _plain(node: Node) -> Any:
    if isinstance(node, MapNode):
        return {_key(key): _plain(value) for key, value in node.value}
    if isinstance(node, ListNode):
        return [_plain(item) for item in node.value]
    if node.tag == _NULL:
        return None
    return node.value if node.tag == _STRING else (node.tag, node.value)


def _key(node: Node) -> str:
    return str(node.value) if isinstance(node, Scalar) else repr(_plain(node))


def _not_yaml(error: Exception) -> RewriteError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "it can't be read"
    at = f" (line {mark.line + 1})" if mark else ""
    return RewriteError(f"the file is no valid YAML{at}: {problem}")
