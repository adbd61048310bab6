"""What does not help: tempting changes of the table, and the popular shares 0.80, 0.75 and 0.70 checked by the log."""

from __future__ import annotations

from diag.fixes.case import Case
from diag.fixes.conditions import applies, fill, values
from diag.fixes.model import GmuAdvice, NotHelpful
from diag.fixes.situation import Numbers
from diag.fixes.sums import size
from diag.fixes.table import Entry, FixTable
from diag.terms import GmuVerdict

POPULAR = 0.80  # the usual first advice
LOWEST = 0.75  # its lower form
POPULAR_TP = 0.70  # the usual advice for two cards
_FLAG_OF = {"expandable_small": "PYTORCH", "fp8_kv_no_pool": "--kv-cache-dtype"}


def not_helpful(
    case: Case, table: FixTable, entry: Entry, offered: frozenset[str]
) -> tuple[NotHelpful, ...]:
    """The entry's tempting changes that apply; each once, none that a shown fix makes itself."""
    known = values(case)
    found: dict[str, NotHelpful] = {}
    for name in entry.not_helpful:
        item = table.not_helpful[name]
        if not applies(case, item.only, item.unless, item.releases) or _offered(name, offered):
            continue
        change, why = fill(item.change, known), fill(item.why, known) or item.plain
        if change and why:
            found.setdefault(change, NotHelpful(change=change, why=why))
    return tuple(found.values())


def _offered(name: str, offered: frozenset[str]) -> bool:
    prefix = _FLAG_OF.get(name)
    return prefix is not None and any(item.startswith(prefix) for item in offered)


def popular_advice(advice: GmuAdvice, numbers: Numbers, ranks: int) -> tuple[str, ...]:
    """One or two sentences: is the popular share right for this log, with numbers where there are any?"""
    if advice.verdict is GmuVerdict.RAISE:
        return _for_raise(advice, numbers, ranks)
    if advice.verdict is GmuVerdict.LOWER:
        return _for_lower(advice, numbers, ranks)
    if advice.verdict is GmuVerdict.CANNOT_HELP:
        return (f"The popular {POPULAR:.2f} or {LOWEST:.2f} does not help here.",)
    if advice.verdict is GmuVerdict.LEAVE:
        return (f"The popular {POPULAR:.2f} or {LOWEST:.2f} changes nothing here.",)
    return (f"Whether the popular {POPULAR:.2f} helps cannot be said from this log.",)


def _for_raise(advice: GmuAdvice, numbers: Numbers, ranks: int) -> tuple[str, ...]:
    shares = f"{POPULAR:.2f} or {LOWEST:.2f}" + (
        f", or {POPULAR_TP:.2f} with several GPUs," if ranks > 1 else ""
    )
    current, total = advice.current, numbers.total
    if current is not None and current <= LOWEST:
        return (f"The popular {POPULAR:.2f} happens to be a raise from {current:g}.",)
    if current is None or total is None or current <= POPULAR:
        return (f"The popular {shares} is the wrong direction here: it makes the pool smaller.",)
    taken = size((current - POPULAR) * total.value)
    return (
        f"The popular {shares} is the wrong direction here: {POPULAR:.2f} takes {taken} from too small a pool.",
    )


def _for_lower(advice: GmuAdvice, numbers: Numbers, ranks: int) -> tuple[str, ...]:
    current, total, low, high = (
        advice.current,
        numbers.total,
        advice.lower_bound,
        advice.upper_bound,
    )
    if current is not None and current <= POPULAR:
        return (f"The popular {POPULAR:.2f} is no reduction from {current:g}.",)
    if high is None or advice.suggested is None or total is None:
        return (
            f"The popular {POPULAR:.2f} has the right direction; how much is needed is not in the log.",
        )
    sentences = []
    if low is not None and low > POPULAR:
        sentences.append(
            f"The popular {POPULAR:.2f} goes too far: below {low:g} the pool holds no full-length request."
        )
    elif high < POPULAR:
        sentences.append(
            f"The popular {POPULAR:.2f} is not low enough: {high:g} is the most that fits."
        )
    elif advice.suggested == POPULAR:
        sentences.append(f"The popular {POPULAR:.2f} is what fits here.")
    elif advice.suggested < POPULAR:
        sentences.append(
            f"The popular {POPULAR:.2f} may just fit; {advice.suggested:g} keeps a little spare."
        )
    else:
        given = size((advice.suggested - POPULAR) * total.value)
        sentences.append(
            f"The popular {POPULAR:.2f} works but gives up {given} more of pool than {advice.suggested:g}, which does."
        )
    if ranks > 1:
        sentences.append(
            f"The share counts per GPU: {POPULAR_TP:.2f} because of tensor parallelism alone has no ground."
        )
    return tuple(sentences)
