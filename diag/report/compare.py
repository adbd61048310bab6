"""A Comparison as text for a terminal, as Markdown and as JSON, in the look of the other answers.

Order: the two starts, what explains the failure, the memory term by term, settings, environment, what is known to have
changed between the releases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

from rich.cells import cell_len

from diag import __version__
from diag.report import compare_words as words
from diag.report.comparison import SCHEMA_VERSION, Comparison, SettingChange, TermChange
from diag.report.layout import BAD, BOLD, DIM, Cell, Page
from diag.report.markdown import code, prose
from diag.report.safe import MAX_COMMAND, clean, clean_block
from diag.report.words import line_numbers
from diag.terms import Origin

PLAIN_WIDTH = 80
_MARK = "<"  # behind a term or setting that explains the failure; colour only repeats it
_EXPLAINS = "explains it"
_BEHIND = "behind it"
_NUMBER = 8
_SOURCES = 100  # columns from which the lines of the logs are named


def render_text(found: Comparison, *, width: int, color: bool, unicode: bool = True) -> str:
    """The comparison as text, each line at most `width` cells."""
    page = _Page(width, unicode=unicode)
    page.head(found)
    page.terms(found)
    page.settings("Settings that differ", found.settings)
    page.settings("Environment that differs", found.environment)
    page.releases(found)
    page.notes(found)
    return page.text(color=color)


def render_plain(found: Comparison) -> str:
    """The comparison in ASCII at a fixed width: the same on every machine."""
    return render_text(found, width=PLAIN_WIDTH, color=False, unicode=False)


class _Page(Page):
    """A page with the sections of a comparison."""

    def head(self, found: Comparison) -> None:
        for name, side in (("Good", found.good), ("Bad", found.bad)):
            self.row(
                [(name, BOLD), (f"{clean(side.name, 120)}: {words.state(side)}", "")],
                [4, self.prose_width - 6],
            )
            self.row([("", ""), (words.side(side), DIM)], [4, self.prose_width - 6])
        self.blank()
        self.prose(clean(found.verdict, 1200))

    def terms(self, found: Comparison) -> None:
        rows = [row for row in found.terms if row.bad is not None]
        if not rows:
            return
        self.heading("Memory, term by term (GiB)")
        label = max(cell_len(row.label) for row in rows)
        mark = f"  {_MARK} {_EXPLAINS}"
        column = 2 + label + 3 * (_NUMBER + 2) + len(mark)
        narrow = column > self.width  # the numbers then stand below their term
        heads = _numbers("good", "bad", "change")
        self.line((f"  {'' if narrow else ' ' * label}{heads}", DIM))
        for row in rows:
            style = BAD if row.explains else ""
            sizes = [words.amount(side.bytes if side else None) for side in (row.good, row.bad)]
            numbers = _numbers(*sizes, words.change(row))
            after = mark if row.explains else ""
            if narrow:
                self.line((f"  {row.label}{after}", style))
                self.line((f"  {numbers}", style))
                continue
            parts: list[Cell] = [(f"  {row.label:<{label}}{numbers}{after}", style)]
            if self.width >= _SOURCES and (source := _sources(row)):
                parts += [(" " * (column + 2 - cell_len(parts[0][0])), ""), (source, DIM)]
            self.line(*parts)

    def settings(self, heading: str, rows: Sequence[SettingChange]) -> None:
        if not rows:
            return
        self.heading(heading)
        shown = [_setting_cells(row) for row in rows]
        room = self.table_width - 6
        name = min(max(cell_len(cells[0]) for cells in shown), room * 2 // 5)
        left = min(max(cell_len(cells[1]) for cells in shown), (room - name) // 2)
        for row, cells in zip(rows, shown, strict=True):
            style = BAD if row.explains else ""
            mark = f"  {_MARK} {_BEHIND}" if row.explains else ""
            texts = [(cells[0], style), (cells[1], ""), (cells[2] + mark, style)]
            self.row(texts, [name, left, room - name - left], indent=2)

    def releases(self, found: Comparison) -> None:
        if not found.releases:
            return
        older = any(row.gone for row in found.releases)
        self.heading(
            "Between the releases (missing in the second, older one)"
            if older
            else "Between the releases (new in the second one)"
        )
        pools = [words.release(row)[1] for row in found.releases]
        since = max(len(row.since) for row in found.releases)
        pool = max(map(len, pools))
        room = self.prose_width - 2 - since - pool - 4
        for row, effect in zip(found.releases, pools, strict=True):
            style = BAD if row.explains else ""
            cells = [(row.since, style), (effect, style), (clean(row.says), "")]
            self.row(cells, [since, pool, room], indent=2)

    def notes(self, found: Comparison) -> None:
        if found.notes:
            self.blank()
        for text in found.notes:
            self.prose(f"Note: {clean(text)}", style=DIM, hanging=6)


def _numbers(*texts: str) -> str:
    return "".join(f"  {text:>{_NUMBER}}" for text in texts)


def _sources(row: TermChange) -> str:
    """Log lines of both sides."""
    texts = []
    for name, side in (("good", row.good), ("bad", row.bad)):
        if side is None:
            continue
        if side.lines:
            texts.append(f"{name} {line_numbers(side.lines)}")
        else:
            texts.append(f"{name} {'assumed' if side.origin is Origin.ASSUMED else 'computed'}")
    return "; ".join(texts)


def _setting_cells(row: SettingChange) -> tuple[str, str, str]:
    return (
        clean(row.name, 80),
        words.value(row.good, row.unit, default=row.good_default),
        words.value(row.bad, row.unit, default=row.bad_default),
    )


# --- Markdown ---------------------------------------------------------------------------------------------------


def render_markdown(found: Comparison) -> str:
    """The comparison as Markdown; ends in a newline."""
    parts = [
        _md_table(
            ("", "Log", "State", "Where"),
            [
                (name, code(side.name), prose(words.state(side)), prose(words.side(side)))
                for name, side in (("good", found.good), ("bad", found.bad))
            ],
        ),
        prose(found.verdict, 1200),
    ]
    if found.terms:
        rows = [
            (
                f"**{row.label}**" if row.explains else row.label,
                words.amount(row.good.bytes if row.good else None),
                words.amount(row.bad.bytes),
                words.change(row),
                _EXPLAINS if row.explains else "",
            )
            for row in found.terms
            if row.bad is not None
        ]
        head = ("Term (GiB)", "Good", "Bad", "Change", "")
        parts += ["**Memory, term by term**", _md_table(head, rows, numbers=(1, 2, 3))]
    for title, settings in (
        ("Settings that differ", found.settings),
        ("Environment that differs", found.environment),
    ):
        if settings:
            cells = [
                [*map(code, _setting_cells(row)), _BEHIND if row.explains else ""]
                for row in settings
            ]
            parts += [f"**{title}**", _md_table(("", "Good", "Bad", ""), cells)]
    if found.releases:
        lines = []
        for row in found.releases:
            where, pool = words.release(row)
            lines.append(f"- {where}{f' ({pool})' if pool else ''}: {prose(row.says)}")
        parts += ["**Between the releases**", "\n".join(lines)]
    parts += [f"Note: {prose(note)}" for note in found.notes]
    return "\n\n".join(parts) + "\n"


def _md_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    rule = ["---:" if index in numbers else "---" for index in range(len(head))]
    escaped = [[cell.replace("\\|", "\\ |").replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *escaped])


# --- JSON -------------------------------------------------------------------------------------------------------


def to_dict(found: Comparison) -> dict[str, Any]:
    """The JSON of `oomdoc compare --json`: raw bytes, stable key order."""
    header = {"schema_version": SCHEMA_VERSION, "oomdoc_version": __version__}
    return {**header, **_plain(asdict(found))}


def _plain(value: Any) -> Any:
    """Enums as their values, strings cleaned, numbers that JSON does not know as null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return clean_block(value, MAX_COMMAND)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
