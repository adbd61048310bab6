"""The scoring tool: labels of three layouts, figures checked by hand."""

from __future__ import annotations

import json

import evaluate
import pytest
from evaluation.cases import clean_launch, clean_version, read_cases
from evaluation.facts import NAMES, check_facts, same
from evaluation.predict import by_always_lower, by_oomdoc, by_pattern_table
from evaluation.score import macro_f1, score

from diag.report.model import Diagnosis, Environment, FactOut, Finding, GmuAdvice, SourceInfo
from diag.terms import Family, GmuVerdict, Origin, Outcome
from diag.units import GIB


def answer(outcome, family=None, subtype=None, gmu=None, facts=()):
    finding = None
    if family:
        finding = Finding(
            family=Family(family), subtype=subtype, phase=None, rank=None, confidence=0.9,
            title=subtype, summary="", line=1,
        )  # fmt: skip
    advice = None
    if gmu:
        advice = GmuAdvice(
            verdict=GmuVerdict(gmu), current=0.9, lower_bound=None, upper_bound=None,
            suggested=None, why="",
        )  # fmt: skip
    return Diagnosis(
        source=SourceInfo(name="log", lines=1, bytes=1),
        environment=Environment(),
        outcome=Outcome(outcome),
        diagnosis=finding,
        headline="",
        facts=tuple(facts),
        gmu=advice,
    )


def fact(name, value, rank=None, line=1, origin=Origin.LOGGED):
    return FactOut(name=name, value=value, unit="x", rank=rank, line=line, origin=origin)


