"""The message catalogue: every known line of vLLM and its neighbours, from `rules/messages/*.yaml`.

In: a LogLine's text. Out: the rows found on it, with their named groups converted (sizes to bytes). A group's
suffix is its unit: `_gib _mib _kib _bytes _size` -> bytes, `_tokens _blocks _count _len` -> int, `_s _pct _x _ratio`
-> float, else text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from diag.errors import RuleFileError, UnitError
from diag.facts.model import Event, Value
from diag.log.model import LogLine
from diag.patterns import MAX_TEXT, compile_set, group_texts, plain_groups
from diag.resources import data_names, read_data, read_yaml
from diag.terms import Phase, RowRole
from diag.units import GIB, KIB, MIB, parse_number, parse_size

MAX_HITS = 16  # times one row may be found on one line
BLOCK = 1 << 20  # characters of a log that are searched at once


_CONVERT: dict[str, Callable[[str], Value]] = {
    "gib": lambda text: round(parse_number(text) * GIB),
    "mib": lambda text: round(parse_number(text) * MIB),
    "kib": lambda text: round(parse_number(text) * KIB),
    "bytes": lambda text: round(parse_number(text)),
    "size": parse_size,
    **dict.fromkeys(("tokens", "blocks", "count", "len"), lambda text: int(parse_number(text))),
    **dict.fromkeys(("s", "pct", "x", "ratio"), parse_number),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One known line. `facts` maps a fact name to the group that fills it."""

    id: str
    pattern: str
    role: RowRole
    means: str
    origin: str
    phase: Phase | None = None
    process: str = "any"
    level: str | None = None
    releases: str | None = None
    subtype: str | None = None
    facts: Mapping[str, str]
    clauses: tuple[tuple[str, ...], ...] = ()  # every match holds a text of each
    examples: tuple[str, ...] = ()
    values: tuple[Mapping[str, Any], ...] = ()
    file: str = ""


def convert(group: str, text: str) -> Value:
    """The value of a named group by its suffix. Raises UnitError when the text does not fit the unit."""
    how = _CONVERT.get(group.rsplit("_", 1)[-1]) if "_" in group else None
    return text if how is None else how(text)


class Catalogue:
    """The rows, and what finds them on lines."""

    def __init__(self, rows: tuple[Row, ...], registry: Mapping[str, Mapping[str, str]]) -> None:
        self.rows = rows
        self.registry = registry  # fact name -> {unit, means}
        self.by_id = {row.id: row for row in rows}
        self._order = {row.id: index for index, row in enumerate(rows)}

    def events(self, lines: Sequence[LogLine]) -> Iterator[Event]:
        """The rows on the lines, in line order, each as often as it occurs.

        A row's pattern runs only on lines that hold one of its fixed texts; looking for these in many lines at once
        costs next to nothing.
        """
        for start, text, starts in _blocks(lines):
            hits: dict[int, list[Row]] = {}
            for row in self._with_literals:
                for index in _lines_with(row.clauses[0], text, starts):
                    if _holds_all(row.clauses[1:], lines[start + index].text):
                        hits.setdefault(index, []).append(row)
            for index in range(len(starts)):
                line = lines[start + index]
                rows = hits.get(index, [])
                rows += [self._without[number] for number in self._which(line.text[:MAX_TEXT])]
                rows.sort(key=lambda row: self._order[row.id])
                for row in rows:
                    yield from _events(row, line)

    def find(self, line: LogLine) -> Iterator[Event]:
        """The rows on one line."""
        return self.events((line,))

    @cached_property
    def _with_literals(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.clauses)

    @cached_property
    def _without(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.clauses)

    @cached_property
    def _which(self) -> Callable[[str], list[int]]:
        return compile_set([row.pattern for row in self._without])


def _blocks(lines: Sequence[LogLine]) -> Iterator[tuple[int, str, list[int]]]:
    """Runs of lines as one text: (index of the first line, the text, where each line starts in it)."""
    start = 0
    while start < len(lines):
        parts: list[str] = []
        starts: list[int] = []
        size = 0
        for line in lines[start:]:
            if size > BLOCK:
                break
            starts.append(size)
            parts.append(line.text[:MAX_TEXT])
            size += len(parts[-1]) + 1
        yield start, "\n".join(parts), starts
        start += len(starts)


