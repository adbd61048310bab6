#!/usr/bin/env python3
"""Score oomdoc on a folder of labelled logs, beside two baselines.

    python scripts/evaluate.py FOLDER [--json OUT] [--failures] [--verbose] [--check]

FOLDER holds labelled cases (layouts: `scripts/evaluation/cases.py`) or subfolders that do. Cases whose label knows
the vLLM release or the launch command are run twice, with the log alone and with that context; the headline is the
run with context. Exit code 0, with --check 1 when a goal of the README is missed, 2 without cases.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.cases import Case, read_cases
from evaluation.predict import (
    Diagnose,
    Prediction,
    Predictor,
    by_always_lower,
    by_oomdoc,
    by_pattern_table,
)
from evaluation.score import Miss, Score, score
from evaluation.table import details, fact_misses, failures, summary

HEADLINE = "oomdoc"
LOG_ONLY = "oomdoc, log only"
EVERYTHING = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure of the headline run over all cases, and what it must reach."""

    name: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float | None) -> bool:
        """Whether `value` reaches the goal; a figure that was not measured fails nothing."""
        if value is None:
            return True
        if self.at_least is not None and value < self.at_least:
            return False
        return self.at_most is None or value <= self.at_most


GOALS = (
    Goal(name="family", at_least=0.95),
    Goal(name="subtype", at_least=0.85),
    Goal(name="macro_f1", at_least=0.90),
    Goal(name="direction", at_least=0.85),
    Goal(name="wrong_direction", at_most=0),
    Goal(name="false_alarms", at_most=0),
    Goal(name="crashes", at_most=0),
    Goal(name="facts_wrong_rate", at_most=0.01),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One predictor on one group."""

    score: Score
    misses: Sequence[Miss]


def evaluate(cases: Sequence[Case], diagnose: Diagnose) -> dict[str, dict[str, Run]]:
    """Group -> run name -> figures. The group `all` holds every case."""
    predictors: dict[str, Predictor] = {
        HEADLINE: by_oomdoc(diagnose, context=True),
        LOG_ONLY: by_oomdoc(diagnose, context=False),
        "pattern table": by_pattern_table,
        "always lower": by_always_lower,
    }
    answers: dict[str, list[Prediction]] = {name: [] for name in predictors}
    for number, case in enumerate(cases, start=1):
        if sys.stderr.isatty():
            print(f"\r{number}/{len(cases)} {case.id[:50]:50}", end="", file=sys.stderr)
        for name, predict in predictors.items():
            has_context = case.vllm_version or case.launch
            same_as_headline = name == LOG_ONLY and not has_context
            answers[name].append(answers[HEADLINE][-1] if same_as_headline else predict(case))
    if sys.stderr.isatty():
        print("\r" + " " * 70 + "\r", end="", file=sys.stderr)

    groups = dict.fromkeys(case.group for case in cases)
    found: dict[str, dict[str, Run]] = {}
    for group in [*groups, EVERYTHING] if len(groups) > 1 else [EVERYTHING]:
        chosen = [i for i, case in enumerate(cases) if group in {case.group, EVERYTHING}]
        found[group] = {
            name: Run(*score([cases[i] for i in chosen], [given[i] for i in chosen]))
            for name, given in answers.items()
        }
    return found


def goal_value(found: Score, name: str) -> float | None:
    """The figure a goal speaks of. None: nothing to measure it with."""
    if name in {"family", "subtype", "direction"}:
        rate: float | None = getattr(found, name).rate
        return rate
    if name == "facts_wrong_rate":
        total = sum(found.facts.values())
        return found.facts["wrong"] / total if total else None
    value: float | None = getattr(found, name)
    return value


def check_goals(found: Score) -> list[dict[str, Any]]:
    """Every goal with its value and whether it is met."""
    rows = []
    for goal in GOALS:
        value = goal_value(found, goal.name)
        rows.append(
            {
                "name": goal.name,
                "at_least": goal.at_least,
                "at_most": goal.at_most,
                "value": None if value is None else round(value, 4),
                "met": goal.met(value),
            }
        )
    return rows


def as_json(found: dict[str, dict[str, Run]]) -> dict[str, Any]:
    """All figures, for `scripts/update_readme.py`."""
    from diag import __version__

    return {
        "oomdoc_version": __version__,
        "groups": {
            group: {name: run.score.to_dict() for name, run in runs.items()}
            for group, runs in found.items()
        },
        "goals": check_goals(found[EVERYTHING][HEADLINE].score),
    }


def print_report(
    found: dict[str, dict[str, Run]], *, show_failures: bool, show_facts: bool
) -> None:
    """The text report on stdout."""
    for group, runs in found.items():
        print(f"\n== {group} ==")
        print(summary({name: run.score for name, run in runs.items()}))
        if group == EVERYTHING and len(found) > 1:
            continue
        headline = runs[HEADLINE]
        print(*details(HEADLINE, headline.score), sep="\n")
        if show_failures:
            print(*failures(HEADLINE, headline.misses), sep="\n")
        if show_facts:
            print(*fact_misses(HEADLINE, headline.misses), sep="\n")
    print("\ngoals")
    for row in check_goals(found[EVERYTHING][HEADLINE].score):
        bound = f">= {row['at_least']}" if row["at_least"] is not None else f"<= {row['at_most']}"
        print(f"  {'met   ' if row['met'] else 'MISSED'} {row['name']:20} {row['value']} ({bound})")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--failures", action="store_true", help="list the cases that are off")
    parser.add_argument("--verbose", action="store_true", help="list wrong and missing facts")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    options = parser.parse_args(argv)
    try:
        cases = read_cases(options.folder)
    except OSError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2

    from diag.pipeline import diagnose

    found = evaluate(cases, diagnose)
    print_report(found, show_failures=options.failures, show_facts=options.verbose)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")
    missed = not all(row["met"] for row in check_goals(found[EVERYTHING][HEADLINE].score))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
