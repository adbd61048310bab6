from __future__ import annotations

from dataclasses import replace

import pytest
from report_samples import SAMPLES, gib

from diag.memory.model import RankLedger
from diag.report import words
from diag.report.model import Change, FactOut, GmuAdvice, SourceInfo
from diag.terms import GmuVerdict, Origin


def source(attempts: int, attempt: int, failed: int, same: int) -> SourceInfo:
    return SourceInfo(
        name="x",
        lines=1,
        bytes=1,
        attempts=attempts,
        attempt=attempt,
        attempts_failed=failed,
        attempts_same_failure=same,
    )


@pytest.mark.parametrize(
    ("info", "failed", "text"),
    [
        pytest.param(source(1, 1, 1, 1), True, None, id="only-one"),
        pytest.param(
            source(5, 5, 5, 5),
            True,
            "Attempt 5 of 5 (4 earlier ones failed the same way)",
            id="all-the-same",
        ),
        pytest.param(
            source(2, 2, 2, 2),
            True,
            "Attempt 2 of 2 (1 earlier one failed the same way)",
            id="one-earlier",
        ),
        pytest.param(
            source(4, 4, 3, 2),
            True,
            "Attempt 4 of 4 (2 earlier ones failed, 1 the same way)",
            id="mixed",
        ),
        pytest.param(
            source(3, 1, 3, 3),
            True,
            "Attempt 1 of 3 (2 others failed the same way)",
            id="first-of-three",
        ),
        pytest.param(
            source(3, 3, 2, 0),
            False,
            "Attempt 3 of 3 (2 earlier ones failed)",
            id="healthy-at-last",
        ),
        pytest.param(source(3, 3, 1, 1), True, "Attempt 3 of 3", id="others-fine"),
    ],
)
def test_attempts(info, failed, text):
    assert words.attempts(info, failed=failed) == text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change(flag="--max-model-len", to=24976), "--max-model-len 24976"),
        (Change(flag="--enforce-eager", to=True), "--enforce-eager"),
        (Change(flag="--max-logprobs", to=None), "without --max-logprobs"),
        (Change(env="PYTORCH_ALLOC_CONF", to="x:1"), "PYTORCH_ALLOC_CONF=x:1"),
        (Change(env="NCCL_DEBUG", to=None), "unset NCCL_DEBUG"),
        (Change(action="stop the other process"), "stop the other process"),
    ],
)
def test_change(change, text):
    assert words.change(change) == text


def advice(verdict: GmuVerdict, **numbers: float) -> GmuAdvice:
    ends = dict.fromkeys(("current", "lower_bound", "upper_bound", "suggested"), None)
    return GmuAdvice(verdict=verdict, why="", **{**ends, **numbers})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            advice(
                GmuVerdict.RAISE, current=0.9, suggested=0.95, lower_bound=0.95, upper_bound=0.97
            ),
            "raise it from 0.90 to 0.95 (window 0.95-0.97)",
        ),
        (
            advice(GmuVerdict.LOWER, current=0.95, upper_bound=0.8),
            "lower it from 0.95 (at most 0.80)",
        ),
        (advice(GmuVerdict.LEAVE, current=0.9), "leave it at 0.90"),
        (
            advice(GmuVerdict.CANNOT_HELP, current=0.9, lower_bound=1.2),
            "no value of it alone helps here",
        ),
        (
            advice(GmuVerdict.NOT_ENOUGH_FACTS),
            "the log has too few numbers to say which way",
        ),
    ],
)
def test_gmu(given, text):
    assert words.gmu(given) == text


def test_environment_names_what_is_unknown_or_assumed():
    assert words.environment(SAMPLES["unknown"]()) == ""
    assert "vLLM 0.22.1 (V1, assumed)" in words.environment(SAMPLES["free_below_target"]())
    log = SAMPLES["kv_max_len"]()
    nameless = replace(log, environment=replace(log.environment, vllm_version=None))
    assert words.environment(nameless).startswith("vLLM (release not in the log), Qwen3-32B")


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("Qwen/Qwen3-32B", "Qwen3-32B"),
        ("/models/llama-3-8b/", "llama-3-8b"),
        ("/data/4c1f24cc10a2a1894304c7ab52edd9710c047571", "4c1f24cc10a\u2026"),
        ("/root/.cache/huggingface/hub/models--org--phi-4/snapshots/73068f37/", "phi-4"),
    ],
)
def test_model_is_named_short(model, shown):
    log = SAMPLES["kv_max_len"]()
    log = replace(log, environment=replace(log.environment, model=model))
    assert f", {shown}, " in words.environment(log)


def test_title_runs_on_after_the_colon():
    finding = SAMPLES["kv_max_len"]().diagnosis
    titles = {
        "A kernel needs more": "a kernel needs more",
        "Nothing is left": "nothing is left",
        "NVML does not work": "NVML does not work",
        "PyTorch's allocator": "PyTorch's allocator",
        "Ray killed a worker": "Ray killed a worker",
    }
    for given, shown in titles.items():
        assert words.title(replace(finding, title=given)) == f"KV reservation: {shown}"


def test_ranks_that_are_alike_share_one_picture():
    groups = words.rank_groups(SAMPLES["eight_ranks"]())
    assert [group.ranks for group in groups] == [(0,), tuple(range(1, 8))]
    assert words.ranks((0, 1, 2, 5)) == "ranks 0-2, 5"
    assert words.ranks((None,)) == ""


def test_the_failed_rank_comes_first():
    assert [group.ranks for group in words.rank_groups(SAMPLES["runtime_oom"]())] == [(1,), (0,)]


def test_what_no_term_explains_is_a_term_unless_it_is_nothing():
    healthy = SAMPLES["healthy"]().ledger.ranks[0]
    assert words.ledger_rows(healthy)[-1].bytes == gib(9.03)
    assert all(
        row.term != "unexplained"
        for row in words.ledger_rows(SAMPLES["kv_max_len"]().ledger.ranks[0])
    )


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (gib(6.1), "bytes", "6.10 GiB"),
        (40_960, "tokens", "40,960 tokens"),
        (0.9, "ratio", "0.9"),
        (True, "bool", "yes"),
        (87.5, "pct", "87.5 %"),
        (float("inf"), "bytes", "inf"),
    ],
)
def test_fact_value(value, unit, text):
    fact = FactOut(name="x", value=value, unit=unit, rank=None, line=None, origin=Origin.ASSUMED)
    assert words.fact_value(fact) == text
    assert words.fact_source(fact) == "assumed"


def test_a_picture_of_nothing_but_the_unexplained_is_not_drawn():
    empty = RankLedger(
        rank=None,
        device="host RAM",
        total_bytes=gib(13.15),
        entries=(),
        unexplained_bytes=gib(13.15),
    )
    assert words.ledger_rows(empty) == ()
