"""The memory terms of two starts, what the second lacks, and which terms explain it.

In: the Diagnosis of each. Out: terms by name as `Sized`, TermChange rows. All sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diag.facts.model import Fact, Facts
from diag.facts.torch_oom import OomReading, read_ooms
from diag.memory.eras import Era
from diag.memory.model import Sized
from diag.memory.sizes import Setting, total_bytes
from diag.memory.start_terms import LABELS, start_terms
from diag.release import parse_release
from diag.report.comparison import Amount, Explained, TermChange
from diag.report.model import Diagnosis
from diag.terms import Origin
from diag.units import MIB

# By which sign a term's growth adds to what is missing: a budget is a sum of terms, or the pool that came of them.
_BUDGET = {
    "requested": -1,
    "weights": 1,
    "activation": 1,
    "non_torch": 1,
    "activation_and_non_torch": 1,
    "graphs": 1,
}
_POOL = {"pool": -1}
_FREE_CHECK = {"requested": 1, "before": 1}
_ROOM = {
    "total": -1,
    "before": 1,
    "weights": 1,
    "non_torch": 1,
    "captured": 1,
    "pool": 1,
    "others": 1,
}
_NEED = {"need": 1}
_LEAST = 32 * MIB  # a smaller change is no cause
_SURE = 0.98  # of what is missing: sizes are printed with two decimals


def facts_of(diagnosis: Diagnosis) -> Facts:
    """The facts of a report as the arithmetic takes them."""
    table: dict[str, list[Fact]] = {}
    for item in diagnosis.facts:
        fact = Fact(
            name=item.name,
            value=item.value,
            unit=item.unit,
            line=item.line,
            rank=item.rank,
            origin=item.origin,
        )
        table.setdefault(item.name, []).append(fact)
    return Facts(table={name: tuple(found) for name, found in table.items()})


def terms_of(diagnosis: Diagnosis, other: Diagnosis, rank: int | None) -> Mapping[str, Sized]:
    """The memory terms of one start by name, of the rank that failed when it is known."""
    facts = facts_of(diagnosis)
    letter = diagnosis.ledger.era
    setting = Setting(
        version=parse_release(diagnosis.environment.vllm_version),
        engine=diagnosis.environment.engine,
        era=Era(letter) if letter in {era.value for era in Era} else None,
        assumed_total=_card(diagnosis, other),
        assumed_gmu=diagnosis.gmu.current if diagnosis.gmu else None,
    )
    return start_terms(facts, setting, rank, _reading(diagnosis, facts))


def _card(diagnosis: Diagnosis, other: Diagnosis) -> int | None:
    """Bytes of the card for a log that does not print them: those of the other log, unless this one names its card."""
    own = facts_of(diagnosis).text("device.name")
    if own is None or own == facts_of(other).text("device.name"):
        printed = total_bytes(facts_of(other))
        if printed.value is not None and printed.origin is not Origin.ASSUMED:
            return printed.value
    return next((item.total_bytes for item in diagnosis.ledger.ranks if item.total_bytes), None)


def _reading(diagnosis: Diagnosis, facts: Facts) -> OomReading | None:
    """The out-of-memory text that the finding is about."""
    found = diagnosis.diagnosis
    if found is None or found.line is None:
        return None
    return next((item for item in read_ooms(facts) if item.line == found.line), None)


def missing_in(
    bad: Diagnosis, terms: Mapping[str, Sized]
) -> tuple[int | None, str, tuple[Mapping[str, int], ...]]:
    """(bytes, in words, sums by which it may come about) of what the second start lacks."""
    found = bad.diagnosis
    subtype = "" if found is None else found.subtype

    def lack(wanted: str, there: str) -> int | None:
        one, other = terms.get(wanted), terms.get(there)
        if one is None or other is None or one.value is None or other.value is None:
            return None
        return max(0, one.value - other.value)

    if subtype == "kv.max_len_exceeds":
        sums = ({**_BUDGET, **_NEED}, {**_POOL, **_NEED})
        pinned = any(item.name == "config.kv_cache_memory_bytes" for item in bad.facts)
        return lack("need", "pool"), "for one full-length request", sums[1:] if pinned else sums
    if "tried" in terms:
        # Nothing missing means that what was free could not be used: no term's size explains that.
        return lack("tried", "free") or None, "for the request that failed", (_ROOM,)
    if subtype in ("kv.no_blocks", "weights.too_big"):
        pool = terms.get("pool")
        below = None if pool is None or pool.value is None else max(0, -pool.value)
        return below, "before the KV pool gets its first block", (_BUDGET, _POOL)
    if subtype == "kv.free_below_target":
        return lack("requested", "free_at_start"), "at the start-up check", (_FREE_CHECK,)
    return None, "", ({},)


def side_by_side(
    before: Mapping[str, Sized], after: Mapping[str, Sized], signs: Mapping[str, int]
) -> tuple[TermChange, ...]:
    """Every term that a start has, with its change in bytes and, by `signs`, what that adds to what is missing."""
    split = all("activation" in side and "non_torch" in side for side in (before, after))
    left_out = {"activation_and_non_torch"} if split else {"activation", "non_torch"}
    rows = []
    for term in LABELS:
        one, other = before.get(term), after.get(term)
        if (one is None and other is None) or (
            term in left_out and (split or None in (one, other))
        ):
            continue
        change = None
        if one is not None and other is not None and None not in (one.value, other.value):
            change = (other.value or 0) - (one.value or 0)
        sign = signs.get(term)
        worse = None if sign is None or change is None else sign * change
        if (
            not split
            and term in ("activation", "non_torch")
            and "activation_and_non_torch" in signs
        ):
            worse = None  # the sum of both counts
        rows.append(
            TermChange(
                term=term,
                label=LABELS[term],
                good=_amount(one),
                bad=_amount(other),
                change=change,
                worse=worse,
            )
        )
    return tuple(rows)


def _amount(size: Sized | None) -> Amount | None:
    if size is None or size.value is None:
        return None
    return Amount(bytes=size.value, origin=size.origin, lines=size.lines)


def mark_causes(
    terms: tuple[TermChange, ...], missing: int | None
) -> tuple[tuple[TermChange, ...], Explained]:
    """Mark the term that covers what is missing, else the largest ones until they do together."""
    worse = [item for item in terms if item.worse is not None and item.worse >= _LEAST]
    worse.sort(key=lambda item: -(item.worse or 0))
    if missing is None or not worse:
        return terms, Explained.NO_NUMBERS
    chosen: list[TermChange] = []
    covered = 0
    for item in worse:
        chosen.append(item)
        covered += item.worse or 0
        if covered >= _SURE * missing:
            break
    names = {item.term for item in chosen}
    marked = tuple(replace(item, explains=item.term in names) for item in terms)
    if covered < _SURE * missing:
        return marked, Explained.PARTLY
    return marked, Explained.BY_ONE if len(chosen) == 1 else Explained.TOGETHER
