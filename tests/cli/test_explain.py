from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys

import jsonschema
import pytest

from diag.apps.entry import main
from diag.report.jsonout import json_schema


class Stdin(io.TextIOWrapper):
    """Standard input: piped bytes, or a terminal."""

    def __init__(self, data: bytes = b"", *, terminal: bool = False):
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["kv_max_len.log"], 0),
        (["healthy.log"], 0),
        (["--exit-code", "kv_max_len.log"], 1),
        (["--exit-code", "port_in_use.log"], 1),
        (["--exit-code", "healthy.log"], 0),
        (["--exit-code", "unknown.log"], 0),
        (["--exit-code", "healthy.log", "kv_max_len.log"], 1),
        (["nope.log"], 2),
        (["--exit-code", "nope.log", "kv_max_len.log"], 2),
        (["boom.log"], 2),
        (["stopped.log"], 130),
        (["--format", "xml", "healthy.log"], 2),
        (["--attempt", "0", "healthy.log"], 2),
        (["--attempt", "x", "healthy.log"], 2),
        (["--json", "--format", "md", "healthy.log"], 2),
        (["-", "-"], 2),
    ],
)
def test_exit_codes(logs, capsys, args, code):
    assert main(["explain", *args]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if code == 2:
        assert err.startswith("oomdoc: ")
    else:
        assert err == ""


def test_the_options_reach_the_core(logs, fake_diagnose):
    main(
        [
            "explain",
            "healthy.log",
            "--attempt",
            "2",
            "--vllm-version",
            "0.9.1",
            "--gpu",
            "H100",
            "--launch",
            "vllm serve m",
        ]
    )
    (call,) = fake_diagnose
    assert str(call.pop("source")) == "healthy.log"
    assert call == {
        "name": "healthy.log",
        "attempt": 2,
        "vllm_version": "0.9.1",
        "gpu": "H100",
        "launch": "vllm serve m",
    }


def test_the_command_comes_from_the_file_that_starts_vllm(logs, fake_diagnose):
    (logs / "compose.yaml").write_text(
        "services:\n  vllm:\n    image: vllm/vllm-openai:v0.11.0\n"
        "    command: --model m --max-model-len 4096 --api-key secret\n"
    )
    assert main(["explain", "healthy.log", "--config", "compose.yaml"]) == 0
    (call,) = fake_diagnose
    assert call["launch"] == "vllm serve --model m --max-model-len 4096"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "notes.txt"], "notes.txt: no start of vLLM could be read in it; give"),
        (["--config", "gone.yaml"], "gone.yaml: no such file; give the file that vLLM"),
        (["--config", "x", "--launch", "vllm serve m"], "--launch and --config say the same"),
    ],
)
def test_a_config_that_says_no_command_is_told(logs, fake_diagnose, capsys, options, message):
    (logs / "notes.txt").write_text("we should restart it\n")
    assert main(["explain", "healthy.log", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"oomdoc: {message}")
    assert not fake_diagnose


def test_a_pipe_is_read(logs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Stdin(b"unknown\n"))
    assert main(["explain"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Cannot tell yet.")
    assert err == ""


def test_no_file_and_a_terminal_prints_help_and_does_not_wait(logs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Stdin(terminal=True))
    assert main(["explain"]) == 2
    out = capsys.readouterr().out
    assert "Usage: oomdoc explain" in out
    assert "130  interrupted" in out


def test_text_in_a_pipe_has_no_ansi(logs, capsys):
    main(["explain", "kv_max_len.log"])
    assert "\x1b" not in capsys.readouterr().out


def test_several_files_have_headers_and_an_unread_one_stops_nothing(logs, capsys):
    assert main(["explain", "healthy.log", "nope.log", "boom.log", "unknown.log"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("==> healthy.log <==\nHealthy start")
    assert "\n\n==> unknown.log <==\nCannot tell yet" in out
    assert err.splitlines() == [
        "oomdoc: nope.log: no such file; check the path",
        (
            "oomdoc: boom.log: internal error (ZeroDivisionError: boom); please report it; "
            "run again with --debug for the details to add"
        ),
    ]


def test_jsonl_keeps_the_order_with_error_lines(logs, capsys):
    assert main(["explain", "--format", "jsonl", "healthy.log", "nope.log", "unknown.log"]) == 2
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["source"]["name"] for row in rows] == ["healthy.log", "nope.log", "unknown.log"]
    assert rows[1]["error"]["message"] == "no such file"
    jsonschema.validate(rows[0], json_schema())


def test_json_is_one_document_or_an_array(logs, capsys):
    main(["explain", "--json", "healthy.log"])
    one = json.loads(capsys.readouterr().out)
    main(["explain", "--json", "healthy.log", "nope.log"])
    several = json.loads(capsys.readouterr().out)
    assert one == several[0]
    assert "error" in several[1]
    assert main(["explain", "--json", "nope.log"]) == 2
    assert capsys.readouterr().out == ""


def test_plain_does_not_depend_on_the_terminal(logs, capsys, monkeypatch):
    main(["explain", "--format", "plain", "kv_max_len.log"])
    first = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["explain", "--format", "plain", "kv_max_len.log"])
    assert capsys.readouterr().out == first
    assert first.isascii()


def test_the_flags_for_more(logs, capsys):
    main(["explain", "kv_max_len.log"])
    short = capsys.readouterr().out
    main(["explain", "--all", "--evidence", "--facts", "kv_max_len.log"])
    long = capsys.readouterr().out
    for part in ("Log lines", "Facts", "Checked, and not enough"):
        assert part not in short
        assert part in long


@pytest.mark.parametrize(
    ("environment", "args", "coloured"),
    [
        ({}, [], False),
        ({}, ["--color", "always"], True),
        ({"FORCE_COLOR": "1"}, [], True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, [], False),
        ({"NO_COLOR": "1"}, ["--color", "always"], True),
        ({"FORCE_COLOR": "1"}, ["--no-color"], False),
        ({"FORCE_COLOR": "1"}, ["--color", "never"], False),
    ],
)
def test_colour(logs, capsys, monkeypatch, environment, args, coloured):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    main(["explain", *args, "kv_max_len.log"])
    assert ("\x1b[" in capsys.readouterr().out) is coloured


def test_columns_set_the_width(logs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    main(["explain", "kv_max_len.log"])
    assert 140 < max(map(len, capsys.readouterr().out.splitlines())) <= 150


def test_output_file_is_replaced_whole(logs, capsys):
    target = logs / "answer.md"
    target.write_text("old")
    target.chmod(0o640)
    assert main(["explain", "--format", "md", "kv_max_len.log", "-o", "answer.md"]) == 0
    assert target.read_text().startswith("### KV reservation")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert capsys.readouterr() == ("", "")
    assert not list(logs.glob(".answer*"))


@pytest.mark.parametrize("args", [["nope.log"], ["boom.log"], ["healthy.log", "stopped.log"]])
def test_output_file_keeps_its_content_on_failure(logs, args):
    target = logs / "answer.txt"
    target.write_text("old")
    assert main(["explain", *args, "-o", "answer.txt"]) != 0
    assert target.read_text() == "old"
    assert not list(logs.glob(".answer*"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (".", "is a directory"),
        ("no/such/answer.txt", "there is no directory"),
        ("healthy.log", "is one of the inputs"),
    ],
)
def test_output_that_makes_no_sense_is_refused(logs, capsys, target, message):
    assert main(["explain", "healthy.log", "-o", target]) == 2
    assert message in capsys.readouterr().err
    assert (logs / "healthy.log").read_text() == "log\n"


def test_output_through_a_link_keeps_the_link(logs):
    (logs / "real.txt").write_text("old")
    (logs / "link.txt").symlink_to("real.txt")
    assert main(["explain", "healthy.log", "-o", "link.txt"]) == 0
    assert (logs / "link.txt").is_symlink()
    assert (logs / "real.txt").read_text().startswith("Healthy start")


def test_debug_shows_the_traceback(logs, capsys):
    assert main(["explain", "--debug", "boom.log"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_file_instead_of_a_command(logs, capsys):
    assert main(["healthy.log"]) == 2
    assert capsys.readouterr().err == (
        "oomdoc: healthy.log is a file, not a command; type: oomdoc explain healthy.log\n"
    )


def test_hostile_names_can_not_act(logs, capsys):
    assert main(["explain", "x\x1b[2J\n\u202ey.log"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\u202e" not in err
    assert err.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    """As `oomdoc schema | head -1` does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "diag", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert err == b""
