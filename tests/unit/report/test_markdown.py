from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt
from report_samples import SAMPLES

from diag.report.markdown import code, fence, prose, render


def outside_code(text: str) -> tuple[list[str], list[str], list[str]]:
    """Plain texts, link targets and raw HTML of a Markdown text, as a renderer sees them."""
    texts, links, html = [], [], []
    for block in MarkdownIt("commonmark").enable("table").parse(text):
        if block.type == "html_block":
            html.append(block.content)
        for token in block.children or ():
            if token.type == "text":
                texts.append(token.content)
            elif token.type == "html_inline":
                html.append(token.content)
            elif token.type in ("link_open", "image"):
                links.append(token.attrs.get("href") or token.attrs.get("src"))
    return texts, links, html


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("raise gpu_memory_utilization.", "raise `gpu_memory_utilization`."),
        ("ask @user, see #12 or GH-12", "ask `@user`, see `#12` or `GH-12`"),
        ("(--enforce-eager)", "(`--enforce-eager`)"),
        ("<b>bold</b>", "`<b>bold</b>`"),
        ("see https://x.y/z.", "see `https://x.y/z`."),
        ("a `tick` b", "a `` `tick` `` b"),
        ("6.10 of 10.00 GiB (39 %), -1.81", "6.10 of 10.00 GiB (39 %), -1.81"),
        ("0.92 x 23.65 = 21.76 - 1 > 2", "0.92 x 23.65 = 21.76 - 1 > 2"),
        (":boom: $x$", "`:boom:` `$x$`"),
    ],
)
def test_prose(raw, shown):
    assert prose(f"x {raw}") == f"x {shown}"


@pytest.mark.parametrize("mark", ["-", "1.", "2)", "===", "---", ">", "#", "+"])
def test_a_first_word_starts_no_block(mark):
    assert prose(f"{mark} item") == f"`{mark}` item"


def test_code_and_fence_outgrow_their_content():
    assert code("a ``` b") == "````a ``` b````"
    assert fence("```\nx\n````").startswith("`````\n")


def test_the_order_and_the_tables():
    text = render(SAMPLES["kv_max_len"]())
    marks = [
        "### KV reservation: one request does not fit the KV pool (`kv.max_len_exceeds`)",
        "vLLM 0.8.5 (V1), Qwen3-32B",
        "Missing: 3.90 GiB.",
        "| 1 | `--gpu-memory-utilization 0.95` | fits | 10.06 of 10.00 GiB needed; window 0.95-0.97 |",
        "```\nvllm serve Qwen/Qwen3-32B --port 8000 --gpu-memory-utilization 0.95\n```",
        "**Don't**",
        "| KV pool | 6.10 | **wanted 10.00**, lines 201, 214 |",
        "[`vllm#10517`](https://github.com/vllm-project/vllm/issues/10517)",
        "**Check it:**",
        "```text\n201: INFO",
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_headline_becomes_the_heading():
    assert render(SAMPLES["healthy"]()).startswith("### Healthy start\n\nServing since line 388.")
    assert render(SAMPLES["unknown"]()).startswith("### Cannot tell yet\n\nThe engine died")


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_of_a_log_acts(name):
    text = render(SAMPLES[name]())
    texts, links, html = outside_code(text)
    assert set(html) <= {"<br>"}
    for link in links:
        assert link.startswith("https://github.com/vllm-project/")
    for piece in texts:
        assert not re.search(r"@\w|#\d|[<`*\[\]]|://", piece), piece
    for char in text:
        assert char == "\n" or char.isprintable()


@pytest.mark.parametrize("name", SAMPLES)
def test_table_rows_have_as_many_cells_as_the_head(name):
    rows = [line for line in render(SAMPLES[name]()).splitlines() if line.startswith("|")]
    for line in rows:
        cells = re.sub(r"\\.", "", line).count("|") - 1
        assert cells in (3, 5), line


def test_ends_in_one_newline():
    for make in SAMPLES.values():
        text = render(make())
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        assert "\n\n\n" not in text
