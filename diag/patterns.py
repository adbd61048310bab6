"""Patterns of the data files: compiled so that no input can make them run long.

RE2 takes time in proportion to the text, whatever the pattern; where it has no wheel, `regex` runs with a timeout.
Every pattern must compile in RE2 (`oomdoc rules check`): no lookaround, no backreference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

MAX_TEXT = 64 << 10  # characters of one line that a pattern sees
TIMEOUT_S = 0.5  # for one pattern on one line, without RE2
_MIN_LITERAL = 4
_CONTROL = {"t": "\t", "n": "\n", "r": "\r"}


class Match(Protocol):
    """A match, as far as it is used."""

    def groupdict(self) -> dict[str, Any]:
        """Named groups; None for one that took no part."""

    def start(self) -> int:
        """Index of its first character."""


class Pattern(Protocol):
    """A compiled pattern."""

    def search(self, text: str) -> Match | None:
        """The first match."""

    def finditer(self, text: str) -> Iterable[Match]:
        """All matches, not overlapping."""


class _WithTimeout:
    """`regex` in place of RE2: a search that takes too long finds nothing."""

    def __init__(self, pattern: str) -> None:
        import regex

        self._pattern = regex.compile(pattern)

    def search(self, text: str) -> Match | None:
        try:
            match: Match | None = self._pattern.search(text, timeout=TIMEOUT_S)
            return match
        except TimeoutError:
            return None

    def finditer(self, text: str) -> Iterator[Match]:
        try:
            yield from self._pattern.finditer(text, timeout=TIMEOUT_S)
        except TimeoutError:
            return


def _re2() -> Any:
    """The RE2 module, or None where it has no wheel."""
    try:
        import re2
    except ImportError:
        return None
    return re2


def _options(re2: Any) -> Any:
    options = re2.Options()
    options.max_mem = 256 << 20
    options.log_errors = False
    options.never_nl = True
    return options


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> Pattern:
    """The pattern, ready to search. A pattern never matches across a newline."""
    re2 = _re2()
    if re2 is None:
        return _WithTimeout(pattern)
    compiled: Pattern = re2.compile(pattern, _options(re2))
    return compiled


def found(pattern: str, text: str) -> bool:
    """Whether the pattern occurs in the first MAX_TEXT characters."""
    return compile_pattern(pattern).search(text[:MAX_TEXT]) is not None


def compile_set(patterns: Sequence[str]) -> Callable[[str], list[int]]:
    """A function that gives the indices of the patterns that may be in a text, ascending."""
    everything = list(range(len(patterns)))
    re2 = _re2()
    if re2 is None or not patterns:
        return lambda _: everything
    wanted = re2.Set.SearchSet(_options(re2))
    for pattern in patterns:
        wanted.Add(plain_groups(pattern))
    wanted.Compile()
    return lambda text: sorted(wanted.Match(text) or ())


def plain_groups(pattern: str) -> str:
    """The pattern with named groups made plain: nothing to capture, quicker to scan."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


def why_refused(pattern: str) -> str | None:
    """What is wrong with a pattern; None when RE2 and `regex` both take it."""
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        return f"pattern does not compile: {error}"
    re2 = _re2()
    if re2 is None:
        return None
    try:
        re2.compile(plain_groups(pattern), _options(re2))
    except re2.error as error:
        return f"RE2 refuses the pattern (no lookaround, no backreference): {error}"
    return None


def required_literal(pattern: str) -> str:
    r"""The longest text every match holds, or "".

    >>> required_literal(r"GPU KV cache size:\s+(?P<kv_tokens>[\d,]+)\s+tokens")
    'GPU KV cache size:'
    >>> required_literal(r"(?:A|B) only"), required_literal(r"one|two"), required_literal(r"capacit?y of")
    (' only', '', 'capaci')
    """
    if "(?i" in pattern:
        return ""
    runs: list[str] = []
    run: list[str] = []
    depth = index = 0

    def close() -> None:
        runs.append("".join(run))
        run.clear()

    while index < len(pattern):
        char = pattern[index]
        if char == "[":
            index = _end_of_class(pattern, index)
            close()
        elif char in "()":
            depth += 1 if char == "(" else -1
            close()
        elif char == "|" and depth == 0:
            return ""
        elif char == "{":
            index = pattern.find("}", index) if "}" in pattern[index:] else index
            close()
        elif char in ".^$|?*+":
            close()
        else:
            plain: str | None = char
            if char == "\\":
                index += 1
                plain = _escaped(pattern[index : index + 1])
            if plain is None or depth or pattern[index + 1 : index + 2] in ("?", "*", "{"):
                close()
            else:
                run.append(plain)
                if pattern[index + 1 : index + 2] == "+":
                    close()
        index += 1
    close()
    longest = max(runs, key=len)
    return longest if len(longest) >= _MIN_LITERAL else ""


def _escaped(char: str) -> str | None:
    """The character an escape stands for; None for classes and anchors."""
    if char in _CONTROL:
        return _CONTROL[char]
    return None if char.isalnum() else char


def _end_of_class(pattern: str, start: int) -> int:
    """Index of the bracket that closes a character class."""
    index = start + 1
    if pattern[index : index + 1] == "^":
        index += 1
    if pattern[index : index + 1] == "]":
        index += 1
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index
