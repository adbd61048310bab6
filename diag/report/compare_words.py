"""The sentences of a Comparison: values of settings, moved terms, the verdict. Nothing is laid out here."""

from __future__ import annotations

from collections.abc import Sequence

from diag.facts.model import Value
from diag.report.comparison import (
    Explained,
    ReleaseDifference,
    SettingChange,
    Side,
    TermChange,
)
from diag.report.compose import format_value
from diag.report.safe import clean
from diag.terms import Outcome
from diag.units import format_gib, format_size

VALUE = 60  # characters of a setting's value
_MOST = 4  # settings named in the verdict


def side(item: Side) -> str:
    """Where one start ran: release, model, device."""
    release = f"vLLM {item.vllm_version}" if item.vllm_version else "vLLM (release not in the log)"
    if item.engine and item.vllm_version:
        release += f" ({item.engine})"
    model = (item.model or "").rstrip("/").rsplit("/", 1)[-1]
    which = f"start {item.attempt} of {item.attempts}" if item.attempts > 1 else ""
    parts = (which, release, model, item.device or "")
    return ", ".join(clean(part, 80) for part in parts if part)


def state(item: Side) -> str:
    """What became of one start, in a few words."""
    if item.subtype is not None:
        return clean(f"{item.title} ({item.subtype})", 200)
    return {Outcome.HEALTHY: "healthy"}.get(
        item.outcome, clean(item.title, 200) or "no failure shown"
    )


def value(found: Value | None, unit: str, *, default: bool = False) -> str:
    """One value of a setting; says when it is the release's default or not in the log."""
    if found is None:
        return "not in the log"
    if isinstance(found, bool):
        text = "on" if found else "off"
    else:
        text = clean(format_value(found, unit), VALUE)
    return f"{text} (default)" if default else text


def setting(row: SettingChange) -> str:
    """A setting with both values: "--max-model-len 32,768 -> 131,072"."""
    left = value(row.good, row.unit, default=row.good_default)
    right = value(row.bad, row.unit, default=row.bad_default)
    return f"{clean(row.name, 80)} {left} -> {right}"


def amount(size: int | None) -> str:
    """GiB of a term, "?" when unknown."""
    return "?" if size is None else format_gib(size)


def change(row: TermChange) -> str:
    """A term's change in GiB with its sign; "" when unknown, "=" when nothing moved."""
    if row.change is None:
        return ""
    text = format_gib(row.change)
    return "=" if text in ("0.00", "-0.00") else text if row.change < 0 else f"+{text}"


def moved(row: TermChange) -> str:
    """One term's change as a clause."""
    if row.good is None or row.bad is None or row.change is None:
        return row.label
    verb = "grew" if row.change > 0 else "shrank"
    sizes = f"{format_size(row.good.bytes)} -> {format_size(row.bad.bytes)}"
    return f"{row.label} {verb} by {format_size(abs(row.change))} ({sizes})"


def release(row: ReleaseDifference) -> tuple[str, str]:
    """The release of a known change of vLLM, and what it means for the pool of the second start."""
    effects = ["smaller pool", "larger pool"]
    if row.pool not in ("smaller", "larger"):
        return row.since, ""
    return row.since, effects[(row.pool == "larger") is not row.gone]


def verdict(
    explained: Explained,
    terms: Sequence[TermChange],
    *,
    missing: int | None,
    words: str,
    changed: Sequence[SettingChange],
    releases: Sequence[ReleaseDifference],
    other_memory: bool,
) -> str:
    """What explains the failure, in one to three sentences. `other_memory`: it was not the GPU's that failed."""
    if explained is Explained.NOT_NEEDED:
        return "The second start shows no failure; what differs is listed below."
    if explained is Explained.NO_NUMBERS:
        if other_memory:
            return "GPU memory is not what failed here, so no term of it explains the failure."
        only = f" One setting differs: {setting(changed[0])}." if len(changed) == 1 else ""
        return (
            f"The logs have too few numbers in common to say which term explains the failure.{only}"
        )
    causes = sorted((row for row in terms if row.explains), key=lambda row: -(row.worse or 0))
    named = ", ".join(moved(row) for row in causes[:3])
    lack = (
        f"{format_size(missing)} are missing {words}" if missing else "Nothing is left for the pool"
    )
    result = {
        Explained.BY_ONE: "that alone explains the failure",
        Explained.TOGETHER: "together they explain the failure",
        Explained.PARTLY: "that explains a part; the rest is in no number that both logs have",
    }[explained]
    held = any(row.term in ("before", "others") for row in causes)
    behind = _behind(changed, releases)
    if held and not behind:
        behind = " Another process holds it, or an earlier one that has not ended."
    return f"{named[0].upper()}{named[1:]}. {lack}: {result}.{behind}"


def _behind(changed: Sequence[SettingChange], releases: Sequence[ReleaseDifference]) -> str:
    found = [setting(row) for row in changed if row.explains]
    if found:
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        return f" Behind it: {', '.join(found[:_MOST])}{more}."
    if any(row.explains for row in releases):
        return " No setting that moves it differs; the release does (below)."
    return ""
