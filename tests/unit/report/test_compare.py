from __future__ import annotations

import json
import re

import pytest
from rich.cells import cell_len

from diag.report.compare import render_markdown, render_plain, render_text, to_dict
from diag.report.comparison import (
    Amount,
    Comparison,
    Explained,
    ReleaseDifference,
    SettingChange,
    Side,
    TermChange,
)
from diag.terms import Origin, Outcome
from diag.units import GIB

GOOD = Side(
    name="good.log",
    attempt=1,
    attempts=1,
    outcome=Outcome.HEALTHY,
    vllm_version="0.19.1",
    engine="V1",
    model="Qwen/Qwen3-8B",
    device="1x L4",
    subtype=None,
    title="Healthy start.",
)
BAD = Side(
    name="bad.log",
    attempt=3,
    attempts=3,
    outcome=Outcome.MEMORY_FAILURE,
    vllm_version="0.21.0",
    engine="V1",
    model="Qwen/Qwen3-8B",
    device="1x L4",
    subtype="kv.max_len_exceeds",
    title="KV reservation: one request does not fit",
)


def amount(gib: float, *lines: int) -> Amount:
    origin = Origin.LOGGED if lines else Origin.DERIVED
    return Amount(bytes=round(gib * GIB), origin=origin, lines=lines)


FOUND = Comparison(
    good=GOOD,
    bad=BAD,
    explained=Explained.BY_ONE,
    verdict="KV need of one request grew by 4.00 GiB (4.50 GiB -> 8.50 GiB): --max-model-len 32,768 -> 65,536.",
    missing_bytes=GIB,
    missing="for one full-length request",
    terms=(
        TermChange(term="weights", label="weights", good=amount(15.27, 5), bad=amount(15.27, 9), change=0, worse=0),
        TermChange(
            term="need",
            label="KV need of one request",
            good=amount(4.5),
            bad=amount(8.5, 12),
            change=4 * GIB,
            worse=4 * GIB,
            explains=True,
        ),
        TermChange(term="captured", label="CUDA graphs captured", good=amount(0.57, 7), bad=None, change=None),
    ),
    settings=(
        SettingChange(
            name="--max-model-len",
            good=32768,
            bad=65536,
            unit="tokens",
            moves=("need",),
            explains=True,
        ),
        SettingChange(name="--enforce-eager", good=False, bad=True, unit="bool", good_default=True),
        SettingChange(name="VLLM_X", good=None, bad="a|b `c` <script>"),
    ),
    environment=(SettingChange(name="vLLM", good="0.19.1", bad="0.21.0"),),
    releases=(
        ReleaseDifference(
            id="graphs-charged", since="0.20.0", says="Graphs are charged.", pool="smaller", gone=False
        ),
    ),
    notes=("The two starts run on different devices.",),
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 160])
def test_no_line_is_wider_than_asked_for(width):
    text = render_text(FOUND, width=width, color=False)
    assert all(cell_len(line) <= width for line in text.splitlines())


def test_the_answer_comes_first_and_the_term_that_explains_is_marked():
    text = render_text(FOUND, width=80, color=False)
    assert text.splitlines()[0] == "Good  good.log: healthy"
    assert text.index("KV need") < text.index("Memory, term by term") < text.index("Settings")
    line = next(line for line in text.splitlines() if "8.50" in line and "+4.00" in line)
    assert "< explains it" in line
    assert re.search(r"--max-model-len +32,768 +65,536 +< behind it", text)
    assert re.search(r"--enforce-eager +off \(default\) +on", text)
    assert "not in the log" in text
    assert "start 3 of 3" in text
    assert re.search(r"0\.20\.0 +smaller pool +Graphs are charged", text)


def test_a_term_of_the_good_start_alone_is_left_to_the_json():
    assert "captured" not in render_text(FOUND, width=160, color=False)
    assert any(row["term"] == "captured" for row in to_dict(FOUND)["terms"])


def test_wide_output_names_the_lines():
    assert "good line 5; bad line 9" in render_text(FOUND, width=160, color=False)
    assert "good line 5" not in render_text(FOUND, width=80, color=False)


def test_plain_is_ascii_without_colour():
    text = render_plain(FOUND)
    assert text.isascii()
    assert "\x1b" not in text


def test_colour_is_an_addition():
    coloured = render_text(FOUND, width=80, color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_text(FOUND, width=80, color=False)


def test_markdown_lets_nothing_of_a_log_act():
    text = render_markdown(FOUND)
    assert "| **KV need of one request** | 4.50 | 8.50 | +4.00 | explains it |" in text
    assert "`` a\\|b `c` <script> ``" in text or "``a\\|b `c` <script>``" in text


def test_the_json_is_stable_and_plain():
    body = to_dict(FOUND)
    assert list(body)[:4] == ["schema_version", "oomdoc_version", "good", "bad"]
    assert body["explained"] == "by_one"
    assert body["terms"][1]["bad"] == {"bytes": round(8.5 * GIB), "origin": "logged", "lines": [12]}
    assert json.loads(json.dumps(body)) == body
