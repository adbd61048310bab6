"""Patterns of the data files: compiled so that no input can make them run long.

RE2 takes time in proportion to the text, whatever the pattern; where it has no wheel, `regex` runs with a timeout.
Every pattern must compile in RE2 (`oomdoc rules check`): no lookaround, no backreference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

MAX_TEXT = 64 << 10  # characters of one line that a pattern sees
TIMEOUT_S = 0.5  # for one pattern on one line, without RE2
_MIN_LITERAL = 4
_MAX_LITERALS = 16
_MAX_CLAUSES = 4
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


LINEAR = _re2() is not None  # a search takes time in proportion to the text


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


@lru_cache(maxsize=4096)
def _group_indices(compiled: Any) -> tuple[tuple[str, int], ...]:
    return tuple(compiled.groupindex.items())


def group_texts(pattern: str, text: str, limit: int) -> list[dict[str, str]]:
    """The named groups of each match in the first MAX_TEXT characters, at most `limit` matches.

    A group that took no part is left out. RE2 searches bytes here: its wrapper spends more on translating offsets of
    a str than on the search.
    """
    text = text[:MAX_TEXT]
    if not LINEAR:
        matches = islice(compile_pattern(pattern).finditer(text), limit)
        groups = [match.groupdict() for match in matches]
        return [{k: v for k, v in found.items() if v is not None} for found in groups]
    compiled: Any = compile_pattern(pattern)
    data = text.encode("utf-8", "replace")
    names = _group_indices(compiled)
    found: list[dict[str, str]] = []
    at = 0
    while len(found) < limit and (match := compiled.search(data, at)):
        texts = ((name, match.group(index)) for name, index in names)
        found.append({n: part.decode("utf-8", "replace") for n, part in texts if part is not None})
        start, end = match.span()
        at = end if end > start else end + 1
        if at >= len(data):
            break
    return found


def position(pattern: str, data: bytes) -> int | None:
    """Where the pattern first occurs in UTF-8 bytes; None: nowhere. Only with RE2 (LINEAR)."""
    compiled: Any = compile_pattern(pattern)
    match = compiled.search(data)
    return None if match is None else match.start()


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


# --- texts that a match must hold ------------------------------------------------------------------------------


def required_literals(pattern: str) -> tuple[str, ...]:
    r"""Texts of which every match holds at least one; () when none is sure. Cheap to look for in a whole log.

    >>> required_literals(r"GPU KV cache size:\s+(?P<kv_tokens>[\d,]+)\s+tokens")
    ('GPU KV cache size:',)
    >>> required_literals(r"(?:killed|evicted) by"), required_literals(r"[ab] (?:some|more) x")
    (('killed', 'evicted'), ('some', 'more'))
    >>> required_literals(r"one|two"), required_literals(r"capacit?y of"), required_literals(r"(?i)words")
    ((), ('capaci',), ())
    """
    if re.search(r"\(\?[a-zA-Z]*i", pattern):
        return ()
    clauses = _Literals(pattern).clauses()
    return clauses[0] if clauses else ()


def required_clauses(pattern: str) -> tuple[tuple[str, ...], ...]:
    r"""Several such sets, the surest first: a match holds a text of each.

    >>> required_clauses(r"took (?P<a_s>[\d.]+) seconds, (?:GPU|HBM chip) \d+ is full")
    ((' seconds, ',), (' is full',), ('took ',))
    """
    if re.search(r"\(\?[a-zA-Z]*i", pattern):
        return ()
    return tuple(_Literals(pattern).clauses()[:_MAX_CLAUSES])


def _shortest(texts: tuple[str, ...]) -> int:
    return min(len(text) for text in texts)


class _Literals:
    """A reader of patterns that only asks which plain texts can't be missing."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def clauses(self) -> list[tuple[str, ...]]:
        """The sets of texts of the whole pattern, the surest first: those whose shortest is longest."""
        branches = self._branches()
        if len(branches) == 1:
            return branches[0]
        texts = self._either(branches)
        return [texts] if texts else []

    def _branches(self) -> list[list[tuple[str, ...]]]:
        """The sets of each branch up to the closing bracket or the end."""
        branches = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence())
        return branches

    @staticmethod
    def _either(branches: list[list[tuple[str, ...]]]) -> tuple[str, ...]:
        """One set for all branches; () when one of them has none."""
        if not all(branches):
            return ()
        texts = tuple(dict.fromkeys(text for branch in branches for text in branch[0]))
        return texts if len(texts) <= _MAX_LITERALS else ()

    def _sequence(self) -> list[tuple[str, ...]]:
        known: list[tuple[str, ...]] = []
        run: list[str] = []
        while self._peek() not in ("", "|", ")"):
            plain, texts = self._item()
            needed, repeated = self._quantifier()
            if plain is not None and needed:
                run.append(plain)
            if plain is None or not needed or repeated:
                known.append(("".join(run),))
                run = []
            if texts and needed:
                known.append(texts)
        known.append(("".join(run),))
        sure = [texts for texts in dict.fromkeys(known) if _shortest(texts) >= _MIN_LITERAL]
        return sorted(sure, key=_shortest, reverse=True)

    def _item(self) -> tuple[str | None, tuple[str, ...]]:
        """The next item: a plain character, or the texts of a group, or neither."""
        char = self._peek()
        self._at += 1
        if char == "(":
            return None, self._group()
        if char == "[":
            self._skip_class()
            return None, ()
        if char == "\\":
            return self._escape(), ()
        return (None if char in ".^$" else char), ()

    def _group(self) -> tuple[str, ...]:
        head = re.compile(r"\?(?:P<\w+>|<\w+>|[a-zA-Z-]*:)?").match(self._pattern, self._at)
        bare_flags = re.compile(r"\?[a-zA-Z-]+\)").match(self._pattern, self._at)
        if bare_flags:
            self._at = bare_flags.end()
            return ()
        self._at = head.end() if head else self._at
        texts = self._either(self._branches())
        self._at += 1  # the closing bracket
        return texts

    def _escape(self) -> str | None:
        """The character an escape stands for; None for classes, anchors and codes, which are skipped whole."""
        code = re.compile(r"x\{[^}]*\}|x[0-9A-Fa-f]{0,2}|[0-7]{1,3}|[pP](?:\{[^}]*\}|\w)").match(
            self._pattern, self._at
        )
        char = self._peek()
        self._at = code.end() if code else self._at + 1
        if char in _CONTROL:
            return _CONTROL[char]
        return None if char.isalnum() else char

    def _skip_class(self) -> None:
        """To behind the bracket that closes a character class."""
        if self._peek() == "^":
            self._at += 1
        if self._peek() == "]":
            self._at += 1
        while self._peek() not in ("", "]"):
            named = re.compile(r"\[:\^?\w+:\]|\\.").match(self._pattern, self._at)
            self._at = named.end() if named else self._at + 1
        self._at += 1

    def _quantifier(self) -> tuple[bool, bool]:
        """Whether the item before must occur, and whether it may occur more than once."""
        match = re.compile(r"(?:[?*+]|\{(?P<least>\d*)(?:,\d*)?\})[?+]?").match(
            self._pattern, self._at
        )
        if match is None:
            return True, False
        self._at = match.end()
        sign = match[0][0]
        least = match["least"]
        return sign == "+" or bool(least and int(least) > 0), True

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]
