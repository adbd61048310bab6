"""Situations for the tests of `diag.fixes`: facts given by name, sizes in GiB."""

from __future__ import annotations

from diag.facts.model import Event, Fact, Facts, Problem
from diag.fixes.situation import Situation
from diag.log.model import LogLine
from diag.release import parse_release
from diag.terms import Family, Phase, RowRole
from diag.units import GIB

FAMILIES = {
    "kv": Family.KV_RESERVATION,
    "tp": Family.TP_BUFFER,
    "act": Family.ACTIVATION_SPIKE,
    "alloc": Family.ALLOCATOR_TRANSIENT,
    "weights": Family.WEIGHTS,
    "graph": Family.CUDA_GRAPH,
    "base": Family.DEVICE_BASELINE,
    "host": Family.HOST_MEMORY,
    "compile": Family.COMPILE,
    "look": Family.LOOKALIKE,
}
_GIB_NAMES = (
    "device.",
    "weights.",
    "profile.",
    "kv.needed",
    "kv.available",
    "oom.",
    "graph.",
    "host.",
)
LINE = 40  # of the failing text


def situation(
    subtype: str,
    facts: dict[str, object] | None = None,
    *,
    phase: Phase | None = None,
    version: str | None = "0.11.0",
    engine: str | None = "V1",
    text: str = "",
    sites: tuple[str, ...] = (),
    command: str | None = None,
    backend: str | None = "cuda",
    rows: tuple[str, ...] = (),
    lines: tuple[str, ...] = (),
) -> Situation:
    """A situation; sizes among the facts are GiB, the rest as given."""
    table = {}
    for name, value in (facts or {}).items():
        sized = isinstance(value, (int, float)) and name.startswith(_GIB_NAMES)
        shown = round(value * GIB) if sized else value
        table[name] = (Fact(name=name, value=shown, unit="bytes" if sized else "count", line=LINE),)
    line = LogLine(number=LINE, text=text)
    problem = Problem(
        line=line,
        text=text,
        exception=None,
        role=RowRole.CAUSE,
        phase=phase,
        sites=frozenset(sites),
    )
    logged = tuple(LogLine(number=number, text=shown) for number, shown in enumerate(lines, 1))
    events = tuple(
        Event(row=row, role=RowRole.INFO, phase=None, line=line, values={}) for row in rows
    )
    return Situation(
        facts=Facts(table=table, problems=(problem,), events=events, lines=(*logged, line)),
        subtype=subtype,
        family=FAMILIES.get(subtype.split(".", 1)[0], Family.UNKNOWN),
        phase=phase,
        version=parse_release(version),
        engine=engine,
        problem_line=LINE,
        command=command,
        backend=backend,
    )
