"""A Diagnosis as Markdown for a GitHub issue, a chat or a page: the terminal's order, with tables.

Text that may come from a log can't act: a word with a mark-up character, a mention, an issue number
or a link becomes a code span, and a fence is longer than any run of back-ticks inside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from diag.report import words
from diag.report.model import Diagnosis, Fix
from diag.report.safe import MAX_COMMAND, clean, clean_block
from diag.units import format_gib

# A word that could act: mark-up, HTML, entity, mention, issue number, maths, strike-out, link, flag.
_ACTIVE = re.compile(r"[`*_<\[\]\\@#&$]|~.*~|://|^www\.|^--|^GH-\d", re.IGNORECASE)
_EMOJI = re.compile(r":[\w+-]+:")
_FIRST = re.compile(r"[-+=>~]+|\d+[.)]")  # acts at the start of a line only
_EDGES = re.compile(r"^([(\"']*)(.*?)([)\"'.,;:?]*)$", re.DOTALL)
_TICKS = re.compile("`+")
_URL = re.compile(r"https?://[A-Za-z0-9./_~%#?=&+:,@-]+")


def render(diagnosis: Diagnosis) -> str:
    """The whole answer as Markdown; ends in a newline."""
    sections = [
        _head(diagnosis),
        _fixes(diagnosis),
        _command(diagnosis),
        _next_steps(diagnosis),
        _dont(diagnosis),
        _flag_notes(diagnosis),
        _memory(diagnosis),
        _direction(diagnosis),
        _readings(diagnosis),
        _seen(diagnosis),
        _check(diagnosis),
        _evidence(diagnosis),
        _notes(diagnosis),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def prose(text: str, limit: int = words.SUMMARY) -> str:
    """A sentence in which no word of a log can act as Markdown or HTML.

    >>> prose("raise gpu_memory_utilization, says @user in #12")
    'raise `gpu_memory_utilization`, says `@user` in `#12`'
    """
    found = clean(text, limit).split()
    shown = [_word(word) for word in found]
    if found and _FIRST.fullmatch(found[0]):
        shown[0] = code(found[0])
    return " ".join(shown)


def code(text: str) -> str:
    """A code span whose back-ticks are longer than any run inside."""
    text = " ".join(clean(text).split())
    if not text:
        return ""
    ticks = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fence(text: str, language: str = "") -> str:
    """A fenced block that its content can't close."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"


def _longest_run(text: str) -> int:
    return max(map(len, _TICKS.findall(text)), default=0)


def _word(word: str) -> str:
    if _EMOJI.search(word):
        return code(word)
    match = _EDGES.match(word)
    before, core, after = match.groups() if match else ("", word, "")
    return f"{before}{code(core)}{after}" if core and _ACTIVE.search(core) else word


def _cell(text: str) -> str:
    """A table cell; GitHub reads an escaped bar as a bar, in code spans too."""
    return text.replace("\\|", "\\ |").replace("|", "\\|")


