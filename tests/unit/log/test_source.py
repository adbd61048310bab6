from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest

from diag.errors import LogReadError
from diag.log import source
from diag.log.model import RawLine
from diag.log.source import MAX_LINE, Anchors, read_source, read_text

ROOT = Path(__file__).resolve().parents[3]
TEXT = "INFO one\nINFO größe 12 GiB █▌\n\nValueError: three\n"
LINES = [(1, "INFO one"), (2, "INFO größe 12 GiB █▌"), (3, ""), (4, "ValueError: three")]


def numbered(lines: tuple[RawLine, ...]) -> list[tuple[int, str]]:
    return [(line.number, line.text) for line in lines]


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(data))


def xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


# Text and packing


@pytest.mark.parametrize(
    ("data", "formats"),
    [
        pytest.param(TEXT.encode(), (), id="utf-8"),
        pytest.param(TEXT.encode("utf-8-sig"), ("utf-8-bom",), id="utf-8 with BOM"),
        pytest.param(TEXT.encode("utf-16"), ("utf-16-le",), id="utf-16 with BOM"),
        pytest.param(
            b"\xfe\xff" + TEXT.encode("utf-16-be"), ("utf-16-be",), id="utf-16-be with BOM"
        ),
        pytest.param(TEXT.encode("utf-16-le"), ("utf-16-le",), id="utf-16-le without BOM"),
        pytest.param(TEXT.encode("utf-16-be"), ("utf-16-be",), id="utf-16-be without BOM"),
        pytest.param(TEXT.encode("utf-32"), ("utf-32-le",), id="utf-32"),
        pytest.param(TEXT.replace("\n", "\r\n").encode(), ("crlf",), id="CRLF"),
        pytest.param(
            TEXT.replace("\n", "\r\n").encode("utf-16"), ("utf-16-le", "crlf"), id="utf-16 CRLF"
        ),
        pytest.param(TEXT.encode().rstrip(b"\n"), (), id="no newline at the end"),
        pytest.param(b"\0" * 100_000 + TEXT.encode(), ("nul_bytes",), id="sparse after rotation"),
        pytest.param(TEXT.encode().replace(b"o", b"\0o\0"), ("nul_bytes",), id="stray NULs"),
        pytest.param(gzip.compress(TEXT.encode()), ("gzip",), id="gzip"),
        pytest.param(
            gzip.compress(TEXT.encode("utf-16")), ("gzip", "utf-16-le"), id="utf-16 in gzip"
        ),
        pytest.param(bz2.compress(TEXT.encode()), ("bzip2",), id="bzip2"),
        pytest.param(lzma.compress(TEXT.encode()), ("xz",), id="xz"),
    ],
)
def test_every_encoding_and_packing_gives_the_same_lines(data, formats):
    text = read_source(io.BytesIO(data))
    assert numbered(text.lines) == LINES
    assert text.formats == formats
    assert (text.total_lines, text.truncated, text.notes, text.has_gaps) == (4, False, (), False)


def halves(pack) -> bytes:
    """Two members, cut inside a line."""
    data = TEXT.encode()
    return pack(data[:15]) + pack(data[15:])


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, xz, zstd])
def test_several_members_are_one_text(pack):
    text = read_source(io.BytesIO(halves(pack)))
    assert numbered(text.lines) == LINES
    assert not text.truncated


@cache
def noise() -> bytes:
    """Two MB that hardly pack: several blocks for every format."""
    rng = random.Random(1)
    return b"".join(b"INFO %x\n" % rng.getrandbits(400) for _ in range(20_000))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, xz, zstd])
