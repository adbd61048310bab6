"""`oomdoc compare` without the command line: two logs, or one with several starts, in; one document out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diag.apps.console import DONE, STDIN, DocumentFormat, Sink, committing, log_source
from diag.errors import UsageError

if TYPE_CHECKING:
    from diag.report.comparison import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What to compare and how to show it. `bad` None: both starts are in `good`. `width` in terminal cells."""

    good: str
    bad: str | None = None
    gpu: str | None = None
    format: DocumentFormat = DocumentFormat.TEXT
    color: bool = False
    unicode: bool = True
    width: int = 80


def run(request: CompareRequest, sink: Sink) -> int:
    """Write the comparison and return the exit code. Raises LogReadError and UsageError."""
    with committing(sink):
        sink.write(_render(build(request), request))
    return DONE


def build(request: CompareRequest) -> Comparison:
    """The comparison of the two starts asked for."""
    from diag.compare import compare
    from diag.pipeline import diagnose, diagnose_pair

    if request.bad is None:
        source, name = log_source(request.good)
        return compare(*diagnose_pair(source, gpu=request.gpu, name=name))
    if request.good == request.bad == STDIN:
        raise UsageError('"-" is given twice', hint="stdin can be read only once")
    (good, good_name), (bad, bad_name) = log_source(request.good), log_source(request.bad)
    return compare(
        diagnose(good, attempt="good", gpu=request.gpu, name=good_name),
        diagnose(bad, gpu=request.gpu, name=bad_name),
    )


def _render(found: Comparison, request: CompareRequest) -> str:
    from diag.report import compare as report
    from diag.report.jsonout import dump

    if request.format is DocumentFormat.JSON:
        return dump(report.to_dict(found)) + "\n"
    if request.format is DocumentFormat.MD:
        return report.render_markdown(found)
    if request.format is DocumentFormat.PLAIN:
        return report.render_plain(found)
    return report.render_text(
        found, width=request.width, color=request.color, unicode=request.unicode
    )
