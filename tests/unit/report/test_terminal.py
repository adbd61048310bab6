from __future__ import annotations

import re
from dataclasses import replace

import pytest
from report_samples import SAMPLES
from rich.cells import cell_len

from diag.report.model import Diagnosis, Ledger
from diag.report.safe import clean, clean_block
from diag.report.terminal import render, render_plain

WIDTHS = [40, 60, 80, 160]
SGR = re.compile(r"\x1b\[[\d;]*m")


def everything(diagnosis: Diagnosis, width: int, **options: bool) -> str:
    return render(
        diagnosis,
        **{
            "width": width,
            "color": False,
            "show_all": True,
            "show_evidence": True,
            "show_facts": True,
            **options,
        },
    )


def unbroken(diagnosis: Diagnosis) -> set[str]:
    """Lines that may be longer than the terminal: commands and addresses, to be copied whole."""
    texts = [clean(step) for step in diagnosis.next_steps]
    for fix in diagnosis.fixes:
        texts += clean_block(fix.command or "").splitlines()
    texts += [clean(item.url) for item in (*diagnosis.related, *diagnosis.known_bugs)]
    return {text.strip() for text in texts}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_line_fits_and_has_no_blanks_at_its_end(name, width):
    diagnosis = SAMPLES[name]()
    free = unbroken(diagnosis)
    for unicode in (True, False):
        for line in everything(diagnosis, width, unicode=unicode).splitlines():
            assert line == line.rstrip()
            if unicode and line.strip() not in free:
                assert cell_len(line) <= width, line


@pytest.mark.parametrize("name", SAMPLES)
def test_colour_changes_nothing_but_colour(name):
    plain = everything(SAMPLES[name](), 80)
    coloured = everything(SAMPLES[name](), 80, color=True)
    assert "\x1b[" not in plain
    assert SGR.sub("", coloured) == plain


def test_the_first_screen_answers():
    screen = render(SAMPLES["kv_max_len"](), width=80, color=False).splitlines()[:24]
    assert screen[0] == (
        "KV reservation: one request does not fit the KV pool          kv.max_len_exceeds"
    )
    text = "\n".join(screen)
    for part in (
        "vLLM 0.8.5 (V1), Qwen3-32B, 1x 80 GB, rank 0, while planning the KV cache",
        "Attempt 5 of 5 (4 earlier ones failed the same way)",
        "Missing: 3.90 GiB.",
        "  1  --gpu-memory-utilization 0.95  fits   10.06 of 10.00 GiB needed",
        "  vllm serve Qwen/Qwen3-32B --port 8000 --gpu-memory-utilization 0.95",
        "Don't",
    ):
        assert part in text


