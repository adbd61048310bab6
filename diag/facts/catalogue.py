"""The message catalogue: every known line of vLLM and its neighbours, from `rules/messages/*.yaml`.

In: a LogLine's text. Out: the rows found on it, with their named groups converted (sizes to bytes). A group's
suffix is its unit: `_gib _mib _kib _bytes _size` -> bytes, `_tokens _blocks _count _len` -> int, `_s _pct _x _ratio`
-> float, else text. An installed package reads one JSON made from the YAML at build time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diag.errors import RuleFileError, UnitError
from diag.facts.model import Event, Value
from diag.log.model import LogLine
from diag.resources import data_dir
from diag.terms import Phase, RowRole
from diag.units import GIB, KIB, MIB, parse_number, parse_size

if TYPE_CHECKING:
    import regex

MAX_TEXT = 64 * KIB  # characters of a line that a pattern sees
MAX_HITS = 16  # times one row may be found on one line
TIMEOUT_S = 0.5  # for one exact pattern on one line

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
    examples: tuple[str, ...]
    values: tuple[Mapping[str, Any], ...] = ()
    file: str = ""


def convert(group: str, text: str) -> Value:
    """The value of a named group by its suffix. Raises UnitError when the text does not fit the unit."""
    how = _CONVERT.get(group.rsplit("_", 1)[-1]) if "_" in group else None
    return text if how is None else how(text)


def plain_groups(pattern: str) -> str:
    """The pattern with named groups made plain: what RE2 scans with."""
    import re

    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


class Catalogue:
    """The rows, with one RE2 set that tells which of them a line can match."""

    def __init__(self, rows: tuple[Row, ...], registry: Mapping[str, Mapping[str, str]]) -> None:
        self.rows = rows
        self.registry = registry  # fact name -> {unit, means}
        self.by_id = {row.id: row for row in rows}
        self._compiled: dict[str, regex.Pattern[str]] = {}

    @cached_property
    def _which(self) -> Callable[[str], list[int]]:
        try:
            import re2
        except ImportError:  # no wheel for this platform: try every row
            everything = list(range(len(self.rows)))
            return lambda _: everything
        options = re2.Options()
        options.max_mem = 256 << 20
        options.log_errors = False
        wanted = re2.Set.SearchSet(options)
        for row in self.rows:
            wanted.Add(plain_groups(row.pattern))
        wanted.Compile()
        return lambda text: sorted(wanted.Match(text) or ())

    def exact(self, row: Row) -> regex.Pattern[str]:
        """The row's own pattern, compiled on first use."""
        import regex

        pattern = self._compiled.get(row.id)
        if pattern is None:
            pattern = self._compiled[row.id] = regex.compile(row.pattern)
        return pattern

    def find(self, line: LogLine) -> Iterator[Event]:
        """The rows on a line, each as often as it occurs. A value that does not fit its unit drops that row's hit."""
        text = line.text if len(line.text) <= MAX_TEXT else line.text[:MAX_TEXT]
        for index in self._which(text):
            row = self.rows[index]
            try:
                for count, match in enumerate(self.exact(row).finditer(text, timeout=TIMEOUT_S)):
                    if count >= MAX_HITS:
                        break
                    values = {
                        name: convert(name, found)
                        for name, found in match.groupdict().items()
                        if found is not None
                    }
                    yield Event(
                        row=row.id,
                        role=_role_on(row, line),
                        phase=row.phase,
                        line=line,
                        values=values,
                        subtype=row.subtype,
                    )
            except (UnitError, TimeoutError):
                continue


def _role_on(row: Row, line: LogLine) -> RowRole:
    """A failure's words in a line that its logger calls information or a warning are no failure."""
    calm = line.level in ("DEBUG", "INFO", "WARNING") and ".py" in (line.source or "")
    return RowRole.WARNING if calm and row.role is RowRole.CAUSE and row.level != "warning" else row.role


_GENERIC_ANCHORS = (
    r"Traceback \(most recent call last\)",
    r"(?:Error|Exception|Interrupt): ",
    r"EngineCore failed to start",
    r"\bKilled\b",
)


def scan_patterns() -> tuple[str, ...]:
    """RE2 patterns of the lines worth keeping from a log of gigabytes: all rows but the periodic statistics."""
    rows = catalogue().rows
    wanted = [plain_groups(row.pattern) for row in rows if row.role is not RowRole.STAT]
    return (*wanted, *_GENERIC_ANCHORS)


def row_from(data: Mapping[str, Any], origin: str, file: str) -> Row:
    """A Row from its YAML mapping. Raises KeyError or ValueError when a field is missing or off."""
    examples = data["example"]
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
        examples=tuple([examples] if isinstance(examples, str) else examples),
        values=tuple([values] if isinstance(values, dict) else values or ()),
        file=file,
    )


def read_yaml(path: Path) -> Any:
    """A YAML file by the C loader when there is one. Raises RuleFileError with the line of a syntax error."""
    import yaml

    try:
        with path.open("rb") as stream:
            return yaml.load(stream, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path.name}:{mark.line + 1}" if mark else path.name
        raise RuleFileError([f"{where}: not YAML: {getattr(error, 'problem', error)}"]) from error


def build_json(rules_dir: Path) -> str:
    """All message rows and fact names as one JSON text: what the wheel carries."""
    files = []
    for path in sorted((rules_dir / "messages").glob("*.yaml")):
        body = read_yaml(path)
        files.append({"file": path.name, "origin": body["origin"], "messages": body["messages"]})
    facts = {}
    for path in sorted(rules_dir.glob("facts*.yaml")):
        facts.update(read_yaml(path)["facts"])
    return json.dumps({"files": files, "facts": facts}, ensure_ascii=False, separators=(",", ":"))


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """The shipped catalogue, loaded once."""
    rules = data_dir("rules")
    compiled = rules.parent / "catalogue.json"
    text = compiled.read_text("utf-8") if compiled.is_file() else build_json(rules)
    return load(json.loads(text))


def load(body: Mapping[str, Any]) -> Catalogue:
    """A Catalogue from the JSON body. Raises RuleFileError with every bad row."""
    rows: list[Row] = []
    problems: list[str] = []
    for part in body["files"]:
        for data in part["messages"]:
            try:
                rows.append(row_from(data, part["origin"], part["file"]))
            except (KeyError, ValueError, TypeError) as error:
                problems.append(f"messages/{part['file']}: row {data.get('id', '?')!r}: {error!r}")
    if problems:
        raise RuleFileError(problems)
    return Catalogue(tuple(rows), body["facts"])
