"""A command that sits inside other text - a script, a quoted YAML scalar, `bash -c "..."` - read without its quoting.

A `View` knows for each character where it stands in the file and how a new piece must be quoted to stand there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diag.errors import RewriteError

_SIMPLE_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "n": "\n", "t": "\t", " ": " "}
_ENDS_PLAIN = re.compile(r":(?:\s|$)|\s#|[\[\]{},]")
_SHELL_ESCAPED = '"\\$`'


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """`text` unquoted; `at[i]`: offset in the file of its i-th character, with one more for the end.

    `lines`: a newline ends a command and `#` begins a comment; otherwise both are as any blank or letter.
    `docker`: comment lines may stand between continued lines.
    """

    text: str
    at: Sequence[int]
    escape: Callable[[str], str]
    quote: Callable[[str], str] = shlex.quote  # a word of this text
    lines: bool = False
    docker: bool = False


class NeedsQuotesError(Exception):
    """A piece can't stand in a YAML scalar that has no quotes; `start` and `end` of the scalar in the file."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.start = start
        self.end = end


def as_is_view(text: str, start: int, end: int, *, lines: bool, docker: bool = False) -> View:
    """A part of the file as it stands."""
    return View(
        text=text[start:end],
        at=range(start, end + 1),
        escape=lambda new: new,
        lines=lines,
        docker=docker,
    )


def plain_scalar_view(text: str, start: int, end: int) -> View:
    """A YAML scalar without quotes. Its `escape` raises NeedsQuotesError for what would end it."""

    def escape(new: str) -> str:
        if _ENDS_PLAIN.search(new):
            raise NeedsQuotesError(start, end)
        return new

    return View(text=text[start:end], at=range(start, end + 1), escape=escape)


def single_quoted(outer: View, start: int, end: int, *, lines: bool, of_shell: bool) -> View:
    """What stands between single quotes: nothing is escaped in a shell, `''` is a quote in YAML."""
    inner = outer.text[start:end]
    quote = "'\\''" if of_shell else "''"

    def escape(text: str) -> str:
        return outer.escape(text.replace("'", quote))

    if of_shell:
        at = outer.at[start : end + 1]
        return View(text=inner, at=at, escape=escape, quote=_in_double_quotes, lines=lines)
    letters, at, index = [], [], start
    while index < end:
        letters.append(outer.text[index])
        at.append(outer.at[index])
        index += 2 if outer.text.startswith("''", index) else 1
    return View(text="".join(letters), at=[*at, outer.at[end]], escape=escape, lines=lines)


def _in_double_quotes(word: str) -> str:
    """A word quoted for a shell without single quotes."""
    if shlex.quote(word) == word:
        return word
    return '"' + re.sub(r'["\\$`]', r"\\\g<0>", word) + '"'


def double_quoted(outer: View, start: int, end: int, *, lines: bool, of_shell: bool) -> View:
    """What stands between double quotes. Raises RewriteError for escapes that give a character's code."""
    letters, at, index = [], [], start
    while index < end:
        letter, where = outer.text[index], outer.at[index]
        index += 1
        if letter == "\\" and index < end and outer.text[index] not in "\r\n":
            found = _unescaped(outer.text[index], of_shell=of_shell)
            letter = found or letter
            index += found is not None
        letters.append(letter)
        at.append(where)
    special = r'["\\$`]' if of_shell else r'["\\]'

    def escape(text: str) -> str:
        return outer.escape(re.sub(rf"{special}(?!\r?\n)", r"\\\g<0>", text))

    return View(text="".join(letters), at=[*at, outer.at[end]], escape=escape, lines=lines)


def _unescaped(letter: str, *, of_shell: bool) -> str | None:
    """The character that an escape stands for; None when the backslash stands for itself."""
    if of_shell:
        return letter if letter in _SHELL_ESCAPED else None
    if letter in _SIMPLE_ESCAPES:
        return _SIMPLE_ESCAPES[letter]
    raise RewriteError(
        f"the command is quoted in an unusual way (\\{letter})", hint="write it with plain quotes"
    )
