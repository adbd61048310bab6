"""Shell words with their places in a file, and edits that keep line breaks, quotes and comments as they are.

In: a `View` of a script or of a quoted command. Out: `TextSegment`, whose edits are splices of the file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from diag.facts.args import is_flag
from diag.fixes.command import OPERATOR, Parts, vllm_commands
from diag.fixes.rewrite.model import Splice
from diag.fixes.rewrite.views import View, double_quoted, single_quoted

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh"})
_DEEPEST = 3  # scripts within scripts

_CONTINUED = r"[\\^`][ \t]*\r?\n"
_BLANK = re.compile(rf"(?:[ \t\r]|{_CONTINUED})+")
_BLANK_DOCKER = re.compile(rf"(?:[ \t\r]|{_CONTINUED}(?:[ \t]*\#[^\n]*\n)*)+")
_BLANK_ALL = re.compile(rf"(?:[ \t\r\n]|{_CONTINUED})+")
_COMMENT = re.compile(r"#[^\n]*")
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(?P<end>\w+)\1")
ENDS = ("&&", ";", "\n")  # what ends a command that the next one does not depend on
_TOKEN = re.compile(
    r"""(?:\d?(?:>>|>&|>|<)&?\d?|\|\|?|&&|&|;|\n|[()])   # shell operators
    |(?:'[^']*'|"(?:[^"\\]|\\.)*"|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^{}]*\}|\\[^\r\n]|[^\s'"|&;<>()\\])+
    |['"\\].*""",  # an open quote takes the rest
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """One shell word or operator; `start` and `end` count in its view."""

    raw: str
    start: int
    end: int

    @property
    def value(self) -> str:
        """The word without its quotes; variables stay as written."""
        if not re.search(r"['\"\\]", self.raw):
            return self.raw
        try:
            return "".join(shlex.split(self.raw))
        except ValueError:
            return self.raw


def tokens(view: View) -> Iterator[Token]:
    """Words and operators in order; blanks, continued lines and comments are between them."""
    blank = _BLANK_DOCKER if view.docker else _BLANK if view.lines else _BLANK_ALL
    text, position, fresh = view.text, 0, True  # fresh: `#` would begin a comment here
    here: str | None = None  # what ends the document that begins on the next line
    while position < len(text):
        if gap := blank.match(text, position):
            position, fresh = gap.end(), True
            continue
        if view.lines and fresh and (comment := _COMMENT.match(text, position)):
            position = comment.end()
            continue
        if view.lines and (begin := _HERE.match(text, position)):
            here = begin["end"]
            yield Token(begin.group(), position, begin.end())
            position, fresh = begin.end(), False
            continue
        match = _TOKEN.match(text, position)
        end = match.end() if match else position + 1
        if match:
            yield Token(match.group(), position, end)
        position, fresh = end, match is not None and _is_operator(match.group())
        if here is not None and text[end - 1] == "\n":
            position, here = _after_document(text, end, here), None


def _after_document(text: str, start: int, end: str) -> int:
    """The offset behind a here-document; `start` when nothing ends it."""
    match = re.compile(rf"^[ \t]*{end}[ \t]*\r?$", re.MULTILINE).search(text, start)
    return match.end() if match else start


def _is_operator(raw: str) -> bool:
    return raw in "()" or OPERATOR.fullmatch(raw) is not None


class TextSegment:
    """Words of a command written as text."""

    def __init__(self, file: str, view: View) -> None:
        self.file = file
        self.view_of_text = view
        self.tokens = list(tokens(view))

    @cached_property
    def values(self) -> list[str]:
        """The words without quotes."""
        return [token.value for token in self.tokens]

    @cached_property
    def raws(self) -> list[str]:
        """The words as written; brackets end a command as `;` does."""
        return [";" if token.raw in "()" else token.raw for token in self.tokens]

    def replace(self, index: int, value: str) -> Splice:
        """Another word in the place of one; `--flag=` and quotes stay."""
        token = self.tokens[index]
        head, sign, old = token.raw.partition("=")
        new_head, _, new_tail = value.partition("=")
        if sign and is_flag(token.raw) and head == new_head and "'" not in head:
            return self._splice(token.end - len(old), token.end, self._requoted(old, new_tail))
        return self._splice(token.start, token.end, self._requoted(token.raw, value))

    def assign(self, index: int, name: str, value: str) -> Splice:
        """`NAME=old` with another value, in its quotes."""
        token = self.tokens[index]
        if not token.raw.startswith(f"{name}="):
            return self.replace(index, f"{name}={value}")
        old = token.raw[len(name) + 1 :]
        return self._splice(token.end - len(old), token.end, self._requoted(old, value))

    def insert(self, after: int, values: Sequence[str], lead: int | None = None) -> Splice:
        """New words after a word (-1: in front), set apart as the word `lead` is; by default as the last flag is."""
        words = " ".join(self.view_of_text.quote(value) for value in values)
        view = self.view_of_text
        if after < 0:
            first = self.tokens[0].start if self.tokens else 0
            return self._splice(first, first, f"{words} " if self.tokens else words)
        place = view.at[self.tokens[after].end]
        return Splice(place, place, self._lead(after, lead) + view.escape(words))

    def remove(self, start: int, stop: int) -> Splice:
        """Nothing in the place of the words from `start` up to `stop`, nor of the blanks before them."""
        if start > 0 and not _is_operator(self.tokens[start - 1].raw):
            return self._splice(self.tokens[start - 1].end, self.tokens[stop - 1].end, "")
        if stop < len(self.tokens) and self.tokens[stop].raw in ENDS:
            stop += 1  # nothing is left of this command
        last = stop == len(self.tokens)
        until = self.tokens[-1].end if last else self.tokens[stop].start
        if not last and self.tokens[stop - 1].raw == "\n":
            until = self.tokens[stop - 1].end
        return self._splice(self.tokens[start].start, until, "")

    def inside(self, index: int, *, lines: bool = True) -> View | None:
        """What stands within the quotes of a word; None for a word that is not quoted as a whole."""
        token = self.tokens[index]
        view, raw = self.view_of_text, token.raw
        if len(raw) < 2 or raw[0] != raw[-1] or raw[0] not in "'\"":
            return None
        start, end = token.start + 1, token.end - 1
        if raw[0] == "'":
            if "'" in raw[1:-1]:
                return None
            return single_quoted(view, start, end, lines=lines, of_shell=True)
        if re.search(r'(?<!\\)(?:\\\\)*"', raw[1:-1]):
            return None
        return double_quoted(view, start, end, lines=lines, of_shell=True)

    def _splice(self, start: int, end: int, new: str) -> Splice:
        view = self.view_of_text
        return Splice(view.at[start], view.at[end], view.escape(new))

    def _requoted(self, old: str, value: str) -> str:
        """The value quoted as the old word was, or as a shell needs it."""
        quote = old[:1]
        if quote in ("'", '"') and old.endswith(quote) and len(old) > 1:
            special = "'" if quote == "'" else '"\\$`'
            if not any(letter in value for letter in special):
                return f"{quote}{value}{quote}"
        return self.view_of_text.quote(value)

    def _lead(self, after: int, like: int | None) -> str:
        """The blanks, as in the file, before the word `like` or before the last flag up to `after`."""
        if like is None:
            like = next((k for k in range(after, 0, -1) if is_flag(self.tokens[k].raw)), None)
        if like is None or like == 0:
            return " "
        at = self.view_of_text.at
        lead = self.file[at[self.tokens[like - 1].end] : at[self.tokens[like].start]]
        if "\n" not in lead:
            return " "
        if "#" in lead:  # a comment of the line before; not to be repeated
            lead = lead[: lead.index("\n") + 1] + lead[lead.rindex("\n") + 1 :]
        return lead


@dataclass(frozen=True, slots=True)
class Command:
    """A command that starts vLLM. `docker`: the `docker run` around it, when its options are in another text."""

    segment: TextSegment
    parts: Parts
    docker: tuple[TextSegment, Parts] | None = None

    @property
    def line(self) -> int:
        """The line of the file it begins in, from 1."""
        segment = self.segment
        place = segment.view_of_text.at[segment.tokens[self.parts.start].start]
        return segment.file.count("\n", 0, place) + 1

    @property
    def written(self) -> str:
        """The whole command as written."""
        segment, parts = self.segment, self.parts
        first, last = segment.tokens[parts.start], segment.tokens[max(parts.start, parts.end - 1)]
        return segment.view_of_text.text[first.start : last.end]


def find_commands(
    segment: TextSegment, docker: tuple[TextSegment, Parts] | None = None, depth: int = 0
) -> Iterator[Command]:
    """Every command of a script that starts vLLM, also within `bash -c "..."` and other quoted words."""
    found = False
    for parts in vllm_commands(segment.raws):
        around = (segment, parts) if parts.docker is not None else docker
        script = script_word(segment.values[parts.args : parts.end])
        view = None if script is None else segment.inside(parts.args + script)
        found = True
        if view is not None and depth < _DEEPEST:
            yield from find_commands(TextSegment(segment.file, view), around, depth + 1)
        else:
            yield Command(segment, parts, around)
    if found or depth >= _DEEPEST:
        return
    for index, token in enumerate(segment.tokens):
        if "vllm" in token.raw and (view := segment.inside(index)) is not None:
            yield from find_commands(TextSegment(segment.file, view), docker, depth + 1)


def script_word(values: Sequence[str]) -> int | None:
    """The index of the script in `bash -c SCRIPT`; None when the words don't start so.

    >>> script_word(["/bin/sh", "-ec", "vllm serve m"])
    2
    """
    if not values or values[0].rsplit("/", 1)[-1] not in SHELLS:
        return None
    for index, word in enumerate(values[1:-1], 1):
        if not word.startswith("-"):
            return None
        if re.fullmatch(r"-[a-z]*c[a-z]*", word):
            return index + 1
    return None