def test_a_packed_file_cut_in_the_middle_keeps_what_came_before(pack):
    packed = pack(noise())
    text = read_source(io.BytesIO(packed[: len(packed) * 3 // 4]))
    assert 5_000 < text.total_lines < 20_000
    assert "\n".join(line.text for line in text.lines[:-1]).encode() in noise()
    assert text.truncated
    assert "ends in the middle" in text.notes[0]


@pytest.mark.parametrize(("pack", "damage"), [(gzip.compress, 50), (zstd, 300_000)])
def test_a_packed_file_damaged_in_the_middle_keeps_what_came_before(pack, damage):
    packed = bytearray(pack(noise()))
    middle = len(packed) // 2
    packed[middle : middle + damage] = b"\xff" * damage
    text = read_source(io.BytesIO(bytes(packed)))
    assert text.lines[0].text == noise().split(b"\n")[0].decode()
    assert text.truncated
    assert "damaged" in text.notes[0]


@pytest.mark.parametrize("cut", range(10, 18))
def test_a_gzip_header_split_between_reads_is_no_damage(cut, monkeypatch):
    monkeypatch.setattr("diag.log.decode._FEED", {"gzip": cut})
    assert numbered(read_source(io.BytesIO(halves(gzip.compress))).lines) == LINES


def test_padding_after_gzip_is_ignored_and_garbage_is_noted():
    packed = gzip.compress(TEXT.encode())
    assert read_source(io.BytesIO(packed + b"\0" * 70_000)).notes == ()
    text = read_source(io.BytesIO(packed + b"garbage"))
    assert numbered(text.lines) == LINES
    assert text.notes == ("bytes after the end of the gzip data were ignored",)


def test_broken_utf8_and_latin1_are_replaced():
    text = read_source(io.BytesIO(b"gr\xf6\xdfe\n\xe2\x96\nok\n"))
    assert numbered(text.lines) == [(1, "gr\ufffd\ufffde"), (2, "\ufffd"), (3, "ok")]


def test_lines_end_at_newlines_only():
    text = read_text("bar 1%\rbar 2%\rINFO done\r\n\x0b\x0c\x85\u2028x\nlast\r\r\n")
    assert numbered(text.lines) == [
        (1, "bar 1%\rbar 2%\rINFO done"),
        (2, "\x0b\x0c\x85\u2028x"),
        (3, "last"),
    ]


def test_pasted_text_may_hold_lone_surrogates():
    assert numbered(read_text("\ufeffa \ud800 b").lines) == [(1, "a ? b")]


# Where it comes from


def test_a_path_a_pipe_stdin_and_a_fifo(tmp_path, monkeypatch):
    path = tmp_path / "any.name"
    path.write_bytes(TEXT.encode())
    assert read_source(path).name == str(path)
    assert numbered(read_source(str(path), name="shown").lines) == LINES

    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = read_source(pipe)
    assert (numbered(text.lines), text.name) == (LINES, "<stream>")

    for stdin in ("-", None):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
        text = read_source(stdin)
        assert (numbered(text.lines), text.name) == (LINES, "<stdin>")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO on this system")
def test_a_fifo_is_read_to_its_end(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(TEXT.encode() * 10_000,))
    writer.start()
    assert read_source(fifo).total_lines == 40_000
    writer.join()


class Failing(io.RawIOBase):
    """A disk that gives some bytes and then an error."""

    def __init__(self, good: bytes) -> None:
        self.good = good

    def read(self, size: int = -1) -> bytes:
        if not self.good:
            raise OSError(5, "Input/output error")
        part, self.good = self.good[:1_000], self.good[1_000:]
        return part


def test_a_read_error_in_the_middle_keeps_what_came_before():
    text = read_source(Failing(TEXT.encode() * 100))
    assert text.total_lines == 400
    assert text.truncated
    assert text.notes == ("reading stopped after 5 KiB: input/output error",)


# Errors


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b" \n\t\r\n", "empty (only white space)", id="white space"),
        pytest.param(b"\0" * 200_000, "empty (only white space)", id="NULs only"),
        pytest.param(gzip.compress(b""), "empty", id="empty in gzip"),
        pytest.param(b"\xff\xfe", "empty (only white space)", id="only a BOM"),
        pytest.param(b"\x7fELF\x02\x01\x01" + b"\0" * 99, "starts with an ELF", id="ELF"),
        pytest.param(b"%PDF-1.7\n...", "starts with a PDF header", id="PDF"),
        pytest.param(b"\x89PNG\r\n\x1a\n", "starts with a PNG header", id="PNG"),
        pytest.param(b"SQLite format 3\0", "starts with an SQLite header", id="SQLite"),
        pytest.param(b"\x80\x04\x95\x10\0\0", "starts with a pickle header", id="pickle"),
        pytest.param(
            b"\x40\x12\0\0\0\0\0\0" + b'{"a":{"dtype":"F32"}}',
            "starts with a safetensors header",
            id="safetensors",
        ),
        pytest.param(b"GGUF\x03\0\0\0", "starts with a GGUF header", id="GGUF"),
        pytest.param(b"PK\x03\x04\x14\0", "a zip archive, not a log; unpack it", id="zip"),
        pytest.param(b"vllm.log" + b"\0" * 249 + b"ustar\0", "a tar archive", id="tar"),
        pytest.param(
            gzip.compress(b"vllm.log" + b"\0" * 249 + b"ustar\0"), "a tar archive", id="tar.gz"
        ),
        pytest.param(b"LPKSHHRH\0\0", "journalctl --file", id="journal"),
        pytest.param(random.Random(3).randbytes(70_000), "of its start is control", id="random"),
        pytest.param(b"\x1f\x8b\x08\0broken", "damaged gzip data", id="broken gzip"),
        pytest.param(gzip.compress(TEXT.encode())[:10], "damaged gzip data", id="gzip header only"),
    ],
)
def test_what_is_no_log_is_refused_with_a_reason(data, message):
    with pytest.raises(LogReadError) as caught:
        read_source(io.BytesIO(data), name="vllm.log")
    assert str(caught.value).startswith("vllm.log: ")
    assert message in str(caught.value)
    assert caught.value.hint


