"""Cases and predictions -> figures. Nothing is printed here.

"Right" means: the answer is among the readings the label accepts. The macro-F1 and the confusion table use the
undisputed cases only and give an accepted answer the label's own name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from evaluation.cases import HEALTHY, Case
from evaluation.facts import FactCheck, check_facts
from evaluation.predict import Prediction

NO_WORD = "none"
DIRECTIONS = frozenset({"raise", "lower"})


@dataclass(slots=True, kw_only=True)
class Share:
    """`right` of `total`."""

    right: int = 0
    total: int = 0

    def add(self, right: bool) -> None:  # noqa: FBT001  there is nothing else to pass
        """One more."""
        self.right += right
        self.total += 1

    @property
    def rate(self) -> float | None:
        """0..1; None when nothing was counted."""
        return self.right / self.total if self.total else None


@dataclass(slots=True, kw_only=True)
class Score:
    """All figures of one predictor on one group of cases."""

    cases: int = 0
    crashes: int = 0
    seconds: float = 0.0
    family: Share = field(default_factory=Share)
    subtype: Share = field(default_factory=Share)
    macro_f1: float | None = None
    by_family: dict[str, Share] = field(default_factory=dict)
    by_subtype: dict[str, Share] = field(default_factory=dict)
    confusion: dict[str, dict[str, int]] = field(default_factory=dict)
    healthy: int = 0
    called_healthy: int = 0
    false_alarms: int = 0
    missed_failures: int = 0
    direction: Share = field(default_factory=Share)
    wrong_direction: int = 0
    needless_direction: int = 0
    directions: dict[str, dict[str, int]] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; a share as right, total and rate."""
        return {name: _plain(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A case to look at, with everything that is off about it."""

    case: Case
    prediction: Prediction
    wrong_family: bool
    wrong_subtype: bool
    wrong_gmu: bool
    facts: tuple[FactCheck, ...]


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"right", "total"}:
        rate = round(value["right"] / value["total"], 4) if value["total"] else None
        return {**value, "rate": rate}
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def score(cases: Sequence[Case], predictions: Sequence[Prediction]) -> tuple[Score, list[Miss]]:
    """The figures, and the cases where something is off."""
    result = Score(cases=len(cases))
    misses = []
    facts: Counter[str] = Counter()
    undisputed = []
    for case, prediction in zip(cases, predictions, strict=True):
        family_right = prediction.reading[0] in case.families
        subtype_right = case.accepts(prediction.reading)
        result.crashes += prediction.error is not None
        result.seconds += prediction.seconds
        result.family.add(family_right)
        result.subtype.add(subtype_right)
        result.by_family.setdefault(case.label[0], Share()).add(family_right)
        result.by_subtype.setdefault(case.label[1], Share()).add(subtype_right)
        _count_health(result, case, prediction)
        gmu_right = _count_direction(result, case, prediction)
        checks = _facts_of_the_start(case, prediction)
        facts.update(check.verdict for check in checks)
        if case.agreed:
            undisputed.append(
                (case.label[0], case.label[0] if family_right else prediction.reading[0])
            )
        bad_facts = tuple(check for check in checks if check.verdict != "right")
        if not (family_right and subtype_right and gmu_right) or bad_facts:
            misses.append(
                Miss(
                    case=case,
                    prediction=prediction,
                    wrong_family=not family_right,
                    wrong_subtype=not subtype_right,
                    wrong_gmu=not gmu_right,
                    facts=bad_facts,
                )
            )
    result.macro_f1 = macro_f1(undisputed)
    result.confusion = _table(undisputed)
    result.facts = {verdict: facts[verdict] for verdict in ("right", "wrong", "missing")}
    return result, misses


def _facts_of_the_start(case: Case, prediction: Prediction) -> list[FactCheck]:
    """The fact verdicts; of several labelled starts the one that was explained, which is the one that fits best."""
    if prediction.error is not None:
        return []
    each = [check_facts(labelled, prediction.facts) for labelled in case.facts]
    return min(each, key=lambda checks: sum(c.verdict != "right" for c in checks), default=[])


def _count_health(result: Score, case: Case, prediction: Prediction) -> None:
    if case.healthy:
        result.healthy += 1
        result.called_healthy += prediction.outcome == HEALTHY
        result.false_alarms += prediction.claims_failure
    else:
        result.missed_failures += prediction.outcome == HEALTHY


def _count_direction(result: Score, case: Case, prediction: Prediction) -> bool:
    """Whether the verdict on gpu_memory_utilization is right; True for a case without a labelled one."""
    if case.gmu is None:
        return True
    said = prediction.gmu or NO_WORD
    if case.gmu == "not_relevant":
        right = said in {"leave", "cannot_help", NO_WORD}
    else:
        right = said == case.gmu
    result.direction.add(right)
    result.wrong_direction += {said, case.gmu} == DIRECTIONS
    result.needless_direction += case.gmu == "cannot_help" and said in DIRECTIONS
    row = result.directions.setdefault(case.gmu, {})
    row[said] = row.get(said, 0) + 1
    return right


def macro_f1(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Mean F1 over the classes that occur as truth. None without pairs.

    >>> macro_f1([("a", "a"), ("a", "b"), ("b", "b")])
    0.6666666666666666
    """
    hits = Counter(truth for truth, said in pairs if truth == said)
    truths = Counter(truth for truth, _ in pairs)
    said = Counter(said for _, said in pairs)
    if not truths:
        return None
    return sum(2 * hits[name] / (truths[name] + said[name]) for name in truths) / len(truths)


def _table(pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for (truth, said), count in sorted(Counter(pairs).items()):
        table.setdefault(truth, {})[said] = count
    return table
