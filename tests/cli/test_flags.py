from __future__ import annotations

import json

import pytest
from packaging.version import Version

from diag.apps.entry import main


def run(capsys, *args):
    code = main(["flags", *args])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", ["--gpu-memory-utilization", "gpu_memory_utilization"])
def test_one_flag_as_text(capsys, name):
    code, out, err = run(capsys, name)
    assert (code, err) == (0, "")
    assert out.startswith("--gpu-memory-utilization\n")
    assert "0.9; 0.92 from 0.20.0" in out
    assert "--device-memory-utilization (since 0.31.0)" in out
    assert "\x1b" not in out


def test_one_release_is_described(capsys):
    _, out, _ = run(capsys, "--swap-space", "--vllm", "0.12")
    assert "default in 0.12: 4" in out
    assert "does nothing with V1" in out


def test_a_short_form_names_what_it_stands_for(capsys):
    assert "--tensor-parallel-size" in run(capsys, "-tp")[1]


def test_json(capsys):
    code, out, _ = run(capsys, "--cuda-graph-sizes", "--json", "--vllm", "0.20.0")
    body = json.loads(out)
    assert code == 0
    assert body["schema_version"] == 1
    assert body["runs"] == [{"since": "0.9.0", "last": "0.12.0", "gone": "0.13.0", "oldest": False}]
    assert body["successor"]["to"] == "--cudagraph-capture-sizes"
    assert body["at"] == {"vllm": "0.20.0", "exists": False, "default": None, "effects": []}


def test_list_of_changes(capsys):
    code, out, _ = run(capsys)
    rows = {tuple(line.split(maxsplit=2)) for line in out.splitlines()}
    assert code == 0
    assert ("--gpu-memory-utilization", "0.20.0", "default 0.9 -> 0.92") in rows
    assert ("--cuda-graph-sizes", "0.13.0", "renamed to --cudagraph-capture-sizes") in rows
    assert ("--swap-space", "0.18.0", "removed") in rows


def test_list_after_a_release(capsys):
    body = json.loads(run(capsys, "--vllm", "0.17.1", "--json")[1])
    found = {(item["name"], item["release"], item["what"]) for item in body["changes"]}
    assert ("--swap-space", "0.18.0", "removed") in found
    assert min(Version(release) for _, release, _ in found) > Version("0.17.1")
    assert ("--cuda-graph-sizes", "0.13.0", "renamed") not in found


def test_nothing_changed_since_the_newest(capsys):
    assert run(capsys, "--vllm", "9.9")[1] == "Nothing changed since.\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gpu-memory-utilisation"], "did you mean --gpu-memory-utilization"),
        (["nonsense\x1b[31m"], "no vLLM release has"),
        (["--swap-space", "--vllm", "new"], "is not a vLLM release"),
    ],
)
def test_what_can_not_be_answered(capsys, args, says):
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("oomdoc: ")
    assert says in err
    assert "\x1b" not in err
