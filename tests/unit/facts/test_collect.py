"""One start attempt -> Facts: each rank keeps its values, the resolved configuration comes first."""

from __future__ import annotations

import pytest
from log_samples import (
    GIB,
    STATS,
    attempts_of,
    core,
    facts_of,
    line,
    planned,
    small_catalogue,
    start,
)

from diag.facts import collect as collecting
from diag.facts.collect import collect, find_events
from diag.log.model import Attempt
from diag.terms import Origin


def test_the_facts_of_a_start():
    facts = facts_of(f"{start()}\n{planned()}\n")
    assert facts.text("vllm.version") == "0.13.0"
    assert facts.text("config.model") == "Qwen/Qwen3-8B"
    assert facts.size("weights.memory") == round(15.2683 * GIB)
    assert facts.size("profile.available_kv_cache") == round(21.77 * GIB)
    assert facts.number("kv.pool_tokens") == 158512
    assert facts.number("kv.max_concurrency") == 4.84
    assert facts.get("kv.pool_tokens").line == 7
    assert facts.get("kv.pool_tokens").origin is Origin.LOGGED


def test_what_is_not_printed_is_unknown_and_not_zero():
    facts = facts_of(start() + "\n")
    assert facts.get("kv.pool_tokens") is None
    assert facts.size("profile.available_kv_cache") is None
    assert facts.flag("startup.complete") is None


def test_a_resolved_configuration_outranks_what_was_asked():
    """What the engine settled on replaces what was asked for."""
    facts = facts_of(
        start(args="{'model': 'Qwen/Qwen3-8B', 'max_model_len': 65536, 'dtype': 'auto'}") + "\n"
    )
    assert facts.number("config.max_model_len") == 32768
    assert [fact.value for fact in facts.all("config.max_model_len")] == [32768]
    assert facts.text("config.dtype") == "bfloat16"


def test_a_setting_that_the_engine_line_does_not_repeat_stays():
    facts = facts_of(start(args="{'gpu_memory_utilization': 0.85, 'max_num_seqs': 64}") + "\n")
    assert facts.number("config.gpu_memory_utilization") == 0.85
    assert facts.number("config.max_num_seqs") == 64


def test_a_launch_command_adds_and_never_overrules():
    command = "vllm serve other/model --max-num-seqs 8 --gpu-memory-utilization 0.5"
    facts = facts_of(start(args="{'gpu_memory_utilization': 0.85}") + "\n", launch=command)
    assert facts.number("config.max_num_seqs") == 8
    assert facts.get("config.max_num_seqs").origin is Origin.ASSUMED
    assert facts.number("config.gpu_memory_utilization") == 0.85
    assert facts.text("config.model") == "Qwen/Qwen3-8B"
    assert facts.text("config.command") == command


def test_a_command_in_the_log_is_found():
    facts = facts_of("$ vllm serve org/m --max-num-seqs 8\n" + core("ValueError: x") + "\n")
    assert facts.text("config.command") == "vllm serve org/m --max-num-seqs 8"
    assert facts.get("config.max_num_seqs").origin is Origin.LOGGED


def test_every_rank_keeps_its_own_value():
    text = "".join(
        f"(Worker_TP{rank} pid={80 + rank}) INFO 12-14 03:05:40 [gpu_worker.py:298] "
        f"Available KV cache memory: {size} GiB\n"
        for rank, size in ((0, "8.50"), (1, "8.25"), (2, "-0.50"))
    )
    facts = facts_of(text)
    name = "profile.available_kv_cache"
    assert [(fact.rank, fact.value / GIB) for fact in facts.all(name)] == [
        (0, 8.5),
        (1, 8.25),
        (2, -0.5),
    ]
    assert facts.size(name, rank=2) == -GIB // 2
    assert facts.size(name) == round(8.5 * GIB)
    assert facts.size(name, rank=7) == round(
        8.5 * GIB
    )  # a rank that said nothing: the first printed
    assert facts.all(name, rank=7) == ()
    assert facts.number("log.ranks") == 3


def test_of_periodic_statistics_the_highest_is_kept():
    text = "\n".join(
        STATS.format(running=running, waiting=waiting, usage=usage)
        for running, waiting, usage in ((4, 0, 6.1), (9, 7, 99.2), (2, 1, 31.8))
    )
    facts = facts_of(text + "\n")
    assert facts.number("serving.kv_usage_max") == 99.2
    assert facts.number("serving.waiting_max") == 7
    assert facts.number("serving.running_max") == 9
    assert len(facts.all("serving.kv_usage_max")) == 1


def test_a_constant_and_a_truth_value():
    known = small_catalogue(
        {"id": "a", "pattern": "V2 runner", "facts": {"vllm.model_runner": "=V2"}},
        {
            "id": "b",
            "pattern": r"eager: (?P<eager>\w+)",
            "facts": {"config.enforce_eager": "eager"},
        },
        facts={"vllm.model_runner": "text", "config.enforce_eager": "bool"},
    )
    facts = facts_of("V2 runner\neager: False\n", known=known)
    assert facts.text("vllm.model_runner") == "V2"
    assert facts.flag("config.enforce_eager") is False


def test_events_and_values_are_bounded(monkeypatch):
    known = small_catalogue(
        {"id": "n", "pattern": r"value (?P<n_count>\d+)", "facts": {"a.b": "n_count"}},
        facts={"a.b": "count"},
    )
    lines = tuple(line(f"value {number}", number) for number in range(1, 200))
    monkeypatch.setattr(collecting, "MAX_VALUES", 50)
    assert len(collect(Attempt(index=1, lines=lines), known=known).all("a.b")) == 50
    monkeypatch.setattr(collecting, "MAX_EVENTS", 20)
    assert len(find_events(lines, known)) == 20


@pytest.mark.parametrize("earlier", [True, False])
def test_the_course_is_told_of_an_earlier_engine(earlier):
    (attempt,) = attempts_of(start() + "\n")
    assert collect(attempt, earlier_engine=earlier).flag("attempt.earlier_engine") is earlier


def test_an_attempt_without_lines_has_no_facts_but_its_course():
    facts = collect(Attempt(index=1, lines=()))
    assert facts.events == facts.problems == ()
    assert {fact.name.split(".")[0] for fact in facts} <= {"attempt"}
