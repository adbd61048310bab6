from __future__ import annotations

import random
import sys
import time

import pytest

from diag.log import scan
from diag.log.scan import GAP, MAX_LINE, Anchors, Block, Piece, Regions, Store, line_blocks


@pytest.fixture(params=["re2", "regex"])
def engine(request, monkeypatch):
    if request.param == "re2":
        pytest.importorskip("re2")
    else:
        monkeypatch.setitem(sys.modules, "re2", None)
    return request.param


@pytest.mark.parametrize(
    ("patterns", "text", "span"),
    [
        pytest.param(["out of memory"], b"CUDA out of memory", (5, 18), id="literal"),
        pytest.param([r"a\s+b"], b"a\nb\na  b", (4, 8), id="never over a newline"),
        pytest.param(["Worker [^x]* died"], b"Worker\n died\nWorker 1 died", (13, 26), id="class"),
        pytest.param([r"a\s+b", "b"], b"a\nb", (2, 3), id="second pattern on the next line"),
        pytest.param(["^Killed$"], b"[12.3] Killed\r\n", (7, 13), id="line ends are loosened"),
        pytest.param([r"\^[$^]x\$"], b"x$x ^$x$", (4, 8), id="escaped and in a class they stay"),
        pytest.param(
            ["(?i)oom-kill", "B"], b"OOM-Kill", (0, 8), id="flags stay with their pattern"
        ),
        pytest.param(["(?i)a", "b"], b"B b", (2, 3), id="and do not leak"),
        pytest.param(["(?P<x>a)1", "(?P<x>b)2"], b"b2", (0, 2), id="a group name twice"),
        pytest.param([r"took \d+"], b"\xff\xfe\0 took 12", (4, 11), id="broken bytes"),
        pytest.param(
            ["a[^b]{1,200}c{2}b{0,90}d"], b"a.c.cd a.ccd", (0, 12), id="large counts are loosened"
        ),
        pytest.param([r"a{1,2}\{9\}[{9}]"], b"a{9}x aa{9}9", (6, 12), id="small ones are not"),
        pytest.param(["x"], b"abc", None, id="nothing"),
        pytest.param([], b"abc", None, id="no patterns"),
    ],
)
def test_anchors_find_the_first_match(engine, patterns, text, span):
    assert Anchors.compile(patterns).search(text) == span


def test_anchors_leave_out_what_does_not_compile_or_matches_nothing(engine):
    anchors = Anchors.compile(["memory(", "x*", "out of memory"])
    assert anchors.search(b"xx out of memory") == (3, 16)
    assert anchors.rejected == ("memory(", "x*")


def test_counted_repeats_do_not_ruin_the_automaton():
    pytest.importorskip("re2")
    patterns = [r"[^:\n]{1,200}: line \d+", r"(?:[^\n]{0,60}INFO:\s+)?Shut", r"[\w:.\-/]{1,60} inv"]
    rng = random.Random(5)
    text = bytes(rng.choice(b"abcdef 0123:./-INFO\n") for _ in range(100_000)) * 10
    anchors = Anchors.compile(patterns)
    anchors.search(b"")
    start = time.process_time()
    assert anchors.search(text) is None
    assert time.process_time() - start < 1  # 0.01 s; counting takes minutes


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_line_blocks_hold_whole_lines_wherever_the_chunks_are_cut(size):
    text = b"".join(b"line %d\n" % number for number in range(300)) + b"no newline"
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    blocks = list(line_blocks(chunks))
    assert all(block.data.endswith(b"\n") for block in blocks)
    assert b"".join(block.data for block in blocks) == text + b"\n"


def chunked(text: bytes, size: int = 1 << 20) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1_000, 50_000, 1 << 20, 1 << 24])
@pytest.mark.parametrize("length", [MAX_LINE + 1, 100_000, 3_000_000])
def test_a_long_line_keeps_its_start_and_end(length, size):
    line = b"start" + b"x" * (length - 8) + b"end"
    blocks = list(line_blocks(chunked(b"a\n" + line + b"\nb\n", size)))
    cut = [number for number, block in enumerate(blocks) if block.cuts]
    assert len(cut) == 1
    lines = b"".join(block.data for block in blocks).split(b"\n")
    assert [len(lines), lines[0], lines[2]] == [4, b"a", b"b"]
    assert lines[1].startswith(b"startxxx")
    assert lines[1].endswith(b"xxxend")
    assert GAP in lines[1]
    assert MAX_LINE - 64 < len(lines[1]) <= MAX_LINE


def test_a_line_of_the_greatest_length_is_not_cut():
    line = b"x" * MAX_LINE + b"\n"
    assert list(line_blocks(chunked(line * 3))) == [Block(line * 3)]


@pytest.mark.parametrize("size", [5_000, 65_536, 1 << 20, 1 << 24])
@pytest.mark.parametrize("at", [49_000, 65_530, 1_048_570, 1_500_000, 1_999_000])
def test_a_long_line_keeps_windows_around_anchors(at, size):
    anchors = Anchors.compile(["CUDA out of memory"])
    found = b" before CUDA out of memory. Tried to allocate 2.00 GiB "
    line = b"x" * at + found + b"y" * (2_000_000 - at)
    (block,) = line_blocks(chunked(line + b"\n", size), anchors)
    assert block.data.count(found) == 1
    assert len(block.data) <= MAX_LINE + 1


def test_the_windows_of_a_long_line_are_few():
    anchors = Anchors.compile(["Error"])
    (block,) = line_blocks(chunked(b"Error x" * 1_000_000), anchors)
    assert block.data.count(GAP) <= scan.WINDOWS + 1
    assert len(block.data) <= MAX_LINE + 1


