"""Finds out whether a log was wrapped at a screen width, and puts its lines together again.

In: the visible text of all lines. Out: the same texts with pieces joined, each with the indices of
its first and last line. A terminal cuts at the width, through words and numbers; mail and browsers
cut at blanks before it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIN_WIDTH, _MAX_WIDTH = 60, 300
_RAGGED = 25  # columns by which word-wrapped lines fall short of the width
_MIN_RAGGED = 20  # a long word in the next line leaves this one short
_MAX_PIECES = 600  # pieces of one message
_LOST_COLUMNS = 45  # colour codes of up to two process prefixes and a repeat mark
_LEVEL = r"DEBUG|INFO|WARNING|ERROR|CRITICAL"

# How a line begins that is no continuation of the one before.
_OWN_START = re.compile(
    rf"""\s{{2,}}|\t|$
    |\((?:[A-Za-z][\w.:-]{{0,60}}\ )?(?:rank=\d+\ )?pid=\d|\(raylet
    |(?:{_LEVEL})(?::\s|\ +\d|\ +\[)
    |\[?\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d
    |[A-Z][a-z]{{2}}\ [\ \d]\d\ \d\d:\d\d:\d\d\ \S
    |\[(?:rank|default)\d+\]:|\[?[IWEF]\d{{3,8}}\ \d\d:\d\d|\[[IWE]\ \w+\.cpp
    |[\w.-]{{1,60}}\ *\|\ |[\w.-]+:\d+:\d+\ \[\d+\]\s
    |Traceback\ \(most|\ *File\ "|During\ handling|The\ above\ exception
    |(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Warning|Exit)(?::|$)
    |[|+│╭╰╔╚║>#$●]|[-=*_~^.\s]{{4,}}|\[\s*[\d.]+\]\s|\{{"|Process\ \w+-\d+:
    |\S{{1,300}}:\d+:\ \w{{0,40}}Warning:
    """,
    re.VERBOSE,
)
_PROCESS = re.compile(r"\((?:[A-Za-z][\w.:-]{0,60} )?(?:rank=\d+ )?pid=\d")
_PUNCTUATION = re.compile(r"[\W_]+$")
_BAR = re.compile(r"\d%\||\d+/\d+ \[")


@dataclass(frozen=True, slots=True)
class Wrap:
    """How a log was wrapped.

    `narrow`: smaller widths of lines with a process prefix, whose colour codes used columns and
    then got lost.
    """

    width: int
    narrow: frozenset[int] = frozenset()
    at_blanks: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """One message and the indices of the first and last line it was on."""

    text: str
    first: int
    last: int


def find_wrap(lines: Sequence[str]) -> Wrap | None:
    """The wrap of a log, or None when it was not wrapped (or too little tells)."""
    if len(lines) < 8:
        return None
    lengths = [len(line) for line in lines]
    counts = Counter(length for length in lengths if length >= _MIN_WIDTH)
    pairs = [index for index in range(len(lines) - 1) if _may_continue(lines, index)]
    if len(pairs) < 3:
        return None
    return _hard_wrap(lines, lengths, counts, pairs) or _word_wrap(lines, lengths, counts, pairs)


def _may_continue(lines: Sequence[str], index: int, shortest: int = _MIN_WIDTH) -> bool:
    """Whether the next line can be the rest of this one."""
    line, after = lines[index], lines[index + 1]
    return (
        len(line) >= shortest
        and not _OWN_START.match(after)
        and line[:10] != after[:10]
        and not _PUNCTUATION.match(line)
        and not _BAR.search(after)
    )


def _hard_wrap(
    lines: Sequence[str], lengths: list[int], counts: Counter[int], pairs: list[int]
) -> Wrap | None:
    """A width at which nearly every line goes on, with (nearly) no line longer."""
    at = Counter(lengths[index] for index in pairs)
    total = sum(counts.values())
    longer = 0
    for length in sorted(counts, reverse=True):
        going_on = at.get(length, 0)
        if (
            length <= _MAX_WIDTH
            and going_on >= 3
            and going_on * 10 >= counts[length] * 7
            and longer * 20 <= total
        ):
            soft = sum(
                1
                for index in pairs
                if length - _RAGGED < lengths[index] < length
                and _overflows(lines[index], lines[index + 1], length)
            )
            if soft > going_on:
                return Wrap(length, at_blanks=True)
            return Wrap(length, _narrow_widths(lines, lengths, pairs, length))
        longer += counts[length]
        if longer * 20 > total:
            return None
    return None


def _narrow_widths(
    lines: Sequence[str], lengths: list[int], pairs: list[int], width: int
) -> frozenset[int]:
    """Widths below the screen's at which most lines with process prefixes go on."""
    prefixed = Counter(
        lengths[index]
        for index, line in enumerate(lines)
        if width - _LOST_COLUMNS <= lengths[index] < width and has_process(line)
    )
    going_on = Counter(lengths[index] for index in pairs if has_process(lines[index]))
    return frozenset(length for length, count in prefixed.items() if going_on[length] * 2 >= count)


def _word_wrap(
    lines: Sequence[str], lengths: list[int], counts: Counter[int], pairs: list[int]
) -> Wrap | None:
    """A width no line exceeds, and that each line would exceed with the next line's first word."""
    total = sum(counts.values())
    longer = 0
    width = 0
    for length in sorted(counts, reverse=True):
        longer += counts[length]
        if longer * 33 > total:
            width = length
            break
    if not _MIN_WIDTH <= width <= _MAX_WIDTH or len(pairs) < 6:
        return None
    full = sum(1 for index in pairs if _overflows(lines[index], lines[index + 1], width))
    near = sum(1 for index in pairs if lengths[index] > width - _RAGGED)
    if full * 10 >= len(pairs) * 8 and near * 10 >= len(pairs) * 8:
        return Wrap(width, at_blanks=True)
    return None


def _overflows(line: str, after: str, width: int) -> bool:
    word = after.split(None, 1)[0] if after.strip() else ""
    return len(line) <= width < len(line) + 1 + len(word)


def has_process(line: str) -> bool:
    """Whether a `(name pid=N)` stands at the front."""
    return line[:1] == "(" and _PROCESS.match(line) is not None


def rejoin(lines: Sequence[str], wrap: Wrap) -> list[Joined]:
    """Lines with their continuations joined, with a blank only where words were wrapped."""
    joined: list[Joined] = []
    index = 0
    while index < len(lines):
        first = index
        pieces = [lines[index]]
        while index + 1 < len(lines) and index - first < _MAX_PIECES:
            glue = _glue(lines, index, wrap)
            if glue is None:
                break
            index += 1
            pieces.append(glue + lines[index])
        joined.append(Joined("".join(pieces), first, index))
        index += 1
    return joined


def _glue(lines: Sequence[str], index: int, wrap: Wrap) -> str | None:
    """What joins a line with the next; None when they don't belong together."""
    line, after = lines[index], lines[index + 1]
    if not _may_continue(lines, index, _MIN_RAGGED if wrap.at_blanks else _MIN_WIDTH):
        return None
    if wrap.at_blanks:
        if not _overflows(line, after, wrap.width):
            return None
        # A word longer than the screen is cut like anything else.
        word = len(line) - line.rfind(" ") + len(after.split(None, 1)[0])
        return "" if len(line) == wrap.width and word > wrap.width else " "
    if len(line) == wrap.width or (len(line) in wrap.narrow and has_process(line)):
        return ""
    # A blank at the cut is often lost in copying.
    return " " if len(line) == wrap.width - 1 and not after.startswith(" ") else None
