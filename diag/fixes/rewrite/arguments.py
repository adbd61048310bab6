"""vLLM's arguments wherever they stand: a flag set, added or removed in lists and texts alike.

In: slots, that is words of one or more segments in the order vLLM gets them. Out: splices of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from diag.errors import RewriteError
from diag.facts.args import is_flag
from diag.facts.model import Value
from diag.fixes.command import flag_end, flag_name, spoken, values_end, written
from diag.fixes.flags import takes
from diag.fixes.rewrite.model import Splice, same


class Segment(Protocol):
    """Words that stand together in a file: a YAML list, or a text."""

    @property
    def values(self) -> list[str]:
        """The words as vLLM gets them."""

    def replace(self, index: int, value: str) -> Splice:
        """Another word in the place of one."""

    def insert(self, after: int, values: Sequence[str]) -> Splice:
        """New words after the word `after`; -1: in front of all."""

    def remove(self, start: int, stop: int) -> Splice:
        """Words taken out."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a command: (segment, index in it) each; vLLM's own are those from `start` up to `end`."""

    slots: Sequence[tuple[Segment, int]]
    start: int
    end: int
    home: Segment  # takes new words when vLLM has none yet

    @property
    def values(self) -> list[str]:
        """All words, not only vLLM's."""
        return [segment.values[index] for segment, index in self.slots]


def set_flag(words: Words, flag: str, value: Value | None) -> list[Splice]:
    """The edits that give a flag its value; none when it has it. `value` None or False takes the flag out."""
    values, wanted = words.values, flag_name(flag)
    found = [
        index
        for index in range(words.start, words.end)
        if is_flag(values[index]) and flag_name(values[index]) in (wanted, f"no-{wanted}")
    ]
    if value is None or value is False:
        return [edit for index in found for edit in _removed(words, values, index)]
    switch = takes(flag) == "switch" or value is True
    if not found:
        return [_added(words, values, [flag] if switch else [flag, written(value)])]
    index = found[-1]  # the last of several counts
    if switch or flag_name(values[index]) != wanted:
        return _switched_on(words, values, index, flag)
    return _valued(words, values, index, value)


def _switched_on(words: Words, values: Sequence[str], index: int, flag: str) -> list[Splice]:
    segment, at = words.slots[index]
    head, sign, value = values[index].partition("=")
    if flag_name(head) != flag_name(flag):  # --no-...
        return [segment.replace(at, flag)]
    if sign and value.lower() == "false":
        return [segment.replace(at, head)]
    if spoken(values, index, words.end) and values[index + 1].lower() == "false":
        after, at_after = words.slots[index + 1]
        return [after.replace(at_after, "True" if values[index + 1][0] == "F" else "true")]
    return []


def _valued(words: Words, values: Sequence[str], index: int, value: Value) -> list[Splice]:
    segment, at = words.slots[index]
    head, sign, now = values[index].partition("=")
    if sign:
        return [] if same(now, value) else [segment.replace(at, f"{head}={written(value)}")]
    stop = values_end(values, index, words.end)
    if stop == index + 1:
        return [segment.insert(at, [written(value)])]
    if stop == index + 2 and same(values[index + 1], value):
        return []
    first, at_first = words.slots[index + 1]
    return [
        first.replace(at_first, written(value)),
        *(
            words.slots[k][0].remove(words.slots[k][1], words.slots[k][1] + 1)
            for k in range(index + 2, stop)
        ),
    ]


def _added(words: Words, values: Sequence[str], new: list[str]) -> Splice:
    own = values[words.start : words.end]
    if len(new) == 2 and _joins(own):
        new = ["=".join(new)]
    if words.end == words.start and (
        not words.end or words.slots[words.end - 1][0] is not words.home
    ):
        return words.home.insert(-1, new)
    segment, at = words.slots[words.end - 1]
    return segment.insert(at, new)


def _joins(own: Sequence[str]) -> bool:
    """Whether these arguments are written `--flag=value` and never `--flag value`."""
    joined = any(is_flag(word) and "=" in word for word in own)
    apart = any(
        is_flag(one) and "=" not in one and not is_flag(other) for one, other in pairwise(own)
    )
    return joined and not apart


def _removed(words: Words, values: Sequence[str], index: int) -> list[Splice]:
    stop = flag_end(values, index, words.end)
    edits = []
    while index < stop:
        segment, at = words.slots[index]
        last = index
        while last + 1 < stop and words.slots[last + 1][0] is segment:
            last += 1
        if len(segment.values) == last - index + 1:
            raise RewriteError(
                f"{values[index]} is all there is in its list", hint="take it out by hand"
            )
        edits.append(segment.remove(at, at + last - index + 1))
        index = last + 1
    return edits