def test_the_message_says_what_and_what_to_give():
    with pytest.raises(LogReadError) as caught:
        read_source(io.BytesIO(b"\x7fELF"), name="vllm.log")
    assert str(caught.value) == (
        "vllm.log: not text (starts with an ELF header); "
        'give the server\'s log, e.g. "docker logs NAME > vllm.log 2>&1"'
    )


def test_a_missing_file_names_one_like_it(tmp_path):
    (tmp_path / "vllm.log").write_text("x")
    with pytest.raises(LogReadError, match=r"no such file; did you mean .*vllm\.log"):
        read_source(tmp_path / "vlm.log")
    with pytest.raises(LogReadError, match="no such file; check the path"):
        read_source(tmp_path / "no" / "folder")


def test_a_directory_and_a_bad_path(tmp_path):
    with pytest.raises(LogReadError, match="a directory, not a log"):
        read_source(tmp_path)
    with pytest.raises(LogReadError, match=r"can't be opened \("):
        read_source(str(tmp_path / "x\0y"))
    with pytest.raises(LogReadError, match=r"can't be opened \("):
        read_source(str(tmp_path / ("x" * 5_000)))


def test_no_permission(tmp_path, monkeypatch):
    path = tmp_path / "vllm.log"
    path.write_text("x")

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LogReadError, match="no permission to read it; ask its owner"):
        read_source(path)


def test_an_error_at_the_first_read():
    with pytest.raises(LogReadError, match=r"can't be read \(input/output error\)"):
        read_source(Failing(b""))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\x1b[32mINFO\x1b[0m \x1b]0;title\x07 ok \x08\n", id="terminal"),
        pytest.param("INFO ok\n" * 10 + "\x01\x02\n", id="a few control bytes"),
        pytest.param("%PD\n", id="almost a header"),
        pytest.param('abcdefgh{"a": 1}\n', id="almost safetensors"),
        pytest.param("模型加载失败\n" * 50, id="Chinese"),
    ],
)
def test_odd_text_is_text(text):
    assert read_source(io.BytesIO(text.encode())).total_lines == text.count("\n")


def test_text_in_an_unknown_eight_bit_code_is_text():
    data = "INFO 模型加载失败: out of memory\n".encode("gbk") * 100
    assert read_source(io.BytesIO(data)).total_lines == 100


# Large inputs

CRASH = [
    "ERROR [core.py:708] Traceback (most recent call last):",
    'ERROR [core.py:708]   File "core.py", line 1, in step',
    "ERROR [core.py:708] torch.OutOfMemoryError: CUDA out of memory.",
]
ANCHORS = Anchors.compile([r"CUDA out of memory", r"Traceback \(most recent call last\)"])


def large_log(megabytes: int, crashes: tuple[int, ...]) -> bytes:
    """About that many MB of numbered lines; a crash begins at each of the given line numbers."""
    fill = ' INFO 10.0.0.1:5000 - "POST /v1/chat/completions HTTP/1.1" 200 OK and some more'
    lines = [f"{number}{fill}" for number in range(1, megabytes * 12_000)]
    for number in crashes:
        lines[number - 1 : number - 1 + len(CRASH)] = CRASH
    return "\n".join(lines).encode() + b"\n"


@pytest.fixture(scope="module")
def log_30mb() -> bytes:
    return large_log(30, (3_000, 100_000, 200_123, 350_000))


def check_30mb(text: source.RawText) -> None:
    assert text.total_lines == 30 * 12_000 - 1
    assert text.has_gaps
    assert not text.truncated
    by_number = dict(numbered(text.lines))
    assert list(by_number) == sorted(by_number)
    for number in (3_000, 100_000, 200_123, 350_000):
        assert [by_number[number + offset] for offset in range(3)] == CRASH
        assert set(range(number - 150, number + 2 + 61)) <= set(by_number)
        assert number - 151 not in by_number
        assert number + 2 + 61 not in by_number
    assert set(range(1, 2_001)) <= set(by_number)
    assert set(range(360_000 - 1_500, 360_000)) <= set(by_number)
    assert len(by_number) == 2_000 + 1_500 + 4 * (150 + 3 + 60)
    for number, line in by_number.items():
        assert line.startswith(f"{number} ") or line in CRASH