def thread(number, log, family, subtype, gmu, **more):
    return {
        "id": f"t-{number}", "log": log, "label": {"family": family, "subtype": subtype},
        "acceptable": [[family, subtype]], "agreed": True, "gmu_verdict": gmu,
        "vllm_version": None, "launch": None, **more,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Four threads, two whole logs and two harness runs."""
    threads = tmp_path / "threads"
    threads.mkdir()
    bodies = [
        thread(1, "A", "kv_reservation", "kv.no_blocks", "raise", vllm_version="0.11.0"),
        thread(2, "B", "weights", "weights.too_big", "cannot_help"),
        thread(
            3, "C", "lookalike", "look.other", "not_relevant",
            acceptable=[["lookalike", "look.other"], ["tp_buffer", "tp.other"]], agreed=False,
        ),
        thread(4, "D", "activation_spike", "act.prefill", "lower"),
    ]  # fmt: skip
    for body in bodies:
        (threads / f"{body['id']}.json").write_text(json.dumps(body))
    logs = tmp_path / "logs"
    logs.mkdir()
    rows = [
        {
            "file": "1.log", "outcome": "healthy", "family": None, "subtype": None,
            "label_confidence": "high", "facts": {"weights_gib": 14.9595, "startup_complete": True},
        },
        {
            "file": "2.log", "outcome": "failure", "family": "kv_reservation",
            "subtype": "kv.free_below_target", "also_acceptable": ["base.other_process"],
            "label_confidence": "medium", "facts": {},
        },
    ]  # fmt: skip
    (logs / "index.jsonl").write_text("\n".join(map(json.dumps, rows)))
    runs = tmp_path / "runs"
    runs.mkdir()
    rows = [
        {
            "file": "1.log", "command": "vllm serve", "family": "none", "subtype": "healthy",
            "facts": {},
        },
        {
            "file": "2.log", "command": "vllm serve", "family": "none",
            "subtype": "nonmem.invalid_flag", "facts": {},
        },
        {
            "file": "3.log", "command": "vllm serve", "family": "kv_reservation",
            "subtype": "kv.no_blocks", "alt_subtype": "kv.alloc_oom (worded otherwise)",
            "facts": {},
        },
    ]  # fmt: skip
    (runs / "index.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for place in (logs, runs):
        for number in (1, 2, 3):
            (place / f"{number}.log").write_text("text")
    return tmp_path


def test_the_parent_folder_gives_the_cases_of_all_layouts(folder):
    cases = {case.id: case for case in read_cases(folder)}
    assert len(cases) == 9
    assert cases["logs/1.log"].healthy
    assert cases["logs/2.log"].accepts(("device_baseline", "base.other_process"))
    assert not cases["logs/2.log"].agreed
    assert cases["runs/1.log"].healthy
    assert cases["runs/2.log"].accepts(("lookalike", "look.triton_smem"))
    assert cases["runs/3.log"].accepts(("kv_reservation", "kv.alloc_oom"))
    assert not cases["runs/3.log"].accepts(("kv_reservation", "kv.preemption"))


def test_a_folder_without_cases_is_an_error(tmp_path, capsys):
    assert evaluate.main([str(tmp_path)]) == 2
    assert "no labelled cases" in capsys.readouterr().err


ANSWERS = {
    "A\n": answer("memory_failure", "kv_reservation", "kv.no_blocks", "lower"),  # the wrong way
    "B\n": answer("memory_failure", "weights", "weights.load_peak", "raise"),  # needless
    "C\n": answer("memory_failure", "tp_buffer", "tp.other"),  # no word on gmu: fine
    "D\n": answer("memory_failure", "kv_reservation", "kv.alloc_oom", "lower"),  # wrong class
}


def test_figures_of_threads_by_hand(folder):
    cases = read_cases(folder / "threads")
    predictions = [by_oomdoc(lambda log, **_: ANSWERS[log], context=True)(case) for case in cases]
    found, misses = score(cases, predictions)
    assert (found.family.right, found.family.total) == (3, 4)
    assert (found.subtype.right, found.subtype.total) == (2, 4)
    assert (found.direction.right, found.direction.total) == (2, 4)
    assert found.wrong_direction == 1
    assert found.needless_direction == 1
    # Undisputed: kv -> kv, weights -> weights, act -> kv. F1: kv 2/3, weights 1, act 0.
    assert found.macro_f1 == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found.confusion == {
        "activation_spike": {"kv_reservation": 1},
        "kv_reservation": {"kv_reservation": 1},
        "weights": {"weights": 1},
    }
    assert [miss.case.id for miss in misses] == ["t-1", "t-2", "t-4"]


def test_a_claim_about_a_healthy_log_is_a_false_alarm_and_unknown_is_not(folder):
    cases = [case for case in read_cases(folder) if case.healthy]
    answers = iter([ANSWERS["A\n"], answer("unknown")])
    predictions = [by_oomdoc(lambda *_, **__: next(answers), context=False)(c) for c in cases]
    found, _ = score(cases, predictions)
    assert (found.healthy, found.called_healthy, found.false_alarms) == (2, 0, 1)


def test_a_crash_is_counted_and_the_run_goes_on(folder):
    def broken(log, **_):
        raise RuntimeError("bug")

    cases = read_cases(folder / "threads")
    found, misses = score(cases, [by_oomdoc(broken, context=True)(case) for case in cases])
    assert found.crashes == 4
    assert "RuntimeError: bug" in misses[0].prediction.error


def test_context_is_given_only_in_the_run_with_context(folder):
    seen = []

    def diagnose(log, *, vllm_version=None, launch=None):
        seen.append(vllm_version)
        return ANSWERS["A\n"]

    runs = evaluate.evaluate(read_cases(folder / "threads")[:1], diagnose)
    assert seen == ["0.11.0", None]
    assert set(runs) == {evaluate.EVERYTHING}
    goals = {row["name"]: row for row in evaluate.check_goals(runs["all"]["oomdoc"].score)}
    assert not goals["wrong_direction"]["met"]
    assert goals["facts_wrong_rate"]["value"] is None
    assert goals["facts_wrong_rate"]["met"]


@pytest.mark.parametrize(
    ("log", "subtype", "gmu"),
    [
        ("ValueError: No available memory for the cache blocks.", "kv.no_blocks", "raise"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "act.prefill", "lower"),
        ("INFO:     Application startup complete.", "healthy", None),
    ],
)
def test_baselines(folder, log, subtype, gmu):
    case = read_cases(folder / "threads")[0]
    given = by_pattern_table(type(case)(id="x", group="x", log=log, label=case.label,
                                        acceptable=case.acceptable))  # fmt: skip
    assert (given.reading[1], given.gmu) == (subtype, gmu)
    assert by_always_lower(case).gmu == "lower"


@pytest.mark.parametrize(
    ("name", "expected", "got", "right"),
    [
        ("weights_gib", 14.9595, round(14.9595 * GIB), True),
        ("weights_gib", 14.96, round(14.9595 * GIB), True),  # printed with two decimals
        ("weights_gib", 14.9, round(14.9595 * GIB), False),
        ("swap_space_gib", 4, 4 * GIB, True),
        ("swap_space_gib", 4, round(4.3 * GIB), False),
        ("kv_tokens", 127664, 127664, True),
        ("kv_tokens", 127664, 127663, False),
        ("gmu", 0.9, 0.9, True),
        ("gmu", 0.9, 0.92, False),
        ("dtype", "bfloat16", "torch.bfloat16", True),
        ("dtype", "float16", "half", True),
        ("dtype", "float16", "auto", False),
        ("quantization", None, "None", True),
        ("enforce_eager", False, False, True),
        ("tp", 2, "two", False),
    ],
)
def test_values_are_compared_at_the_printed_precision(name, expected, got, right):
    assert same(name, expected, got) is right


def verdicts(labelled, printed):
    return [(check.name, check.verdict) for check in check_facts(labelled, printed)]


def test_facts_right_wrong_missing():
    labelled = {"weights_gib": 14.96, "kv_tokens": 100, "max_num_seqs": 256, "note": "no fact"}
    printed = [fact("weights.memory", round(14.96 * GIB)), fact("kv.pool_tokens", 90)]
    assert verdicts(labelled, printed) == [
        ("weights_gib", "right"),
        ("kv_tokens", "wrong"),
        ("max_num_seqs", "missing"),
    ]


def test_a_second_value_is_wrong_for_a_scalar_and_fine_for_ranks():
    printed = [fact("kv.pool_tokens", 100, rank=0), fact("kv.pool_tokens", 90, rank=1)]
    assert verdicts({"kv_tokens": 100}, printed) == [
        ("kv_tokens", "right"),
        ("kv.pool_tokens", "wrong"),
    ]
    assert verdicts({"kv_tokens": {"per_rank": {"0": 100}}}, printed) == [("kv_tokens", "right")]
    assert verdicts({"kv_tokens": {"in_order": [100, 80]}}, printed) == [("kv_tokens", "wrong")]


def test_a_size_printed_twice_with_fewer_decimals_is_no_second_value():
    printed = [
        fact("weights.memory", round(56.9342 * GIB)),
        fact("weights.memory", round(56.93 * GIB), line=9),
    ]
    assert verdicts({"weights_gib": 56.9342}, printed) == [("weights_gib", "right")]


def test_of_several_labelled_starts_the_explained_one_counts(folder):
    rows = [
        {
            "file": "1.log", "outcome": "failure", "family": "weights", "subtype": "weights.too_big",
            "label_confidence": "high", "facts": {"max_model_len": 100},
            "facts_per_run": [{"max_model_len": 100}, {"max_model_len": 200}],
        }
    ]  # fmt: skip
    (folder / "logs" / "index.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cases = read_cases(folder / "logs")
    given = answer("memory_failure", facts=[fact("config.max_model_len", 200)])
    found, _ = score(cases, [by_oomdoc(lambda *_, **__: given, context=True)(cases[0])])
    assert found.facts == {"right": 1, "wrong": 0, "missing": 0}


def test_assumed_and_derived_values_are_no_claim_about_the_log():
    printed = [fact("config.max_num_seqs", 1024, origin=Origin.ASSUMED)]
    assert verdicts({"max_num_seqs": 256}, printed) == [("max_num_seqs", "missing")]


def test_start_up_not_complete_is_right_when_nothing_says_otherwise():
    assert verdicts({"startup_complete": False}, []) == [("startup_complete", "right")]
    printed = [fact("startup.complete", value=True)]
    assert verdicts({"startup_complete": False}, printed) == [("startup_complete", "wrong")]
    assert verdicts({"startup_complete": True}, []) == [("startup_complete", "missing")]


def test_other_processes_may_be_listed_or_summed():
    labelled = {"oom_other_processes_gib": {"11": 1.0, "12": 2.5}}
    assert verdicts(labelled, [fact("oom.other_processes", round(3.5 * GIB))])[0][1] == "right"
    both = [fact("oom.other_processes", GIB), fact("oom.other_processes", round(2.5 * GIB))]
    assert verdicts(labelled, both)[0][1] == "right"


def test_the_fact_names_exist():
    from diag.facts.catalogue import read_yaml
    from diag.resources import data_dir

    known = set(read_yaml(data_dir("rules") / "facts.yaml")["facts"])
    assert {name for names in NAMES.values() for name in names} <= known


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.11.0", "0.11.0"),
        ("0.6.x", "0.6.x"),
        ("0.20.1 (torch 2.11.0+cu130)", "0.20.1"),
        ("0.2x fork (sm89)", None),
        ("0.1-0.2", None),
        ("main (2025-09)", None),
        (None, None),
    ],
)
def test_the_release_in_a_labels_prose(text, version):
    assert clean_version(text) == version


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("vllm serve org/model -tp 2", True),
        ("CUDA_VISIBLE_DEVICES=0,1 vllm serve org/model --max-model-len 9", True),
        ("LLM(model='org/model', max_model_len=2048)", True),
        ("docker run --gpus all vllm/vllm-openai:latest --model org/model", True),
        ("vllm serve with a speculative model (V0)", False),
        ("server, n > 1; --swap-space 0 tried", False),
        ("DeepSeek-R1, tensor parallel 8", False),
    ],
)
def test_prose_is_not_taken_for_a_command(text, kept):
    assert clean_launch(text) == (text if kept else None)


def test_macro_f1_of_nothing_is_unknown():
    assert macro_f1([]) is None
