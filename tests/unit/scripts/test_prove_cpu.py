"""The proof on the real vLLM: its pure parts only; no server is started."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import prove_cpu
import pytest
from proving.cases import GIB, MIB, MODELS, Host, all_cases, read_host
from proving.install import split_requirements
from proving.remedy import apply, first_attempt
from proving.server import split_command
from proving.tiny_model import Shape, write_model
from proving.trial import Run, Trial

from diag.fixes.model import Change, Fix

HOST = Host(total=8 * GIB, available=7 * GIB)
CASES = {case.name: case for case in all_cases(HOST)}


ACTION = (Change(action="do it"),)


def fix(name="some_fix", command=None, changes=ACTION):
    return Fix(id=name, title="Do it", changes=changes, fits=None, proof="", command=command)


def test_model_is_what_its_header_says(tmp_path):
    shape = Shape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, inner=16, vocabulary=300)
    write_model(tmp_path, shape)
    body = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", body[:8])
    header = json.loads(body[8 : 8 + length])
    ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
    assert max(ends) == len(body) - 8 - length == shape.weight_bytes
    words = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert sorted(words.values()) == list(range(3 + 256))


def test_kv_bytes_of_the_tiny_model():
    # 2 x 4 layers x 8 heads x 128 x 2 bytes; 131,072 tokens are 2 GiB
    assert MODELS["tiny"].kv_bytes_per_token == 16 * 1024


def test_light_model_has_about_a_quarter_of_the_bytes():
    assert MODELS["light"].weight_bytes / MODELS["heavy"].weight_bytes == pytest.approx(
        0.25, abs=0.05
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_command_can_be_split_again(case):
    variables, words = split_command(case.command(8000))
    assert variables == dict(case.environment)
    assert words[0] in ("vllm", "python")


def test_busy_host_leaves_less_than_the_share_asks_for():
    held = CASES["busy-host"].limits.held
    assert HOST.available - held < 0.6 * HOST.total
    assert HOST.available > 0.6 * HOST.total


def test_variables_taken_away():
    assert split_command("env -u A B=2 vllm serve m") == (
        {"A": None, "B": "2"},
        ["vllm", "serve", "m"],
    )


def test_changed_command_is_run_as_it_is():
    failed = first_attempt(CASES["zero-env"], 8000)
    command = "VLLM_CPU_KVCACHE_SPACE=4 vllm serve models/tiny"
    assert apply(fix(command=command), failed) == replace(
        failed, command=command, how="oomdoc's changed command"
    )


@pytest.mark.parametrize(
    ("case", "name", "field", "value"),
    [
        ("busy-host", "free_card", "held", None),
        ("weights-killed", "more_host_memory", "resident", MODELS["heavy"].weight_bytes + 10 * GIB),
        (
            "buffers-ulimit",
            "more_host_memory",
            "address_space",
            MODELS["heavy"].weight_bytes + 10 * GIB,
        ),
        ("small-shm", "shm_docker", "shared_memory", 16 * GIB),
    ],
)
def test_action_on_what_the_run_set_up(case, name, field, value):
    after = apply(fix(name), first_attempt(CASES[case], 8000))
    assert getattr(after.limits, field) == value
    assert after.how


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("above-ram-env", "free_card"),
        ("length-env", "more_host_memory"),
        ("zero-env", "unheard_of"),
    ],
)
def test_action_on_anything_else_is_not_made_up(case, name):
    assert apply(fix(name), first_attempt(CASES[case], 8000)) is None


def test_first_memory_node_is_read(tmp_path):
    node = tmp_path / "meminfo"
    node.write_text(
        "Node 0 MemTotal: 8388608 kB\nNode 0 MemFree: 1048576 kB\nNode 0 Active(file): 1024 kB\n"
        "Node 0 Inactive(file): 1024 kB\nNode 0 SReclaimable: 2048 kB\n",
        encoding="utf-8",
    )
    assert read_host(node) == Host(total=8 * GIB, available=GIB + 4 * MIB)


def test_requirements_without_cpu_wheels_are_left_out():
    lines = [
        "torch==2.13.0+cpu",
        "torchvision",
        "xgrammar>=0.1; python_version > '3'",
        "x; extra == 'y'",
    ]
    assert split_requirements(lines) == (["torch==2.13.0+cpu"], ["xgrammar>=0.1"])


def trial(tmp_path, *, works):
    failed = Run(command="vllm serve m", how="", log=tmp_path / "1", ready=False, answered=None,
                 exit_code=1, seconds=9.0)  # fmt: skip
    second = replace(failed, command="vllm serve m --max-model-len 64", ready=works,
                     answered=works or None, exit_code=None)  # fmt: skip
    change = Change(flag="--max-model-len", from_=128, to=64)
    return Trial(
        case="length", what="too long", failed=failed, error="ValueError: no", outcome="memory_failure",
        subtype="kv.max_len_exceeds", expected=("kv.max_len_exceeds",), same_without_command=True,
        tried=((fix(command=second.command, changes=(change,)), second),),
        after="healthy" if works else None,
    )  # fmt: skip


@pytest.mark.parametrize(("works", "verdict", "mended"), [(True, "yes", 1), (False, "no", 0)])
def test_figures(tmp_path, works, verdict, mended):
    one = trial(tmp_path, works=works)
    body = prove_cpu.as_json([one], "0.32.0")
    assert (
        prove_cpu.table([one])
        .splitlines()[-1]
        .endswith(f"`kv.max_len_exceeds` | `--max-model-len 64` | {verdict} |")
    )
    assert (body["mended"], body["named"], body["of"]) == (mended, 1, 1)
    again = prove_cpu.as_json([one], "0.32.0", body)
    assert again == body  # a case that is tried again takes the place of the earlier one
    other = {**body["cases"][0], "case": "another"}
    kept = prove_cpu.as_json([one], "0.32.0", {"vllm": "0.32.0", "cases": [other]})
    assert [case["case"] for case in kept["cases"]] == ["another", one.case]
    assert kept["of"] == 2
    assert prove_cpu.as_json([one], "0.33.0", body)["of"] == 1
    assert json.dumps(body)