def test_sections_come_in_their_order():
    text = everything(SAMPLES["kv_max_len"](), 100)
    marks = [
        "KV reservation:",
        "vLLM 0.8.5",
        "Missing: 3.90",
        "Do one of these (least given up first)",
        "Checked, and not enough",
        "Your command with fix 1",
        "Don't",
        "GPU memory, rank 0 (GiB of 79.15)",
        "gpu_memory_utilization: raise it",
        "Could also be",
        "Seen before",
        "Check it",
        "Log lines",
        "Facts",
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_columns_of_the_fixes_align():
    lines = render(SAMPLES["kv_max_len"](), width=80, color=False).splitlines()
    columns = {
        match.start() for line in lines if (match := re.search(r"(fits|costs) ", line)) is not None
    }
    assert len(columns) == 1


def test_a_fix_that_does_not_fit_is_no_advice():
    short = render(SAMPLES["kv_max_len"](), width=80, color=False)
    assert "--enforce-eager" not in short
    assert "(1 more fix: --all" in short
    everything_shown = everything(SAMPLES["kv_max_len"](), 80)
    assert "does not fit  gives 0.4 GiB back" in everything_shown
    assert "--all" not in everything_shown


def test_red_is_only_the_failed_term_and_green_a_fix_that_fits():
    text = render(SAMPLES["free_below_target"](), width=100, color=True)
    red = [line for line in text.splitlines() if re.search(r"\x1b\[(?:1;)?31m", line)]
    green = re.findall(r"\x1b\[32m(.*?)\x1b", text)
    assert len(red) == 1
    assert "other processes" in red[0]
    assert "failed here" in red[0]
    assert [item.strip() for item in green] == ["fits"]


def test_a_long_command_stays_on_one_line():
    diagnosis = SAMPLES["kv_max_len"]()
    command = "vllm serve m " + " ".join(f"--option-{number} value" for number in range(40))
    fixes = (replace(diagnosis.fixes[0], command=command), *diagnosis.fixes[1:])
    text = render(replace(diagnosis, fixes=fixes), width=60, color=False)
    assert f"\n  {command}\n" in text


def test_bars_grow_with_the_width_and_show_the_shortfall():
    def bar(width: int, term: str) -> str:
        text = render(SAMPLES["kv_max_len"](), width=width, color=False)
        line = next(line for line in text.splitlines() if line.startswith(f"  {term} "))
        return "".join(char for char in line if "\u2580" <= char <= "\u259f")

    assert len(bar(160, "weights")) > 2 * len(bar(80, "weights")) > 60
    # 6.10 of 10.00 GiB: the light part is what is missing.
    pool = bar(160, "KV pool")
    assert pool.count("\u2591") / len(pool) == pytest.approx(0.39, abs=0.06)


def test_an_unknown_term_is_a_question_mark_not_zero():
    text = render(SAMPLES["healthy"](), width=80, color=False)
    assert re.search(r"^  context +\?  +not in the log$", text, re.MULTILINE)


def test_an_open_reading_says_so_and_what_is_missing():
    text = " ".join(render(SAMPLES["free_below_target"](), width=80, color=False).split())
    assert "This reading is likely, not certain. To be surer: who holds the 4.25 GiB" in text
    assert "Could also be KV reservation (kv.profile_interference), less likely" in text


def test_unknown_gives_the_commands_whole():
    text = render(SAMPLES["unknown"](), width=60, color=False)
    assert '\n  dmesg -T | grep -i -E "killed process|oom"       (host)\n' in text
    assert text.startswith("Cannot tell yet.")


def test_alike_ranks_are_drawn_once():
    text = render(SAMPLES["eight_ranks"](), width=100, color=False)
    assert "GPU memory, ranks 1-7 alike (GiB of 79.15)" in text
    assert text.count("  weights ") == 2


def test_evidence_is_cut_to_the_width():
    lines = render(SAMPLES["kv_max_len"](), width=80, color=False, show_evidence=True).splitlines()
    quoted = next(line for line in lines if line.startswith("  214"))
    assert quoted.startswith("  214  cause         ValueError: To serve")
    assert cell_len(quoted) == 80
    assert quoted.endswith("\u2026")


def test_hostile_text_stays_text():
    text = everything(SAMPLES["hostile"](), 80)
    assert "[red]x[/red]" in text
    for char in text:
        assert char == "\n" or char.isprintable()
    assert "\u202e" not in text


@pytest.mark.parametrize("name", SAMPLES)
def test_plain_is_ascii_without_drawing(name):
    text = render_plain(SAMPLES[name](), show_all=True, show_evidence=True, show_facts=True)
    assert text.isascii()
    assert text.endswith("\n")
    assert "\x1b" not in text


def test_plain_draws_with_hashes():
    assert "  KV pool           6.10  ####" in render_plain(SAMPLES["kv_max_len"]())


def test_bare_diagnosis_has_no_empty_sections():
    bare = replace(SAMPLES["port_in_use"](), fixes=(), ledger=Ledger(era=None, formula=None))
    text = render(bare, width=80, color=False)
    for heading in ("Do ", "Your command", "Don't", "GPU memory,", "Seen", "Check"):
        assert heading not in text
