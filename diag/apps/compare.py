"""`oomdoc compare` without the command line: two logs, or one with several starts, in; one document out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from diag.apps.console import DONE, Sink
from diag.errors import UsageError

if TYPE_CHECKING:
    from diag.report.comparison import Comparison

STDIN = "-"


class CompareFormat(str, Enum):
    """How the comparison is written."""

    TEXT = "text"
    PLAIN = "plain"
    JSON = "json"
    MD = "md"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What to compare and how to show it. `bad` None: both starts are in `good`. `width` in terminal cells."""

    good: str
    bad: str | None = None
    gpu: str | None = None
    format: CompareFormat = CompareFormat.TEXT
    color: bool = False
    unicode: bool = True
    width: int = 80


def run(request: CompareRequest, sink: Sink) -> int:
    """Write the comparison and return the exit code. Raises LogReadError and UsageError."""
    try:
        sink.write(_render(build(request), request))
    except BaseException:
        sink.discard()
        raise
    sink.commit()
    return DONE


def build(request: CompareRequest) -> Comparison:
    """The comparison of the two starts asked for."""
    from diag.compare import compare
    from diag.pipeline import diagnose, diagnose_pair

    if request.bad is None:
        source, name = _source(request.good)
        return compare(*diagnose_pair(source, gpu=request.gpu, name=name))
    if request.good == request.bad == STDIN:
        raise UsageError('"-" is given twice', hint="stdin can be read only once")
    (good, good_name), (bad, bad_name) = _source(request.good), _source(request.bad)
    return compare(
        diagnose(good, attempt="good", gpu=request.gpu, name=good_name),
        diagnose(bad, gpu=request.gpu, name=bad_name),
    )


def _source(given: str) -> tuple[str | Path, str]:
    return (STDIN, "<stdin>") if given == STDIN else (Path(given), given)


def _render(found: Comparison, request: CompareRequest) -> str:
    import json

    from diag.report import compare as report

    if request.format is CompareFormat.JSON:
        return json.dumps(report.to_dict(found), indent=2, ensure_ascii=False) + "\n"
    if request.format is CompareFormat.MD:
        return report.render_markdown(found)
    if request.format is CompareFormat.PLAIN:
        return report.render_plain(found)
    return report.render_text(
        found, width=request.width, color=request.color, unicode=request.unicode
    )