def _lines_with(literals: Sequence[str], text: str, starts: Sequence[int]) -> list[int]:
    """Indices of the lines that hold one of the texts, each once."""
    found: set[int] = set()
    for literal in literals:
        at = text.find(literal)
        while at >= 0:
            index = bisect_right(starts, at) - 1
            found.add(index)
            after = starts[index + 1] if index + 1 < len(starts) else len(text)
            at = text.find(literal, after)
    return sorted(found)


def _holds_all(clauses: Sequence[Sequence[str]], text: str) -> bool:
    return all(any(literal in text for literal in clause) for clause in clauses)


def _events(row: Row, line: LogLine) -> Iterator[Event]:
    """A row's hits on a line."""
    for groups in group_texts(row.pattern, line.text, MAX_HITS):
        yield Event(
            row=row.id,
            role=_role_on(row, line),
            phase=row.phase,
            line=line,
            values=_values(groups),
            subtype=row.subtype,
        )


def _values(groups: Mapping[str, str]) -> dict[str, Value]:
    """The named groups, converted; one that does not fit its unit is left out."""
    values: dict[str, Value] = {}
    for name, text in groups.items():
        with suppress(UnitError, OverflowError):
            values[name] = convert(name, text)
    return values


def _role_on(row: Row, line: LogLine) -> RowRole:
    """A failure's words in a line that its logger calls information or a warning are no failure."""
    calm = line.level in ("DEBUG", "INFO", "WARNING") and ".py" in (line.source or "")
    return (
        RowRole.WARNING
        if calm and row.role is RowRole.CAUSE and row.level != "warning"
        else row.role
    )


_GENERIC_ANCHORS = (
    r"Traceback \(most recent call last\)",
    r"(?:Error|Exception|Interrupt): ",
    r"EngineCore failed to start",
    r"\bKilled\b",
)


_PLAIN = (RowRole.INFO, RowRole.DETAIL, RowRole.NOISE)


def scan_patterns() -> tuple[str, ...]:
    """RE2 patterns of the lines worth parsing with what stands around them: failures, warnings, echoes."""
    return (*_patterns(lambda role: role not in (*_PLAIN, RowRole.STAT)), *_GENERIC_ANCHORS)


def plain_scan_patterns() -> tuple[str, ...]:
    """RE2 patterns of the lines worth parsing by themselves. Periodic statistics are in neither set."""
    return _patterns(lambda role: role in _PLAIN)


def _patterns(wanted: Callable[[RowRole], bool]) -> tuple[str, ...]:
    return tuple(plain_groups(row.pattern) for row in catalogue().rows if wanted(row.role))


def row_from(data: Mapping[str, Any], origin: str, file: str) -> Row:
    """A Row from its YAML mapping. Raises KeyError or ValueError when a field is missing or off."""
    examples = data.get("example") or ()
    values = data.get("values")
    phase = data.get("phase")
    return Row(
        id=data["id"],
        pattern=data["pattern"],
        role=RowRole(data["role"]),
        means=data["means"],
        origin=origin,
        phase=Phase(phase) if phase else None,
        process=data.get("process", "any"),
        level=data.get("level"),
        releases=data.get("releases"),
        subtype=data.get("subtype"),
        facts=data.get("facts") or {},
        clauses=tuple(tuple(texts) for texts in data.get("clauses", ())),
        examples=tuple([examples] if isinstance(examples, str) else examples),
        values=tuple([values] if isinstance(values, dict) else values or ()),
        file=file,
    )


def message_files(rules_dir: Path) -> Iterator[tuple[str, Any]]:
    """(file name, body) of each message file of a folder, with examples. Raises RuleFileError."""
    for path in sorted((rules_dir / "messages").glob("*.yaml")):
        yield path.name, read_yaml(path)


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """The shipped catalogue, loaded once."""
    files = ((name.rsplit("/", 1)[-1], read_data(name)) for name in data_names("rules/messages"))
    return load(files, read_data("rules/facts.yaml")["facts"])


def load(files: Iterable[tuple[str, Any]], registry: Mapping[str, Mapping[str, str]]) -> Catalogue:
    """A Catalogue from message files. Raises RuleFileError with every bad row."""
    rows: list[Row] = []
    problems: list[str] = []
    for file, body in files:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            problems.append(f"messages/{file}: expected the keys schema, origin and messages")
            continue
        for number, data in enumerate(body["messages"], 1):
            try:
                rows.append(row_from(data, body["origin"], file))
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                name = data.get("id") if isinstance(data, dict) else None
                problems.append(f"messages/{file}: row {name or number}: {error!r}")
    if problems:
        raise RuleFileError(problems)
    return Catalogue(tuple(rows), registry)
