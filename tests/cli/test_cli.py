from __future__ import annotations

import json
import os
import subprocess
import sys

import jsonschema
import pytest

from diag import __version__
from diag.apps.entry import main

HEAVY = ("torch", "chromadb", "langchain", "rich", "yaml", "re2", "numpy")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("args", [["--help"], ["explain", "--help"], ["version"]])
def test_help_imports_nothing_heavy(args):
    done = python(
        "import sys\n"
        "from diag.apps.entry import main\n"
        f"code = main({args!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("args", [["--help"], ["explain", "--help"]])
def test_help_tells_the_exit_codes_with_an_example(capsys, args):
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "oomdoc explain vllm.log" in out
    assert "130  interrupted" in out


def test_no_command_prints_help(capsys):
    assert main([]) == 2
    assert "Usage: oomdoc" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["version"], ["--version"]])
def test_version(capsys, args):
    assert main(args) == 0
    assert capsys.readouterr().out == f"oomdoc {__version__}\n"


def test_schema_is_a_json_schema(capsys):
    assert main(["schema"]) == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("args", [["nonsense"], ["explain", "--nonsense"], ["rules", "show"]])
def test_usage_errors_are_one_line(capsys, args):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("oomdoc: ")
    assert err.count("\n") == 1
    assert "--help" in err


def test_a_bug_of_ours_is_one_line(capsys, monkeypatch):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr("diag.report.jsonout.json_schema", broken)
    assert main(["schema"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("oomdoc: internal error (RuntimeError: no such thing); please report it")
    assert "Traceback" not in err


def test_completion_stays():
    done = subprocess.run(
        [sys.executable, "-m", "diag"],
        env={
            **os.environ,
            "_OOMDOC_COMPLETE": "complete_bash",
            "COMP_WORDS": "oomdoc exp",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.strip() == "explain"


def test_rules_list_and_show(capsys):
    assert main(["rules", "list"]) == 0
    ids = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert ids == sorted(ids)
    assert "kv.no_blocks" in ids
    assert main(["rules", "show", "kv.no_blocks"]) == 0
    assert capsys.readouterr().out.startswith("kv.no_blocks: ")


def test_an_unknown_rule_gets_the_nearest(capsys):
    assert main(["rules", "show", "kv.no_block"]) == 2
    assert "did you mean kv.no_blocks" in capsys.readouterr().err
