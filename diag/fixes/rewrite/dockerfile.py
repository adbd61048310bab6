"""Dockerfiles: ENTRYPOINT and CMD of the last stage, as JSON lists or shell text, and ENV."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diag.errors import RewriteError
from diag.facts.model import Value
from diag.fixes.command import written
from diag.fixes.model import Change
from diag.fixes.rewrite.arguments import Segment, Words, set_flag
from diag.fixes.rewrite.container import (
    Launch,
    ListSegment,
    launch,
    set_script_variable,
    starts_vllm,
)
from diag.fixes.rewrite.model import (
    MAX_CHARACTERS,
    CannotPutError,
    Seen,
    Splice,
    is_container_setting,
    same,
)
from diag.fixes.rewrite.shelltext import TextSegment
from diag.fixes.rewrite.views import as_is_view
from diag.fixes.rewrite.yamltext import ListNode, YamlFile

_INSTRUCTION = re.compile(
    r"^[ \t]*(?P<word>[A-Za-z]+)[ \t]+(?P<body>(?:[^\n\\]|\\[ \t]*\r?\n(?:[ \t]*#[^\n]*\n)*|\\[^\n])*)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One instruction; `body` and `end` are offsets of its text in the file."""

    word: str
    start: int
    body: int
    end: int


def edit(text: str, change: Change, service: str | None) -> list[Splice]:  # noqa: ARG001 - one interface
    """The splices that make a change. Raises RewriteError, or CannotPutError for what a Dockerfile has no place for."""
    stage = _stage(text)
    if is_container_setting(change):
        raise CannotPutError(f"start the container with {change.flag} {written(change.to or '')}")
    if change.env is not None:
        return _set_variable(text, stage, change.env, change.to)
    assert change.flag is not None
    return set_flag(_launch(text, stage).words, change.flag, change.to)


def seen(text: str, service: str | None) -> Seen:  # noqa: ARG001
    """What the file says, for the check."""
    words: list[str] = []
    variables: dict[str, str | None] = {}
    rest: list[str] = []
    last = 0
    for item in _stage(text):
        body = text[item.body : item.end]
        if item.word == "ENV":
            segment = _env(text, item)
            variables.update(_pairs(segment))
        elif item.word in ("ENTRYPOINT", "CMD"):
            segment_ = _segment(text, item)
            words += [item.word, *segment_.values]
        else:
            rest.append(body)
        rest.append(text[last : item.start].strip())
        last = item.end
    rest.append(text[last:].strip())
    return Seen(words=tuple(words), env=variables, rest=[part for part in rest if part])


def arguments(text: str, service: str | None) -> Words:  # noqa: ARG001
    """vLLM's words."""
    return _launch(text, _stage(text)).words


def _stage(text: str) -> list[_Instruction]:
    """The instructions of the last stage, its FROM first."""
    if len(text) > MAX_CHARACTERS:
        raise RewriteError(f"the file has more than {MAX_CHARACTERS:,} characters")
    found = [
        _Instruction(
            match["word"].upper(),
            match.start(),
            match.start("body"),
            match.start("body") + len(match["body"].rstrip()),
        )
        for match in _INSTRUCTION.finditer(text)
        if match["word"].upper() in ("FROM", "ENV", "ENTRYPOINT", "CMD")
    ]
    first = max((k for k, item in enumerate(found) if item.word == "FROM"), default=None)
    if first is None:
        raise RewriteError("the file has no FROM")
    return found[first:]


def _segment(text: str, item: _Instruction) -> Segment:
    body = text[item.body : item.end]
    if body.startswith("["):
        # The list stands at its place in a text of blanks, so that its offsets are those of the file.
        blank = re.sub(r"[^\n]", " ", text[: item.body])
        listed = re.sub(r"\\(?=[ \t]*\r?\n)", " ", body)
        file = YamlFile(blank + listed, as_json=True)
        file.text = text  # of the same length
        node = file.roots[0] if file.roots else None
        if isinstance(node, ListNode):
            return ListSegment(file, node)
    return TextSegment(text, as_is_view(text, item.body, item.end, lines=True, docker=True))


def _launch(text: str, stage: list[_Instruction]) -> Launch:
    words = text[stage[0].body : stage[0].end].split()
    image = next((word for word in words if not word.startswith("--")), None)
    segments: list[Segment] = []
    last = None
    for word in ("ENTRYPOINT", "CMD"):
        item = next((item for item in reversed(stage) if item.word == word), None)
        if item is not None:
            segments.append(_segment(text, item))
            last = segments[-1]
    own = starts_vllm((), image) and not any(item.word == "ENTRYPOINT" for item in stage)
    return launch(segments, own_entry_point=own, last=last)


# --- variables --------------------------------------------------------------------------------------------------


def _env(text: str, item: _Instruction) -> TextSegment:
    return TextSegment(text, as_is_view(text, item.body, item.end, lines=True, docker=True))


def _pairs(segment: TextSegment) -> dict[str, str | None]:
    values = segment.values
    if values and "=" not in values[0]:  # the old form: ENV NAME value
        return {values[0]: " ".join(values[1:])}
    return {head: now for head, _, now in (word.partition("=") for word in values)}


def _set_variable(
    text: str, stage: list[_Instruction], name: str, value: Value | None
) -> list[Splice]:
    command = _launch(text, stage).command
    inside = set_script_variable(command, name, value) if command else None
    if inside is not None:
        return inside
    for item in reversed(stage):
        segment = _env(text, item) if item.word == "ENV" else None
        if segment is None or name not in _pairs(segment):
            continue
        if value is not None and same(_pairs(segment)[name], value):
            return []
        return [_changed(text, item, segment, name, value)]
    if value is None:
        return []
    place = next(item.start for item in stage if item.word in ("ENTRYPOINT", "CMD"))
    newline = "\r\n" if "\r\n" in text else "\n"
    return [Splice(place, place, f"ENV {name}={written(value)}{newline}")]


def _changed(
    text: str, item: _Instruction, segment: TextSegment, name: str, value: Value | None
) -> Splice:
    pairs = _pairs(segment)
    if value is None and len(pairs) == 1:
        end = text.find("\n", item.end) + 1 or len(text)
        return Splice(item.start, end, "")
    index = next((k for k, word in enumerate(segment.values) if word.startswith(f"{name}=")), None)
    if index is None:
        if value is None or len(segment.values) < 2:
            raise RewriteError(f"ENV {name} is written in the old form", hint="change it by hand")
        return segment.replace(1, written(value))
    if value is None:
        return segment.remove(index, index + 1)
    return segment.assign(index, name, written(value))
