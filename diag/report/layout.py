"""Lines of text for a terminal: wrapping, columns and headings by cell width, then one string.

A page knows nothing of diagnoses. Text goes in clean; wide characters count as two cells.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from diag.report.safe import to_ascii

PROSE = 100  # longer lines are hard to read; tables may be wider
TABLE = 140
MIN_WIDTH = 40
MIN_DETAIL = 30  # narrower detail columns are put below instead

BOLD, DIM, GOOD, BAD = "bold", "dim", "green", "bold red"

# A number stays with its word: a private character holds the place of the blank while lines break.
_GLUE = "\ue000"
_UNIT = re.compile(r"(?<=\d) (?=(?:GiB|MiB|KiB|GB|MB|tokens|requests?)\b|%)|(?<=line|rank) (?=\d)")

Cell = tuple[str, str]
"""A text and its style."""


class Page:
    """Collects finished lines."""

    def __init__(self, width: int, *, unicode: bool) -> None:
        self.width = max(width, MIN_WIDTH)
        self.prose_width = min(self.width, PROSE)
        self.table_width = min(self.width, TABLE)
        self.unicode = unicode
        self.lines: list[Text] = []
        self._wrapper = Console(file=StringIO(), width=self.width, legacy_windows=False)

    def say(self, text: str) -> str:
        """The text in the characters this output can show."""
        return text if self.unicode else to_ascii(text)

    def line(self, *parts: Cell) -> None:
        """One line as it is, never broken."""
        text = Text()
        for part, style in parts:
            text.append(self.say(part), style if part.strip() else "")
        text.rstrip()
        self.lines.append(text)

    def blank(self) -> None:
        """An empty line, unless there is one."""
        if self.lines and self.lines[-1].plain:
            self.lines.append(Text())

    def heading(self, text: str) -> None:
        """A bold line after an empty one."""
        self.blank()
        self.prose(text, style=BOLD)

    def wrap(self, text: str, width: int) -> list[str]:
        """Broken at blanks to `width` cells; a word that is longer is cut into pieces."""
        glued = _UNIT.sub(_GLUE, self.say(text))
        found = Text(glued).wrap(self._wrapper, max(width, 8), overflow="fold")
        return [line.plain.replace(_GLUE, " ").strip() for line in found] or [""]

    def cut(self, text: str, width: int) -> str:
        """The text in exactly `width` cells: filled up, or cut with a mark."""
        if cell_len(text) <= width:
            return set_cell_size(text, width)
        mark = self.say("\u2026")
        return set_cell_size(text, max(width - len(mark), 0)) + mark

    def prose(self, text: str, *, style: str = "", indent: int = 0, hanging: int = 0) -> None:
        """A paragraph; `hanging` indents all its lines but the first."""
        room = self.prose_width - indent - hanging
        for index, piece in enumerate(self.wrap(text, room)):
            self.line((" " * (indent + (hanging if index else 0)) + piece, style))

    def row(self, cells: Sequence[Cell], widths: Sequence[int], *, indent: int = 0) -> None:
        """Cells side by side, each wrapped to its width, two blanks between."""
        columns = [self.wrap(text, width) for (text, _), width in zip(cells, widths, strict=True)]
        styles = [style for _, style in cells]
        for pieces in zip_longest(*columns, fillvalue=""):
            line: list[Cell] = [(" " * indent, "")]
            for piece, style, width in zip(pieces, styles, widths, strict=True):
                line += [(piece, style), (" " * (width - cell_len(piece) + 2), "")]
            self.line(*line)

    def pairs(self, rows: Sequence[tuple[str, str]]) -> None:
        """Two columns; the right one goes below when the left one would starve it."""
        room = self.table_width - 2
        longest = max((cell_len(self.say(first)) for first, _ in rows), default=0)
        first_width = min(longest, room * 2 // 5)
        if room - first_width - 2 >= MIN_DETAIL and longest <= room // 2:
            first_width = longest
        if room - first_width - 2 < MIN_DETAIL:
            for first, second in rows:
                self.row([(first, "")], [room], indent=2)
                self.row([(second, "")], [room - 4], indent=6)
            return
        for first, second in rows:
            cells = [(first, ""), (second, "")]
            self.row(cells, [first_width, room - first_width - 2], indent=2)

    def text(self, *, color: bool) -> str:
        """All lines as one string that ends in a newline."""
        out = StringIO()
        console = Console(
            file=out,
            width=self.width,
            force_terminal=color,
            color_system="standard" if color else None,
            no_color=not color,
            legacy_windows=False,
            emoji=False,
            markup=False,
            highlight=False,
        )
        for line in self.lines:
            console.print(line, soft_wrap=True)
        return out.getvalue()