def test_a_large_file_keeps_the_surroundings_of_its_incidents(log_30mb, tmp_path):
    path = tmp_path / "big.log"
    path.write_bytes(log_30mb)
    text = read_source(path, anchors=ANCHORS)
    check_30mb(text)
    assert text.total_bytes == len(log_30mb)


@pytest.mark.parametrize(
    "encode",
    [
        pytest.param(lambda data: gzip.compress(data, 1), id="gzip"),
        pytest.param(zstd, id="zstd"),
        pytest.param(lambda data: data.decode().encode("utf-16"), id="utf-16"),
    ],
)
def test_a_large_file_of_another_format_gives_the_same(encode, log_30mb):
    check_30mb(read_source(io.BytesIO(encode(log_30mb)), anchors=ANCHORS))


def test_a_large_pipe_gives_the_same(log_30mb):
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as out:
            out.write(log_30mb)

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        check_30mb(read_source(pipe, anchors=ANCHORS))
    writer.join()


def test_without_anchors_a_large_file_keeps_its_ends(log_30mb):
    text = read_source(io.BytesIO(log_30mb))
    assert len(text.lines) == 3_500
    assert text.lines[-1].number == text.total_lines == 359_999


def test_at_the_limit_every_line_is_kept(monkeypatch):
    monkeypatch.setattr(source, "SMALL", 70_000)
    small, large = b"x" * 6 + b"\n", b"x" * 7 + b"\n"
    assert not read_source(io.BytesIO(small * 10_000)).has_gaps
    assert read_source(io.BytesIO(large * 10_000)).has_gaps


def test_millions_of_empty_lines_stay_small():
    text = read_source(io.BytesIO(b"INFO start\n" + b"\n" * 5_000_000))
    assert (text.total_lines, len(text.lines), text.has_gaps) == (5_000_001, 3_500, True)


def test_too_many_regions_are_dropped_with_a_note(monkeypatch):
    monkeypatch.setattr("diag.log.scan.HEAD_BUDGET", 3_000_000)
    monkeypatch.setattr("diag.log.scan.TAIL_BUDGET", 3_000_000)
    data = b"CUDA out of memory\n" * 1_000_000
    text = read_source(io.BytesIO(data), anchors=ANCHORS)
    assert text.truncated
    assert text.has_gaps
    assert "from the middle were left out" in text.notes[0]
    assert text.lines[0].number == 1
    assert text.lines[-1].number == text.total_lines == 1_000_000


def test_a_long_line_is_cut_and_said():
    data = b"one\n" + b"x" * 100_000 + b"CUDA out of memory" + b"y" * 100_000 + b"\nthree\n"
    text = read_source(io.BytesIO(data), anchors=ANCHORS)
    assert [(line.number, line.cut) for line in text.lines] == [(1, False), (2, True), (3, False)]
    assert "CUDA out of memory" in text.lines[1].text
    assert len(text.lines[1].text) <= MAX_LINE
    assert text.truncated
    assert text.notes == ("line 2 was longer than 64 KiB and was cut",)


def test_long_lines_in_a_large_file_keep_their_numbers():
    long = b"x" * 100_000 + b"CUDA out of memory" + b"y" * 100_000 + b"\n"
    data = b"short line\n" * 500_000 + long + b"short line\n" * 500_000 + long
    text = read_source(io.BytesIO(data), anchors=ANCHORS)
    assert [line.number for line in text.lines if line.cut] == [500_001, 1_000_002]
    assert text.total_lines == 1_000_002
    assert text.notes == ("2 lines, the first 500001, were longer than 64 KiB and were cut",)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_line_of_200_mb_takes_little_memory():
    code = """if True:
        import io, json, pathlib, re
        from diag.log.source import Anchors, read_source
        class Stream(io.RawIOBase):
            left = 200
            def read(self, size=-1):
                self.left -= 1
                middle = b"CUDA out of memory" if self.left == 100 else b""
                return b"x" * 1_000_000 + middle if self.left >= 0 else b""
        text = read_source(Stream(), anchors=Anchors.compile(["CUDA out of memory"]))
        (line,) = text.lines
        status = pathlib.Path("/proc/self/status").read_text()
        peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status).group(1)) // 1024
        print(json.dumps([len(line.text), "CUDA out of memory" in line.text, text.total_bytes, peak]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True
    )
    length, found, size, peak = json.loads(done.stdout)
    assert (found, size) == (True, 200_000_018)
    assert length <= MAX_LINE
    assert peak < 100  # MiB
