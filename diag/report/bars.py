"""The memory of one rank as bars: one line a term with label, GiB, bar, what is special, source.

All ranks of an answer share one scale and one column for labels, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from diag.report import words
from diag.report.layout import BAD, DIM, Cell, Page
from diag.report.model import LedgerEntry
from diag.report.safe import clean
from diag.units import format_gib

_MIN_BAR = 16
_LABEL_SHARE = 0.36  # of the width; longer labels are cut
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL, _SHORT = "\u2588", "\u2591"


class Bars:
    """Draws rows on a page; `drawn` are the terms of all ranks that share the scale."""

    def __init__(self, page: Page, drawn: Sequence[LedgerEntry]) -> None:
        self.page = page
        longest = max(cell_len(self._label(row)) for row in drawn)
        self.label_width = min(longest, int(page.width * _LABEL_SHARE))
        self.number_width = max(len(_amount(row)) for row in drawn)
        self.top = max(1, *map(_extent, drawn))
        self.sources = True
        self.scale = self._fit(drawn)
        if self.scale < _MIN_BAR:
            self.sources = False
            self.scale = self._fit(drawn)
        # Notes of short bars stand below each other; a long bar has its note behind it.
        lengths = [len(self._bar(row)) for row in drawn]
        self.column = max((size for size in lengths if size <= self.scale // 3), default=0)

    def draw(self, rows: Sequence[LedgerEntry]) -> None:
        """One line for each term."""
        for row in rows:
            style = BAD if row.failed else ""
            name = self.page.cut(self._label(row), self.label_width)
            number = f"{_amount(row):>{self.number_width}}"
            state = words.entry_state(row)
            if self.scale < _MIN_BAR // 2:
                self._draw_without_bar(name, number, state, style)
                continue
            bar = self._bar(row)
            gap = " " * max(2, self.column - len(bar) + 2)
            parts: list[Cell] = [(f"  {name}  {number}  {bar}{gap}", style), (state, style)]
            if self.sources:
                parts += [("  " if state else "", ""), (words.entry_source(row), DIM)]
            self.page.line(*parts)

    def _draw_without_bar(self, name: str, number: str, state: str, style: str) -> None:
        """On a narrow screen: label, number and what is special, the last one wrapped."""
        rest = self.page.width - self.label_width - self.number_width - 6
        pieces = self.page.wrap(state, rest)
        for index, piece in enumerate(pieces):
            left = f"  {name}  {number}  "
            self.page.line((left if index == 0 else " " * cell_len(left), style), (piece, style))

    def _label(self, row: LedgerEntry) -> str:
        return self.page.say(clean(row.label, 60))

    def _fit(self, drawn: Sequence[LedgerEntry]) -> int:
        """Cells of the longest bar, so that every bar and the notes behind it fit the width."""
        room = self.page.width - self.label_width - self.number_width - 6
        found = room
        for row in drawn:
            notes = [self.page.say(words.entry_state(row))]
            notes += [words.entry_source(row)] if self.sources else []
            taken = sum(cell_len(note) + 2 for note in notes if note)
            share = max(_extent(row) / self.top, 1 / 3)
            found = min(found, int((room - taken) / share))
        return max(found, 0)

    def _bar(self, row: LedgerEntry) -> str:
        """What the term holds as full blocks; what was wanted beyond it as light ones."""
        held = max(row.bytes or 0, 0)
        eighths = max(round(held * self.scale * 8 / self.top), 1 if held else 0)
        wanted = round(max(row.wanted or 0, 0) * self.scale / self.top)
        if not self.page.unicode:
            return "#" * max(eighths // 8, 1 if held else 0)
        blocks = _FULL * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
        return blocks + _SHORT * max(0, wanted - len(blocks))


def _extent(row: LedgerEntry) -> int:
    """Bytes that a term's bar stands for: what it holds or what was wanted of it."""
    return max(row.bytes or 0, row.wanted or 0, 0)


def _amount(row: LedgerEntry) -> str:
    return "?" if row.bytes is None else format_gib(row.bytes)