def _table(head: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> str:
    rules = [{"l": "---", "r": "---:"}[letter] for letter in align]
    lines = [head, rules, *[[_cell(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _link(text: str, url: str) -> str:
    """A link when the address is an ordinary web address, else the text alone."""
    url = clean(url)
    return f"[{text}]({url})" if _URL.fullmatch(url) else text


def _head(diagnosis: Diagnosis) -> str:
    finding = diagnosis.diagnosis
    parts = []
    if finding is not None:
        parts.append(f"### {prose(words.title(finding))} ({code(finding.subtype)})")
    else:
        lead, rest = words.headline(diagnosis)
        parts += [f"### {prose(lead.rstrip('.:'))}", prose(rest[:1].upper() + rest[1:])]
    where = [
        words.environment(diagnosis),
        words.attempts(diagnosis.source, failed=finding is not None),
    ]
    parts += [prose(line) for line in where if line]
    if finding is not None:
        parts.append(prose(finding.summary or diagnosis.headline))
        unsure, lacking = words.certainty(finding), words.missing(diagnosis)
        needed = f"To be surer: {'; '.join(map(prose, lacking))}." if lacking else ""
        if unsure or needed:
            parts.append(" ".join(filter(None, [unsure and f"**{unsure}**", needed])))
    return "\n\n".join(filter(None, parts))


def _fixes(diagnosis: Diagnosis) -> str:
    usable, short = words.candidates(diagnosis), words.insufficient(diagnosis)
    parts = []
    if usable:
        parts += [f"**{words.fixes_heading(len(usable))}**", _fix_table(usable)]
    if short:
        parts += ["**Checked, and not enough**", _fix_table(short)]
    return "\n\n".join(parts)


def _fix_table(fixes: Sequence[Fix]) -> str:
    rows = []
    for number, item in enumerate(fixes, 1):
        what = "<br>".join(
            prose(words.change(change)) if change.action else code(words.change(change))
            for change in item.changes
        )
        price = prose(words.cost(item))
        if item.when_not:
            price = "; ".join(filter(None, [price, f"not if {prose(item.when_not)}"]))
        rows.append(
            (str(number), what or prose(item.title), words.fits(item), prose(item.proof), price)
        )
    return _table(("", "Change", "Result", "Because", "Costs"), "rllll", rows)


def _command(diagnosis: Diagnosis) -> str:
    usable = words.candidates(diagnosis)
    for number, item in enumerate(usable, 1):
        if item.command:
            name = (
                "Your command, changed" if len(usable) == 1 else f"Your command with fix {number}"
            )
            return f"**{name}**\n\n{fence(clean_block(item.command, MAX_COMMAND))}"
    return ""


def _next_steps(diagnosis: Diagnosis) -> str:
    if not diagnosis.next_steps:
        return ""
    steps = "\n".join(clean(step) for step in diagnosis.next_steps)
    return f"**To know more, get**\n\n{fence(steps)}"


def _dont(diagnosis: Diagnosis) -> str:
    items = [f"{prose(item.change)}: {prose(item.why)}" for item in diagnosis.not_helpful]
    return f"**Don't**\n\n{_list(items)}" if items else ""


def _flag_notes(diagnosis: Diagnosis) -> str:
    items = [f"{code(note.flag)}: {prose(note.why)}" for note in diagnosis.flag_notes]
    return f"**In your command**\n\n{_list(items)}" if items else ""


def _memory(diagnosis: Diagnosis) -> str:
    parts = []
    for group in words.rank_groups(diagnosis):
        rows = []
        for entry in words.ledger_rows(group.ledger):
            amount = "?" if entry.bytes is None else format_gib(entry.bytes)
            name = prose(entry.label, 60)
            state = words.entry_state(entry)
            notes = [f"**{state}**" if entry.failed else state, words.entry_source(entry)]
            rows.append((name, amount, ", ".join(filter(None, notes))))
        if rows:
            heading = prose(words.ledger_heading(group, diagnosis.environment))
            parts += [f"**{heading}**", _table(("Term", "GiB", "Source"), "lrl", rows)]
    return "\n\n".join(parts)


def _direction(diagnosis: Diagnosis) -> str:
    advice = words.advises_gmu(diagnosis)
    if advice is None:
        return ""
    sentences = " ".join(prose(text) for text in (advice.why, *advice.popular) if text)
    return f"**`gpu_memory_utilization`: {words.gmu(advice)}.** {sentences}".rstrip()


def _readings(diagnosis: Diagnosis) -> str:
    items = [
        prose(words.alternative(item.family.label, item.subtype, item.confidence, item.why))
        for item in diagnosis.alternatives
    ]
    return f"**Could also be**\n\n{_list(items)}" if items else ""


def _seen(diagnosis: Diagnosis) -> str:
    parts = []
    if diagnosis.known_bugs:
        items = [
            f"{prose(words.bug(bug))} {prose(bug.cure)} ({_link('thread', bug.url)})"
            for bug in diagnosis.known_bugs
        ]
        parts.append(f"**Known bugs of this release**\n\n{_list(items)}")
    if diagnosis.related:
        items = [
            f"{_link(prose(item.id, 40), item.url)}: {prose(words.related(item))}"
            for item in diagnosis.related
        ]
        parts.append(f"**Seen before**\n\n{_list(items)}")
    return "\n\n".join(parts)


def _check(diagnosis: Diagnosis) -> str:
    verify = next((item.verify for item in words.candidates(diagnosis) if item.verify), "")
    return f"**Check it:** {prose(verify)}" if verify else ""


def _evidence(diagnosis: Diagnosis) -> str:
    quoted = diagnosis.diagnosis.evidence if diagnosis.diagnosis else ()
    if not quoted:
        return ""
    lines = "\n".join(f"{item.line}: {clean(item.text)}" for item in quoted)
    return f"**Log lines**\n\n{fence(lines, 'text')}"


def _notes(diagnosis: Diagnosis) -> str:
    return "\n\n".join(f"Note: {prose(note)}" for note in diagnosis.source.notes)
