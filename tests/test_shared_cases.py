"""The goals of the README on the labelled logs beside the checkout; skipped where there are none."""

from __future__ import annotations

import pytest
from conftest import LABELLED
from evaluation.cases import read_cases
from evaluation.predict import by_oomdoc
from evaluation.score import score

from diag.pipeline import diagnose

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not LABELLED.is_dir(), reason="no labelled logs beside the checkout"),
]


@pytest.fixture(scope="module")
def result():
    """Figures and misses over all cases, with what the labels know of release and command."""
    cases = read_cases(LABELLED)
    predict = by_oomdoc(diagnose, context=True)
    return cases, *score(cases, [predict(case) for case in cases])


def off(misses, wrong: str) -> str:
    """The cases to look at."""
    return "\n".join(
        f"{miss.case.id}: {miss.case.label[1]} / {miss.case.gmu}, said {miss.prediction.reading[1]} / "
        f"{miss.prediction.gmu}"
        for miss in misses
        if getattr(miss, wrong)
    )


def test_nothing_crashes(result):
    _, found, misses = result
    assert found.crashes == 0, [miss.prediction.error for miss in misses if miss.prediction.error]


def test_family_of_the_undisputed_cases(result):
    cases, _, misses = result
    undisputed = sum(case.agreed for case in cases)
    wrong = [miss for miss in misses if miss.wrong_family and miss.case.agreed]
    assert 1 - len(wrong) / undisputed >= 0.95, off(wrong, "wrong_family")


def test_macro_f1(result):
    _, found, misses = result
    assert found.macro_f1 >= 0.90, off(misses, "wrong_family")


def test_subtype(result):
    _, found, misses = result
    assert found.subtype.rate >= 0.85, off(misses, "wrong_subtype")


def test_direction(result):
    _, found, misses = result
    assert found.direction.rate >= 0.85, off(misses, "wrong_gmu")
    assert found.wrong_direction == 0, off(misses, "wrong_gmu")


def test_no_false_alarm_on_a_healthy_log(result):
    _, found, misses = result
    assert found.false_alarms == 0, off(misses, "wrong_family")


# What the label leaves out and the log prints too: no reader can be wrong about these.
COARSE = {
    ("logs/033.log", "sleep.freed"),  # the allocator's figure; the worker prints its own beside it
    ("vllmcpu/0.12.0-healthy_dp2.log", "engine.init_s"),  # the label has one of two engines
    ("vllmcpu/0.20.2-healthy_dp2.log", "engine.init_s"),
    ("vllmcpu/0.32.0-healthy_dp2.log", "engine.init_s"),
    ("vllmcpu/0.12.0-offline_second_llm.log", "init_engine_s"),  # of the other of two starts
}


def test_no_fact_is_wrong(result):
    _, found, misses = result
    wrong = [
        f"{miss.case.id}: {check.name}: label {check.expected}, printed {check.got}"
        for miss in misses
        for check in miss.facts
        if check.verdict == "wrong" and (miss.case.id, check.name) not in COARSE
    ]
    assert found.facts["right"] > 1000
    assert wrong == []
