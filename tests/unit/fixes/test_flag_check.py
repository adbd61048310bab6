from __future__ import annotations

import pytest
from packaging.version import Version

from diag.facts.model import Event, Facts
from diag.fixes.command import given
from diag.fixes.flag_check import check_command
from diag.log.model import LogLine
from diag.terms import RowRole


def notes(command, version, engine=None):
    return [(note.flag, note.what) for note in check_command(command, Version(version), engine)]


@pytest.mark.parametrize(
    ("flags", "version", "engine", "found"),
    [
        ("--max-model-len 8192 -tp 2 --enforce-eager", "0.12.0", "V1", []),
        ("--swap_space 8", "0.12.0", "V1", [("--swap_space", "no_effect")]),
        ("--swap-space 8", "0.9.0", None, [("--swap-space", "no_effect")]),  # V1 by itself
        ("--swap-space 8", "0.9.0", "V0", []),
        ("--swap-space=8", "0.20.0", "V1", [("--swap-space", "removed")]),
        ("--cuda-graph-sizes 1 2", "0.20.0", None, [("--cuda-graph-sizes", "renamed")]),
        ("--cuda-graph-sizes 1 2", "0.8.5", None, [("--cuda-graph-sizes", "not_yet")]),
        ("--kv-cache-memory-bytes 1", "0.10.1", None, [("--kv-cache-memory-bytes", "not_yet")]),
        ("--kv-cache-memory-bytes 1", "0.10.2", None, []),
        ("--preemption-mode swap", "0.9.0", None, [("--preemption-mode", "falls_back")]),
        ("--preemption-mode swap", "0.9.0", "V0", [("--preemption-mode", "falls_back")]),
        ("--preemption-mode swap", "0.9.0", "V1", []),  # it did not fall back
        ("--num-scheduler-steps 8", "0.9.0", None, [("--num-scheduler-steps", "falls_back")]),
        ("--num-scheduler-steps 1", "0.9.0", None, []),  # its default
        (
            "--max-num-partial-prefills 2",
            "0.20.0",
            None,
            [("--max-num-partial-prefills", "refused")],
        ),
        ("--use-v2-block-manager", "0.7.3", None, [("--use-v2-block-manager", "no_effect")]),
        ("--use-v2-block-manager", "0.6.0", None, []),
        ("--gpu-memory-utilisation 0.8", "0.9.0", None, [("--gpu-memory-utilisation", "unknown")]),
        ("--gpu-memory-util 0.8", "0.9.0", None, []),  # argparse completes it
        (
            "--no-enable-chunked-prefill",
            "0.7.0",
            None,
            [("--no-enable-chunked-prefill", "not_yet")],
        ),
        ("--no-enable-chunked-prefill", "0.12.0", None, []),
        ("-O3 --compilation-config.cudagraph_mode NONE", "0.20.0", None, []),
        ("--my-plugin-flag 1", "0.20.0", None, []),
    ],
)
def test_flags_of_a_command(flags, version, engine, found):
    assert notes(f"vllm serve org/model {flags}", version, engine) == found


def test_variables_in_front_and_in_docker():
    assert notes("VLLM_USE_V1=0 vllm serve m", "0.12.0") == [("VLLM_USE_V1", "removed")]
    docker = "docker run -e VLLM_ATTENTION_BACKEND=FLASHINFER --gpus all vllm/vllm-openai --model m"
    assert notes(docker, "0.20.0") == [("VLLM_ATTENTION_BACKEND", "renamed")]
    assert notes("CUDA_VISIBLE_DEVICES=0 HF_TOKEN=x vllm serve m", "0.20.0") == []


def test_other_programs_are_left_alone():
    assert notes("nohup other --swap-space 1 && vllm serve m | tee --swap-space x", "0.20.0") == []
    assert notes("echo --swap-space 8", "0.20.0") == []
    assert notes("", "0.20.0") == []


def test_what_took_over_is_named_only_where_it_exists():
    (early,) = check_command("vllm serve m --task embed", Version("0.13.0"))
    assert "--runner" in early.why
    (note,) = check_command("vllm serve m --max-seq-len-to-capture 1", Version("0.11.0"))
    assert (note.what, "--max-cudagraph-capture-size" in note.why) == ("removed", False)
    (note,) = check_command("vllm serve m --max-seq-len-to-capture 1", Version("0.12.0"))
    assert "--max-cudagraph-capture-size" in note.why


def test_without_a_release_nothing_is_said():
    assert check_command("vllm serve m --swap-space 8 --nonsense", None) == ()


def test_each_name_is_noted_once():
    assert len(notes("vllm serve m --swap-space 8 --swap_space=9", "0.20.0")) == 1


def test_arguments_that_the_log_prints_are_checked_for_effects_only():
    line = LogLine(number=1, text="non-default args")
    event = Event(
        row="cfg.non_default_args", role=RowRole.INFO, phase=None, line=line,
        values={"args": "{'model': 'm', 'swap_space': 8, 'model_tag': 'm', 'gpu_mem': 1}"},
    )  # fmt: skip
    facts = Facts(events=(event,))
    assert notes(facts, "0.12.0", "V1") == [("--swap-space", "no_effect")]
    assert notes(Facts(), "0.12.0") == []


def test_a_hostile_command_takes_no_time():
    flags = " ".join(f"--max-model-lon{number}" for number in range(1000))
    assert len(notes(f"vllm serve m {flags}"[:19_000], "0.20.0")) <= 20
    assert notes("vllm serve m " + "-" * 15_000, "0.20.0") == []
    assert notes("vllm serve m --" + "x" * 15_000, "0.20.0") == []
    assert notes("vllm serve m --swap-space 8 " + "x " * 20_000, "0.20.0") == []  # too long to read


def test_names_of_plugins_are_left_alone():
    plugin = "VLLM_ASCEND_ENABLE_NZ=1 vllm serve m --enable-my-plugin-prefix-caching"
    assert notes(plugin, "0.20.0") == []


def test_given_reads_values_as_the_shell_would():
    command = "A=1 vllm serve m --swap-space='8' --sizes 1 2 --eager -tp 2 | tee x --no"
    assert [(item.name, item.value, item.variable) for item in given(command)] == [
        ("A", "1", True),
        ("--swap-space", "8", False),
        ("--sizes", "1", False),
        ("--eager", None, False),
        ("-tp", "2", False),
    ]
