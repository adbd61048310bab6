"""`oomdoc plan` without the command line: a model, cards and vLLM's own flags in, one document out.

The arithmetic is imported by the functions that need it: `oomdoc --help` stays quick.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diag.apps.console import DONE, DocumentFormat, Sink, committing
from diag.errors import UsageError
from diag.units import GIB

if TYPE_CHECKING:
    from diag.report.plan import PlanReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan and how to show it. `arguments` are vLLM's own flags; `width` in terminal cells."""

    model: str
    gpu: str
    arguments: tuple[str, ...] = ()
    vllm_version: str | None = None
    instances: int = 1
    limit_gib: float | None = None
    used_gib: float = 0.0
    sweep: bool = False
    hub: bool = False
    format: DocumentFormat = DocumentFormat.TEXT
    color: bool = False
    unicode: bool = True
    width: int = 80


def run(request: PlanRequest, sink: Sink) -> int:
    """Write the plan and return the exit code. Raises UsageError when something asked for makes no sense."""
    with committing(sink):
        sink.write(_render(build(request), request))
    return DONE


def build(request: PlanRequest) -> PlanReport:
    """The plan and what belongs to it. Raises UsageError."""
    from diag.memory.deployment import parse_cards, resolve
    from diag.memory.find_shape import find_shape
    from diag.memory.plan_search import best_parallel, changes, sweep
    from diag.memory.predict import predict
    from diag.release import parse_release
    from diag.report.plan import PlanReport

    model, settings = _settings(request.model, request.arguments)
    version = parse_release(request.vllm_version)
    if request.vllm_version is not None and version is None:
        raise UsageError(
            f"--vllm {request.vllm_version}: not a release", hint='write it like "0.33"'
        )
    _check(request)
    shape = find_shape(model, hub=request.hub)
    resolved = resolve(
        shape,
        parse_cards(request.gpu),
        settings,
        version=version,
        used=round(request.used_gib * GIB),
        instances=request.instances,
        limit=None if request.limit_gib is None else round(request.limit_gib * GIB),
    )
    plan = predict(shape, resolved.deployment)
    several = resolved.deployment.gpus > 1
    return PlanReport(
        plan=plan,
        changes=changes(plan),
        parallel=best_parallel(shape, resolved.deployment) if several else (),
        sweep=sweep(shape, resolved.deployment) if request.sweep else (),
        assumed=resolved.assumed,
        ignored=resolved.ignored,
    )


def _check(request: PlanRequest) -> None:
    if not 1 <= request.instances <= 64:
        raise UsageError(f"--instances {request.instances}: between 1 and 64")
    if request.used_gib < 0 or (request.limit_gib is not None and request.limit_gib <= 0):
        raise UsageError("--used-gib and --limit-gib are sizes: give a positive number of GiB")


def _settings(model: str, arguments: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The model's name and vLLM's flags; MODEL may be a whole `vllm serve ...` line."""
    from diag.facts.args import flags

    words = " ".join(shlex.quote(word) for word in arguments)
    found: dict[str, str] = {}
    if " serve " in f" {model} ":
        for item in flags(model):
            found[item.key] = item.value
        model = found.pop("model", model)
    if model.startswith("-"):
        raise UsageError(
            f"{model}: give the model first, then vLLM's flags", hint="oomdoc plan MODEL --gpu L4"
        )
    for item in flags(words):
        found[item.key] = item.value
    return model, found


def _render(report: PlanReport, request: PlanRequest) -> str:
    from diag.report.plan import render_json, render_markdown, render_text

    if request.format is DocumentFormat.JSON:
        return render_json(report)
    if request.format is DocumentFormat.MD:
        return render_markdown(report)
    if request.format is DocumentFormat.PLAIN:
        return render_text(report, width=80, color=False, unicode=False)
    return render_text(report, width=request.width, color=request.color, unicode=request.unicode)
