"""Two starts side by side: which memory term, flag, release or line of the environment differs, and what explains it.

In: the Diagnosis of a start that works and of one that does not. Out: a Comparison. A term explains the failure when
its change is at least as large as what is missing there; several do when their changes together are.
"""

from __future__ import annotations

from diag.compare.settings import changed_environment, changed_settings, marked
from diag.compare.terms import facts_of, mark_causes, missing_in, side_by_side, terms_of
from diag.memory.release_changes import changes_between
from diag.release import parse_release
from diag.report.compare_words import verdict
from diag.report.comparison import Comparison, Explained, ReleaseDifference, Side
from diag.report.model import Diagnosis
from diag.terms import Family, Outcome

_ENOUGH = (Explained.BY_ONE, Explained.TOGETHER)


def compare(good: Diagnosis, bad: Diagnosis) -> Comparison:
    """What differs between two starts, and what of it explains the failure of the second. Works on any two."""
    rank = bad.diagnosis.rank if bad.diagnosis else None
    before, after = terms_of(good, bad, rank), terms_of(bad, good, rank)
    missing, words, sums = missing_in(bad, after)
    results = [mark_causes(side_by_side(before, after, signs), missing) for signs in sums]
    terms, explained = next((item for item in results if item[1] in _ENOUGH), results[0])
    if bad.diagnosis is None:
        explained = Explained.NOT_NEEDED
    moved = {term.term: term.change or 0 for term in terms if term.explains}
    if (both := moved.get("activation_and_non_torch")) is not None:
        moved |= {"activation": both, "non_torch": both}
    settings = marked(changed_settings(good, bad), moved)
    environment = marked(changed_environment(good, bad), moved)
    releases = _releases(good, bad, frozenset(moved))
    return Comparison(
        good=_side(good),
        bad=_side(bad),
        explained=explained,
        verdict=verdict(
            explained,
            terms,
            missing=missing,
            words=words,
            changed=(*settings, *environment),
            releases=releases,
            other_memory=bad.diagnosis is not None
            and bad.diagnosis.family in (Family.LOOKALIKE, Family.HOST_MEMORY),
        ),
        missing_bytes=missing,
        missing=words,
        terms=terms,
        settings=settings,
        environment=environment,
        releases=releases,
        notes=_notes(good, bad),
    )


def _releases(
    good: Diagnosis, bad: Diagnosis, moved: frozenset[str]
) -> tuple[ReleaseDifference, ...]:
    one, other = (parse_release(item.environment.vllm_version) for item in (good, bad))
    if one is None or other is None or one == other:
        return ()
    newer = bad if other > one else good
    aliases = moved | ({"pool"} if moved & {"requested"} else frozenset())
    return tuple(
        ReleaseDifference(
            id=change.id,
            since=change.since,
            says=change.says,
            pool=change.pool.value,
            gone=other < one,
            moves=change.terms,
            explains=bool(aliases & set(change.terms)),
        )
        for change in changes_between(one, other, newer.environment.engine)
    )


def _side(diagnosis: Diagnosis) -> Side:
    source, environment, found = diagnosis.source, diagnosis.environment, diagnosis.diagnosis
    title = found.title if found is not None else diagnosis.headline
    return Side(
        name=source.name,
        attempt=source.attempt,
        attempts=source.attempts,
        outcome=diagnosis.outcome,
        vllm_version=environment.vllm_version,
        engine=environment.engine,
        model=environment.model,
        device=environment.device,
        subtype=found.subtype if found else None,
        title=f"{found.family.label}: {title}" if found else title,
    )


def _notes(good: Diagnosis, bad: Diagnosis) -> tuple[str, ...]:
    notes = []
    if good.diagnosis is not None:
        notes.append(f"The first start failed too ({good.diagnosis.subtype}).")
    elif good.outcome is not Outcome.HEALTHY:
        notes.append("The first log does not show that the start went through.")
    models = good.environment.model, bad.environment.model
    if None not in models and models[0] != models[1]:
        notes.append("The two starts load different models.")
    devices = facts_of(good).text("device.name"), facts_of(bad).text("device.name")
    if None not in devices and devices[0] != devices[1]:
        notes.append("The two starts run on different devices.")
    return tuple(notes)
