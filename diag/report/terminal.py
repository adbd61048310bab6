"""A Diagnosis as text for a terminal, `width` columns wide; also plain ASCII for scripts.

Order: what failed, where, the sum, the fixes, the changed command, what not to do, the memory, who
met it before, how to check. Colour is an addition: red is the term that failed, green a fix that
fits, dim a source.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from diag.report import words
from diag.report.bars import Bars
from diag.report.layout import BOLD, DIM, GOOD, MIN_DETAIL, Cell, Page
from diag.report.model import Diagnosis, Evidence, Fix
from diag.report.safe import MAX_COMMAND, clean, clean_block
from diag.terms import Outcome

PLAIN_WIDTH = 80
_RUN_IN = 11  # width of a heading that shares its line: "Seen before"


def render(
    diagnosis: Diagnosis,
    *,
    width: int,
    color: bool,
    unicode: bool = True,
    show_all: bool = False,
    show_evidence: bool = False,
    show_facts: bool = False,
) -> str:
    """The answer as text, each line at most `width` cells except commands, which are never broken.

    Args: width in terminal cells (40 at least is used); color adds ANSI codes; without unicode the
        text is ASCII.
    """
    page = _Answer(width, unicode=unicode, show_all=show_all)
    page.head(diagnosis)
    page.known_bugs(diagnosis)
    page.fixes(diagnosis)
    page.command(diagnosis)
    page.next_steps(diagnosis)
    page.dont(diagnosis)
    page.flag_notes(diagnosis)
    page.memory(diagnosis)
    page.direction(diagnosis)
    page.readings(diagnosis)
    page.closing(diagnosis)
    if show_evidence:
        page.evidence(diagnosis)
    if show_facts:
        page.facts(diagnosis)
    page.notes(diagnosis)
    page.footer(diagnosis, evidence=show_evidence, facts=show_facts)
    return page.text(color=color)


def render_plain(
    diagnosis: Diagnosis,
    *,
    show_all: bool = False,
    show_evidence: bool = False,
    show_facts: bool = False,
) -> str:
    """The answer in ASCII, without colour, at a fixed width: the same on every machine."""
    return render(
        diagnosis,
        width=PLAIN_WIDTH,
        color=False,
        unicode=False,
        show_all=show_all,
        show_evidence=show_evidence,
        show_facts=show_facts,
    )


class _Answer(Page):
    """A page with the sections of an answer: every method adds one section, or nothing."""

    def __init__(self, width: int, *, unicode: bool, show_all: bool) -> None:
        super().__init__(width, unicode=unicode)
        self.show_all = show_all

    def head(self, diagnosis: Diagnosis) -> None:
        finding = diagnosis.diagnosis
        if finding is None:
            self.headline(diagnosis)
        else:
            self.title(words.title(finding), clean(finding.subtype, 60))
        where = words.environment(diagnosis)
        if where:
            self.prose(where)
        again = words.attempts(diagnosis.source, failed=finding is not None)
        if again:
            self.prose(again)
        if finding is None:
            return
        self.blank()
        self.prose(clean(finding.summary or diagnosis.headline, words.SUMMARY))
        unsure = words.certainty(finding)
        lacking = words.missing(diagnosis)
        if unsure or lacking:
            needed = f"To be surer: {'; '.join(lacking)}." if lacking else ""
            self.prose(" ".join(filter(None, [unsure, needed])))

    def known_bugs(self, diagnosis: Diagnosis) -> None:
        """Bugs of the release in the log, and what to do about each."""
        if not diagnosis.known_bugs:
            return
        self.heading(
            "Your release has this bug"
            if len(diagnosis.known_bugs) == 1
            else "Your release has these bugs"
        )
        for bug in diagnosis.known_bugs:
            self.prose(words.bug(bug), indent=2)
            if bug.cure:
                self.prose(f"Do: {clean(bug.cure)}", indent=2, hanging=4)
            self.line((f"  {clean(bug.url)}", DIM))

    def headline(self, diagnosis: Diagnosis) -> None:
        """The verdict when there is no finding: its first words bold."""
        lead, rest = words.headline(diagnosis)
        for index, piece in enumerate(self.wrap(f"{lead} {rest}", self.prose_width)):
            bold = len(self.say(lead)) if index == 0 else 0
            self.line((piece[:bold], BOLD), (piece[bold:], ""))

    def title(self, text: str, ident: str) -> None:
        """The title with the class id at the right edge of its first line."""
        room = self.prose_width - cell_len(self.say(ident)) - 2
        if room < self.prose_width // 3:
            self.prose(f"{text} ({ident})", style=BOLD)
            return
        for index, piece in enumerate(self.wrap(text, room)):
            gap = " " * (room - cell_len(piece) + 2)
            self.line((piece, BOLD), *([(gap, ""), (ident, DIM)] if index == 0 else []))

    def fixes(self, diagnosis: Diagnosis) -> None:
        usable = words.candidates(diagnosis)
        shown = usable if self.show_all else usable[: words.SHOWN_FIXES]
        if shown:
            self.heading(words.fixes_heading(len(usable)))
            self.fix_table(shown)
        short = words.insufficient(diagnosis)
        if short and (self.show_all or not usable):
            self.heading("Checked, and not enough")
            self.fix_table(short)

    def fix_table(self, fixes: Sequence[Fix]) -> None:
        details = [self.fix_details(item) for item in fixes]
        label = max(cell_len(name) for rows in details for name, _, _ in rows)
        number = len(str(len(fixes)))
        room = self.table_width - number - 4  # indent of two, number, two blanks
        names = [self.say(words.fix(item)) for item in fixes]
        fitting = [cell_len(name) for name in names if cell_len(name) <= room * 9 // 20]
        what = max(fitting, default=0)
        beside = what > 0 and room - what - label - 4 >= MIN_DETAIL
        before = number + 4 + (what + 2 if beside else 0)
        rest = self.table_width - before - label - 2
        for index, (name, rows) in enumerate(zip(names, details, strict=True), start=1):
            lead = f"  {index:>{number}}  "
            same_row = beside and cell_len(name) <= what
            if not same_row:
                for line, piece in enumerate(self.wrap(name, room)):
                    self.line((" " * len(lead) if line else lead, ""), (piece, BOLD))
            for line, (word, text, style) in enumerate(rows):
                first = line == 0 and same_row
                start = lead + name + " " * (before - len(lead) - cell_len(name)) if first else ""
                self.detail(start, len(lead), (word.ljust(label), style), text, before, rest)

    def detail(self, start: str, lead: int, word: Cell, text: str, before: int, rest: int) -> None:
        """One labelled line of a fix; `start` holds number and name when they share the line."""
        for index, piece in enumerate(self.wrap(text, rest)):
            if index:
                self.line((" " * (before + len(word[0]) + 2) + piece, ""))
            else:
                left = start or " " * before
                self.line((left[:lead], ""), (left[lead:], BOLD), word, (f"  {piece}", ""))

    def fix_details(self, item: Fix) -> list[tuple[str, str, str]]:
        """Labels, texts and label styles below a fix."""
        rows = [(words.fits(item), clean(item.proof), GOOD if item.fits else "")]
        if price := words.cost(item):
            rows.append(("costs", price, ""))
        if self.show_all:
            rows.append(("safety", words.safety(item), ""))
            extra = [("not if", clean(item.when_not)), ("check", clean(item.verify))]
            if item.lines_used:
                extra.append(("from", words.line_numbers(item.lines_used)))
            rows += [(word, text, "") for word, text in extra if text]
        return rows

    def command(self, diagnosis: Diagnosis) -> None:
        """The user's own command, changed: on lines of its own that can be copied whole."""
        usable = words.candidates(diagnosis)
        with_command = [(number, item) for number, item in enumerate(usable, 1) if item.command]
        for number, item in with_command if self.show_all else with_command[:1]:
            one = len(usable) == 1
            self.heading("Your command, changed" if one else f"Your command with fix {number}")
            for text in clean_block(item.command or "", MAX_COMMAND).splitlines():
                self.line((f"  {text}", ""))

    def next_steps(self, diagnosis: Diagnosis) -> None:
        if not diagnosis.next_steps:
            return
        self.heading("To know more, get")
        for step in diagnosis.next_steps:
            self.line((f"  {clean(step)}", ""))

    def dont(self, diagnosis: Diagnosis) -> None:
        if diagnosis.not_helpful:
            self.heading("Don't")
            self.pairs(
                [(clean(item.change, 120), clean(item.why)) for item in diagnosis.not_helpful]
            )

    def flag_notes(self, diagnosis: Diagnosis) -> None:
        if diagnosis.flag_notes:
            self.heading("In your command")
            self.pairs([(clean(n.flag, 120), clean(n.why)) for n in diagnosis.flag_notes])

    def direction(self, diagnosis: Diagnosis) -> None:
        advice = words.advises_gmu(diagnosis)
        if advice is None:
            return
        self.heading(f"gpu_memory_utilization: {words.gmu(advice)}")
        for sentence in filter(None, (advice.why, *advice.popular)):
            self.prose(clean(sentence), indent=2)

    def memory(self, diagnosis: Diagnosis) -> None:
        groups = words.rank_groups(diagnosis)
        shown = groups if self.show_all else groups[:2]
        tables = [(group, words.ledger_rows(group.ledger)) for group in shown]
        drawn = [row for _, rows in tables for row in rows]
        bars = Bars(self, drawn) if drawn else None
        for group, rows in tables:
            if bars and rows:
                self.heading(words.ledger_heading(group, diagnosis.environment))
                bars.draw(rows)
        hidden = [rank for group in groups[len(shown) :] for rank in group.ranks]
        if hidden:
            self.prose(f"{words.ranks(hidden) or 'other ranks'}: --all shows them", indent=2)
        if self.show_all and diagnosis.ledger.formula:
            era = f" (era {clean(diagnosis.ledger.era, 20)})" if diagnosis.ledger.era else ""
            self.prose(f"formula: {clean(diagnosis.ledger.formula)}{era}", indent=2, style=DIM)

    def readings(self, diagnosis: Diagnosis) -> None:
        """Other readings, when the first one is not certain or all are wanted."""
        finding = diagnosis.diagnosis
        sure = finding is not None and finding.certainty == "certain"
        wanted = diagnosis.outcome is not Outcome.HEALTHY and not sure
        if not diagnosis.alternatives or not (wanted or self.show_all):
            return
        self.heading("Could also be")
        for item in diagnosis.alternatives[: None if self.show_all else 2]:
            text = words.alternative(item.family.label, item.subtype, item.confidence, item.why)
            self.prose(text, indent=2, hanging=2)

    def closing(self, diagnosis: Diagnosis) -> None:
        """Who met it before, how to check: one block, its headings at the left."""
        every = self.show_all
        related = diagnosis.related if every else diagnosis.related[: words.SHOWN_RELATED]
        verify = next((item.verify for item in words.candidates(diagnosis) if item.verify), "")
        rows = [("Seen before", item.id, words.related(item), item.url) for item in related]
        if not rows and not verify:
            return
        self.blank()
        width = max((cell_len(self.say(clean(row[1], 40))) for row in rows), default=0)
        room = self.prose_width - _RUN_IN - 2
        said = ""
        for name, ident, text, url in rows:
            cells = [("" if name == said else name, BOLD), (clean(ident, 40), ""), (text, "")]
            self.row(cells, [_RUN_IN, width, room - width - 2])
            if every:
                self.line((" " * (_RUN_IN + 2) + clean(url), DIM))
            said = name
        if verify:
            self.row([("Check it", BOLD), (clean(verify), "")], [_RUN_IN, room])

    def evidence(self, diagnosis: Diagnosis) -> None:
        """Quoted log lines, cut to the width."""
        quoted = diagnosis.diagnosis.evidence if diagnosis.diagnosis else ()
        self.heading("Log lines" if quoted else "Log lines: none to quote")
        number = max((len(str(item.line)) for item in quoted), default=0)
        role = max((len(item.role.value) for item in quoted), default=0)
        for item in quoted:
            self.quote(item, number, role)

    def quote(self, item: Evidence, number: int, role: int) -> None:
        lead = f"  {item.line:>{number}}  {item.role.value:<{role}}  "
        room = self.width - len(lead)
        text = self.say(clean(item.text, max(room, 1) + 1).strip())
        self.line((lead, DIM), (self.cut(text, room), ""))

    def facts(self, diagnosis: Diagnosis) -> None:
        """All facts: name, value, rank, source."""
        rows = [
            (
                clean(fact.name, 60),
                self.say(words.fact_value(fact)),
                "" if fact.rank is None else f"rank {fact.rank}",
                words.fact_source(fact),
            )
            for fact in diagnosis.facts
        ]
        self.heading("Facts" if rows else "Facts: none in the log")
        if not rows:
            return
        name, rank, source = (max(cell_len(row[index]) for row in rows) for index in (0, 2, 3))
        name = min(name, self.table_width * 2 // 5)
        room = self.table_width - 2 - name - rank - source - 6
        if room < 12:
            self.pairs([(row[0], ", ".join(filter(None, row[1:]))) for row in rows])
            return
        value = min(room, max(cell_len(row[1]) for row in rows))
        for row in rows:
            cells = list(zip(row, ("", "", "", DIM), strict=True))
            self.row(cells, [name, value, rank, source], indent=2)

    def notes(self, diagnosis: Diagnosis) -> None:
        """What was repaired or left out while reading."""
        texts = [clean(note) for note in diagnosis.source.notes]
        if diagnosis.source.truncated and not texts:
            texts = ["Parts of the log were cut or left out."]
        shown = texts if self.show_all else texts[:2]
        if shown:
            self.blank()
        for text in shown:
            self.prose(f"Note: {text}", style=DIM, hanging=6)

    def footer(self, diagnosis: Diagnosis, *, evidence: bool, facts: bool) -> None:
        """The flags that show more, those only that would."""
        more = len(words.candidates(diagnosis)) - words.SHOWN_FIXES
        hints = []
        if more > 0:
            hints.append(f"{more} more fix{'' if more == 1 else 'es'}: --all")
        elif diagnosis.fixes or diagnosis.alternatives or diagnosis.related:
            hints.append("more: --all")
        if self.show_all:
            hints.clear()
        if not evidence and diagnosis.diagnosis and diagnosis.diagnosis.evidence:
            hints.append("log lines: --evidence")
        if not facts and diagnosis.facts:
            hints.append("numbers: --facts")
        if hints:
            hints.append("--format json")
            self.blank()
            self.prose("(" + " \u00b7 ".join(hints) + ")", style=DIM)