def test_a_cut_leaves_no_half_characters():
    (block,) = line_blocks(chunked("█▌é".encode() * 100_000))
    assert "\ufffd" not in block.data.decode("utf-8", "replace")


def kept(regions: Regions) -> dict[int, bytes]:
    """Number -> text of the lines that are kept."""
    lines: dict[int, bytes] = {}
    for piece in regions.store.take():
        texts = piece.data.split(b"\n")[:-1]
        assert len(texts) == piece.count
        for number, text in enumerate(texts, piece.first):
            assert number not in lines
            lines[number] = text
    assert list(lines) == sorted(lines)
    return lines


def scanned(text: bytes, chunk: int, anchors: Anchors | None) -> Regions:
    regions = Regions(anchors)
    for block in line_blocks(chunked(text, chunk)):
        regions.add(block)
    regions.finish()
    return regions


@pytest.mark.parametrize("seed", range(40))
def test_regions_keep_what_a_line_by_line_search_would(monkeypatch, seed):
    before, after, head, tail = 5, 3, 4, 6
    names = ("BEFORE", "AFTER", "HEAD_LINES", "TAIL_LINES", "DENSE")
    for name, value in zip(names, (before, after, head, tail, 1_000), strict=True):
        monkeypatch.setattr(scan, name, value)
    rng = random.Random(seed)
    total, rate = rng.randrange(1, 400), rng.choice((0, 0.01, 0.03, 0.1, 0.5))
    lines = [
        b"%d %s" % (number, b"OOM" if rng.random() < rate else b"." * rng.randrange(12))
        for number in range(1, total + 1)
    ]
    wanted = {n for n in range(1, total + 1) if n <= head or n > total - tail}
    for number, line in enumerate(lines, 1):
        if b"OOM" in line:
            wanted.update(range(max(1, number - before), min(total, number + after) + 1))
    text = b"\n".join(lines) + rng.choice((b"", b"\n"))
    regions = scanned(text, rng.choice((10, 100, 1_000, 10_000)), Anchors.compile(["OOM"]))
    assert regions.total_lines == total
    assert kept(regions) == {number: lines[number - 1] for number in sorted(wanted)}


def test_dense_hits_are_sampled_and_all_lines_stay(monkeypatch):
    calls = 0
    anchors = Anchors.compile(["Error"])
    search = anchors.search

    def counted(data: bytes, pos: int = 0):
        nonlocal calls
        calls += 1
        return search(data, pos)

    monkeypatch.setattr(anchors, "search", counted)
    text = b"".join(b"%d Error\n" % number for number in range(1, 100_001))
    regions = scanned(text, 1 << 20, anchors)
    assert calls < 1_500
    assert len(kept(regions)) == 100_000


def test_the_middle_is_dropped_when_there_is_no_room(monkeypatch):
    monkeypatch.setattr(scan, "HEAD_BUDGET", 1_000_000)
    monkeypatch.setattr(scan, "TAIL_BUDGET", 2_000_000)
    text = b"".join(b"%d Error\n" % number for number in range(1, 100_001))
    regions = scanned(text, 10_000, Anchors.compile(["Error"]))
    assert regions.store.cost <= 3_000_000
    dropped = regions.store.dropped
    lines = kept(regions)
    assert dropped > 10_000
    assert len(lines) + dropped == 100_000
    assert all(int(line.split()[0]) == number for number, line in lines.items())
    assert {1, 2, 3, 99_999, 100_000} <= set(lines)


def test_a_warning_repeated_for_weeks_leaves_room_for_the_one_crash(monkeypatch):
    monkeypatch.setattr(scan, "THRIFT", 500_000)
    monkeypatch.setattr(scan, "HEAD_BUDGET", 2_000_000)
    monkeypatch.setattr(scan, "TAIL_BUDGET", 4_000_000)
    lines = [b"INFO ordinary line of a server"] * 200_000
    lines[100::200] = [b"WARNING request %d is preempted" % n for n in range(1_000)]
    lines[100_050] = b"CUDA out of memory"
    anchors = Anchors.compile([r"request \d+ is preempted", "out of memory"])
    regions = scanned(b"\n".join(lines), 1 << 16, anchors)
    assert regions.store.dropped == 0
    found = kept(regions)
    assert set(range(100_051 - 150, 100_051 + 61)) <= set(found)
    assert sum(b"preempted" in line for line in found.values()) == 1_000


def test_the_store_keeps_the_last_piece_however_large(monkeypatch):
    monkeypatch.setattr(scan, "HEAD_BUDGET", 10)
    monkeypatch.setattr(scan, "TAIL_BUDGET", 10)
    store = Store()
    for number in (1, 2, 3):
        store.add(Piece(number, 1, b"a long line\n"))
    assert (store.lines, store.dropped) == (1, 2)
    assert [piece.first for piece in store.take()] == [3]


def test_a_crash_among_many_plain_lines_keeps_its_surroundings():
    lines = [b"INFO ordinary line of a server"] * 30_000
    lines[10_000:14_000] = [b"INFO KV cache size: %d" % n for n in range(4_000)]
    lines[13_999] = b"CUDA out of memory"
    anchors = Anchors.compile(["out of memory"], [r"KV cache size: \d+"])
    found = kept(scanned(b"\n".join(lines), 1 << 20, anchors))
    assert set(range(14_000 - 150, 14_000 + 61)) <= set(found)
    assert 10_000 not in found
    assert 10_001 in found  # the first plain line, without what stands before it
