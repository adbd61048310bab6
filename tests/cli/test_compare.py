from __future__ import annotations

import json

import pytest
from log_samples import INIT_FAILED, MAX_LEN, SERVING, core, planned, start

from diag.apps.entry import main

GOOD = f"{start()}\n{planned()}\n{SERVING}\n"
BAD = f"{start()}\n{core(MAX_LEN)}\n(APIServer pid=1) {INIT_FAILED}\n"


@pytest.fixture
def logs(tmp_path):
    good, bad, both = (tmp_path / name for name in ("good.log", "bad.log", "both.log"))
    good.write_text(GOOD)
    bad.write_text(BAD)
    both.write_text(GOOD + BAD)
    return str(good), str(bad), str(both)


def test_two_logs(logs, capsys):
    assert main(["compare", logs[0], logs[1]]) == 0
    seen = capsys.readouterr()
    assert seen.out.startswith("Good  ")
    assert "explains it" in seen.out
    assert seen.err == ""


def test_one_log_with_both_starts(logs, capsys):
    assert main(["compare", logs[2], "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema_version"] == 1
    assert (body["good"]["attempt"], body["bad"]["attempt"]) == (1, 2)


@pytest.mark.parametrize("form", ["text", "plain", "json", "md"])
def test_every_format_into_a_file(logs, tmp_path, form):
    target = tmp_path / "answer"
    assert main(["compare", logs[0], logs[1], "-f", form, "-o", str(target)]) == 0
    assert target.read_text(encoding="utf-8").endswith("\n")


def test_one_log_without_a_good_start_can_not_be_compared(logs, capsys):
    assert main(["compare", logs[1]]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "oomdoc compare GOOD BAD" in seen.err


def test_a_missing_file_ends_with_2(logs, capsys):
    assert main(["compare", logs[0], "nowhere.log"]) == 2
    assert "nowhere.log" in capsys.readouterr().err


def test_stdin_can_be_read_once(capsys):
    assert main(["compare", "-", "-"]) == 2
    assert "twice" in capsys.readouterr().err


def test_an_output_that_is_an_input_is_refused(logs, capsys):
    assert main(["compare", logs[0], logs[1], "-o", logs[0]]) == 2
