"""A file, stdin, an archive or pasted text -> numbered raw lines (RawText), in bounded memory.

Up to SMALL bytes every line is kept. A larger input is streamed: its first and last lines stay, and
the lines around each anchor (see `scan`). Line numbers are those of the whole input. The log itself
never raises; input that can't be read as a log (missing, a directory, binary, empty) is a
LogReadError.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from diag.errors import Location, LogReadError
from diag.log.decode import GIVE_A_LOG, TextChunks
from diag.log.model import RawLine
from diag.log.scan import MAX_LINE, Anchors, Block, Piece, Regions, line_blocks
from diag.units import KIB, MIB, format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["MAX_LINE", "SMALL", "SMALL_LINES", "Anchors", "RawText", "read_source", "read_text"]

SMALL = 8 * MIB  # bytes of text up to which every line is kept ...
SMALL_LINES = 250_000  # ... if there are not more lines than this


@dataclass(frozen=True, slots=True, kw_only=True)
class RawText:
    """The lines of an input, or of a large input those worth parsing, in order."""

    name: str
    lines: tuple[RawLine, ...]
    total_lines: int  # of the whole input
    total_bytes: int  # of the whole input, after unpacking
    formats: tuple[str, ...]  # "gzip", "zstd", "bzip2", "xz", "utf-16-le", "crlf", "nul_bytes", ...
    truncated: bool  # lines cut, regions dropped, or the input ended in the middle
    notes: tuple[str, ...]  # sentences for the user
    has_gaps: bool  # lines were left out between regions


def read_source(
    source: str | os.PathLike[str] | BinaryIO | None,
    *,
    name: str | None = None,
    anchors: Anchors | None = None,
) -> RawText:
    """The lines of a path, of stdin ("-" or None) or of an open binary stream, which is not closed.

    `name` is what the report calls it. Without `anchors` a large input keeps its two ends only.
    Raises LogReadError when there is no text to read.
    """
    with ExitStack() as stack:
        if source is None or source == "-":
            stream: BinaryIO = sys.stdin.buffer
            label = name or "<stdin>"
        elif isinstance(source, (str, os.PathLike)):
            label = name or os.fspath(source)
            stream = stack.enter_context(_open(Path(source), label))
        else:
            stream = source
            given = getattr(source, "name", None)
            label = name or (given if isinstance(given, str) else "<stream>")
        return _read(stream, label, anchors)


def read_text(text: str, name: str = "<text>", *, anchors: Anchors | None = None) -> RawText:
    """The lines of a text at hand. Raises LogReadError when it is empty or binary."""
    return _read(io.BytesIO(text.encode("utf-8", "replace")), name, anchors)


def _open(path: Path, label: str) -> BinaryIO:
    where = Location(label)
    try:
        if path.is_dir():
            raise LogReadError(
                "a directory, not a log", location=where, hint="give one of the files in it"
            )
        return path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise LogReadError("no such file", location=where, hint=_similar(path)) from error
    except PermissionError as error:
        hint = f'ask its owner, or pipe it: "sudo cat {path} | oomdoc explain -"'
        raise LogReadError("no permission to read it", location=where, hint=hint) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise LogReadError(
            f"can't be opened ({reason[:1].lower()}{reason[1:]})", location=where, hint=GIVE_A_LOG
        ) from error


def _similar(path: Path) -> str:
    """A hint for a missing file: a name like it in the same folder, if there is one."""
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_file()]
    except OSError:
        names = []
    import difflib

    close = difflib.get_close_matches(path.name, names[:1_000], n=1)
    if close:
        return f'did you mean "{path.parent / close[0]}"?'
    return 'check the path, or read from a pipe with "-"'


def _read(stream: BinaryIO, name: str, anchors: Anchors | None) -> RawText:
    chunks = TextChunks(stream, name)
    source = _Watched(chunks)
    blocks = line_blocks(source, anchors)
    held, size, total_lines = [], 0, 0
    for block in blocks:
        held.append(block)
        size += len(block.data)
        total_lines += block.count
        if size > SMALL or total_lines > SMALL_LINES:
            break
    notes: list[str] = []
    has_gaps = truncated = False
    if size > SMALL or total_lines > SMALL_LINES:
        regions = Regions(anchors)
        _feed(regions, held, blocks)
        store, total_lines, cut = regions.store, regions.total_lines, regions.cut_lines
        has_gaps = store.lines < total_lines
        if store.dropped:
            truncated = True
            count = format_count(store.dropped)
            notes.append(
                f"too much to keep: {count} lines from the middle were left out; "
                "cut the log to one run to see them"
            )
        lines = _raw_lines(store.take(), cut)
    else:
        pieces, cut = _pieces(held)
        held.clear()
        lines = _raw_lines(pieces, cut)
    if not source.seen_text:
        raise _empty(chunks, name)
    if cut:
        which = f"line {min(cut)}" if len(cut) == 1 else f"{len(cut)} lines, the first {min(cut)},"
        what = "was" if len(cut) == 1 else "were"
        notes.append(f"{which} {what} longer than {MAX_LINE // KIB} KiB and {what} cut")
    return RawText(
        name=name,
        lines=lines,
        total_lines=total_lines,
        total_bytes=chunks.total_bytes,
        formats=(*chunks.formats, *(("crlf",) if source.crlf else ())),
        truncated=truncated or bool(cut) or chunks.truncated,
        notes=(*chunks.notes, *notes),
        has_gaps=has_gaps,
    )


class _Watched:
    """Passes chunks on and remembers whether they held text and CRLF line ends."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self.seen_text = False
        self.crlf = False

    def __iter__(self) -> Iterator[bytes]:
        first = True
        for chunk in self._chunks:
            if first:
                self.crlf, first = b"\r\n" in chunk, False
            self.seen_text = self.seen_text or not chunk.isspace()
            yield chunk


def _feed(regions: Regions, held: list[Block], rest: Iterable[Block]) -> None:
    """All blocks into the regions; the held ones are given up one by one."""
    held.reverse()
    while held:
        regions.add(held.pop())
    for block in rest:
        regions.add(block)
    regions.finish()


def _pieces(blocks: Sequence[Block]) -> tuple[list[Piece], set[int]]:
    """All lines of some blocks, and the numbers of those that were cut."""
    pieces: list[Piece] = []
    cut: set[int] = set()
    first = 1
    for block in blocks:
        count = block.count
        cut.update(block.cut_lines(first))
        pieces.append(Piece(first, count, block.data))
        first += count
    return pieces, cut


def _raw_lines(pieces: Iterable[Piece], cut: set[int]) -> tuple[RawLine, ...]:
    lines: list[RawLine] = []
    for piece in pieces:
        texts = piece.data.decode("utf-8", "replace").split("\n")
        texts.pop()  # what follows the last newline: nothing
        lines += [
            RawLine(number, text.rstrip("\r"), number in cut)
            for number, text in enumerate(texts, piece.first)
        ]
    return tuple(lines)


def _empty(chunks: TextChunks, name: str) -> LogReadError:
    message = "empty" if not chunks.total_bytes else "empty (only white space)"
    if chunks.truncated and chunks.notes:
        message = f"nothing to read: {chunks.notes[0]}"
    return LogReadError(message, location=Location(name), hint=GIVE_A_LOG)
