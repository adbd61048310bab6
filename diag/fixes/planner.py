"""From a failure to its fixes: every candidate of the table is computed, checked, ordered; the best few remain.

Order: changes that provably fit come first, by what the user gives up; then those whose sum the log does not allow,
in the table's order. A change that provably does not fit, or that the release does not know, is left out. Only when no
single change provably fits, two or three together are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from diag.fixes import (
    actions_cpu,
    actions_host,
    actions_host_memory,
    actions_request,
    actions_share,
    actions_work,
)
from diag.fixes.advice import not_helpful
from diag.fixes.case import Case, make_case
from diag.fixes.combine import combined
from diag.fixes.conditions import applies, fill, values
from diag.fixes.flags import flag_exists
from diag.fixes.model import Change, Fix, GmuAdvice, NotHelpful
from diag.fixes.situation import Situation, read_numbers
from diag.fixes.table import Entry, FixTable, Step, load_table
from diag.terms import Phase, Safety

MOST = 6

Action = Callable[[Case], "Fix | None"]

ACTIONS: Mapping[str, Action] = {
    action.__name__: action
    for action in (
        actions_share.raise_gmu,
        actions_share.lower_gmu,
        actions_share.set_pool_bytes,
        actions_share.pin_measured_pool,
        actions_cpu.cpu_pool,
        actions_share.drop_override,
        actions_request.shorten_context,
        actions_request.fp8_kv,
        actions_request.more_gpus,
        actions_request.more_stages,
        actions_request.more_replicas,
        actions_work.fewer_batched_tokens,
        actions_work.fewer_seqs,
        actions_work.enforce_eager,
        actions_work.fewer_graphs,
        actions_work.limit_images,
        actions_work.smaller_images,
        actions_work.chunk_prompts,
        actions_work.shorter_profile,
        actions_host.half_precision,
        actions_host_memory.offload_weights,
        actions_host_memory.offload_kv,
        actions_host_memory.container_memory,
        actions_host.free_card,
        actions_host.expandable_on,
        actions_host.expandable_off,
        actions_host_memory.less_swap,
        actions_host.no_custom_all_reduce,
        actions_host.no_symmetric_memory,
    )
}

_CLASS_OF_PHASE = {
    Phase.WEIGHT_LOAD: "weights.too_big",
    Phase.PROFILE: "act.profile_run",
    Phase.SERVING: "act.other",
}
_GIVEN_UP = {Safety.SAFE: 0, Safety.TRADEOFF: 1, Safety.CHANGES_RESULTS: 2}


def fix_table() -> FixTable:
    """The table of `rules/fixes.yaml`. Raises RuleFileError when it is wrong."""
    return load_table(frozenset(ACTIONS))


def plan_fixes(
    situation: Situation, advice: GmuAdvice
) -> tuple[tuple[Fix, ...], tuple[NotHelpful, ...]]:
    """Up to six fixes in order, and the tempting changes that don't help here."""
    table = fix_table()
    case = make_case(situation, read_numbers(situation), advice)
    entry = table.subtypes.get(_class_for(case)) or table.subtypes["unknown"]
    singles = _candidates(case, table, entry)
    several = [] if any(fix.fits for fix in singles) else _usable(case, combined(case))
    fixes = _ordered([*several, *singles])[:MOST]
    changed = {change.flag or change.env for fix in fixes for change in fix.changes}
    return tuple(fixes), not_helpful(case, table, entry, frozenset(filter(None, changed)))


def _class_for(case: Case) -> str:
    """The failure class whose fixes apply; an out-of-memory text of unknown cause is treated by its phase."""
    situation = case.situation
    if (
        situation.subtype == "unknown"
        and case.numbers.tried is not None
        and situation.phase is not None
    ):
        return _CLASS_OF_PHASE.get(situation.phase, "unknown")
    return situation.subtype


def _candidates(case: Case, table: FixTable, entry: Entry) -> list[Fix]:
    made = (
        ACTIONS[name](case) if name in ACTIONS else _from_step(case, name, table.steps[name])
        for name in entry.fixes
    )
    return _usable(case, made)


def _usable(case: Case, made: Iterable[Fix | None]) -> list[Fix]:
    return [
        fix
        for fix in made
        if fix is not None and fix.fits is not False and not _unknown_to_release(case, fix)
    ]


def _unknown_to_release(case: Case, fix: Fix) -> bool:
    version = case.situation.version
    names = [change.flag or change.env for change in fix.changes]
    return any(flag_exists(name, version) is False for name in names if name)


def _ordered(fixes: list[Fix]) -> list[Fix]:
    """Stable: the table's order decides among equals, combinations first where no sum is known."""
    return sorted(fixes, key=lambda fix: _GIVEN_UP[fix.safety] if fix.fits else len(_GIVEN_UP))


def _from_step(case: Case, name: str, step: Step) -> Fix | None:
    if not applies(case, step.only, step.unless, step.releases):
        return None
    known = values(case)
    proof = fill(step.proof, known) or step.proof_plain
    do = fill(step.do, known) if step.do else None
    if proof is None or (step.do and do is None):
        return None
    changes = [
        Change(flag=item.flag, env=item.env, to=item.to)
        for item in step.set
        if not (item.flag and case.now(item.flag.lstrip("-").replace("-", "_")) == item.to)
    ]
    if do:
        changes.append(Change(action=do))
    if not changes:
        return None
    return case.fix(
        name,
        step.title,
        changes,
        fits=None,
        proof=proof,
        cost=step.cost,
        safety=step.safety,
        verify=step.verify,
        when_not=step.when_not,
    )
