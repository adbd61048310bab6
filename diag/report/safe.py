"""One sanitizer for text that may come from a log: anything goes in, safe text comes out.

Removed: terminal escapes, C0 and C1 controls, bidirectional controls, zero-width and other invisible
characters. Line breaks and odd blanks become plain blanks, what can't be encoded becomes U+FFFD, and
the length is bounded. Work is bounded too: only the first part of a very long text is looked at.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

MAX_TEXT = 600
"""Characters of a quoted line or a sentence."""
MAX_COMMAND = 8_000
"""Characters of a command or a file that a person copies."""

_LOOK_AHEAD = 8  # escapes may take room: read this many times the limit
_MAX_MARKS = 3  # combining marks on one letter; more only smear the screen
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]{0,2000}(?:\x07|\x1b\\|\x9c)"  # OSC: titles, links
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]{0,2000}(?:\x1b\\|\x9c)"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"  # the rest, and what is cut short
)
_INVISIBLE = "\u115f\u1160\u3164\uffa0\u034f"  # Hangul fillers, grapheme joiner: no shape
_ASCII = str.maketrans(
    {
        "\u2026": "...",
        "\u2013": "-",
        "\u2014": "-",
        "\u2212": "-",
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u00b1": "+-",
        "\u00d7": "x",
        "\u00b7": ";",
        "\u2022": "*",
        "\u2264": "<=",
        "\u2265": ">=",
        "\u2192": "->",
        "\ufffd": "?",
    }
)


def clean(text: str, limit: int = MAX_TEXT) -> str:
    r"""`text` on one line, at most `limit` characters; a cut shows as an ellipsis. Indentation stays.

    >>> clean("\x1b[31mFree memory\x1b[0m\u202e on device\n")
    'Free memory on device'
    """
    text = text[: limit * _LOOK_AHEAD]
    if not (text.isascii() and text.isprintable()):
        text = "".join(_shown(_ESCAPES.sub("", text)))
    text = text.rstrip()
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "\u2026"


def clean_block(text: str, limit: int = MAX_COMMAND) -> str:
    """`text` with its line breaks, each line cleaned, at most `limit` characters; a tab is four blanks."""
    text = text[: limit * _LOOK_AHEAD].replace("\r\n", "\n").replace("\t", "    ")
    joined = "\n".join(clean(line, limit) for line in text.split("\n"))
    return joined if len(joined) <= limit else joined[: limit - 1].rstrip() + "\u2026"


def to_ascii(text: str) -> str:
    r"""`text` in ASCII: typographic marks spelled out, other characters as their escape.

    >>> to_ascii("\u00b125 %, caf\u00e9")
    '+-25 %, caf\\xe9'
    """
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")


def _shown(text: str) -> Iterator[str]:
    marks = 0
    for char in text:
        kept, is_mark = _shown_char(char)
        marks = marks + 1 if is_mark else 0
        if marks <= _MAX_MARKS:
            yield kept


@lru_cache(maxsize=4096)
def _shown_char(char: str) -> tuple[str, bool]:
    """What to show for a character, and whether it sits on the one before."""
    category = unicodedata.category(char)
    if category == "Cc":
        return (" " if char in "\t\n\v\f\r\x85" else ""), False
    if category == "Cf" or char in _INVISIBLE or "\ufe00" <= char <= "\ufe0f":
        return "", False
    if category in ("Zs", "Zl", "Zp"):
        return " ", False
    if category in ("Cs", "Co", "Cn"):
        return "\ufffd", False
    return char, category in ("Mn", "Me")
