"""Makes the log: physical lines in, cleaned LogLines with their speakers out.

The order: states painted over each other, colours and decoration; hard wraps; wrappers and JSON;
lines glued together; logger prefixes. Each step runs only where its signs are in the text.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diag.log import clean, rewrap
from diag.log.model import Log, LogLine, RawLine, Speaker
from diag.log.prefixes import Prefix, parse_prefix
from diag.log.records import Record, is_pretty_export, read_json_line, read_pretty
from diag.log.wrappers import HEAD, Wrappers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_JOINED = 1 << 18  # characters of one message put together from parts
_FRAME = re.compile(r' {0,8}\bFile "[^"]{1,400}", line \d+, in [^\s()]+\s?')
_ONE_LINE_MARK = re.compile(
    r"(?<=\s)(?=Traceback \(most recent call last\):|During handling of the above exception"
    r"|The above exception was the)"
)
_ERROR_NAME = re.compile(
    r"(?<=\s)(?=(?:[a-z_]\w{0,60}\.){0,8}"
    r"[A-Z]\w{0,60}(?:Error|Exception|Interrupt|OutOfResources): )"
)
_LETTER = re.compile(r"[^\W\d_]")
# What follows a process prefix when it begins a line of its own.
_SAYS = re.compile(
    r"Traceback \(most|  File \"|\[rank|(?:INFO|ERROR|WARNING)\b"
    r"|(?:[a-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt)\b"
)


@dataclass(slots=True)
class _Piece:
    """A line on its way: physical numbers, text, and what its wrappers or record said."""

    first: int
    last: int
    text: str
    service: str | None = None
    process: str | None = None
    record: Record | None = None
    stamp: str | None = None
    partial: bool = False


def read_lines(
    raw: Iterable[RawLine],
    *,
    name: str,
    total_lines: int,
    total_bytes: int,
    formats: Sequence[str] = (),
    truncated: bool = False,
    notes: Sequence[str] = (),
) -> Log:
    """The log of these physical lines.

    `total_lines` and `total_bytes` describe the whole input, of which `raw` may be a part. Formats
    and notes met here are added to the given ones. Never raises on the text.
    """
    met: dict[str, int] = {}
    remarks = list(notes)
    cut = truncated
    pieces: list[_Piece] = []
    for line in raw:
        cut = cut or line.cut
        _clean_into(pieces, line, met)
    pieces = _expand_export(pieces, met)
    pieces, wrap = _rejoin(pieces)
    pieces, wrapped = _unwrap(pieces, met)
    if wrapped and wrap is None:
        pieces, wrap = _rejoin(pieces)
    if wrap is not None:
        met[f"{'word' if wrap.at_blanks else 'hard'}_wrapped:{wrap.width}"] = 1
        remarks.append(
            f"Lines were wrapped at {wrap.width} columns and have been put together again."
        )
    pieces = _in_time_order(pieces, remarks)
    speakers: dict[tuple[object, ...], Speaker] = {}
    lines: list[LogLine] = []
    for piece in pieces:
        _parse_into(lines, piece, speakers, met)
    return Log(
        name=name,
        lines=tuple(lines),
        total_lines=total_lines,
        total_bytes=total_bytes,
        formats=tuple(dict.fromkeys([*formats, *met])),
        truncated=cut,
        notes=tuple(remarks),
    )


def _clean_into(pieces: list[_Piece], line: RawLine, met: dict[str, int]) -> None:
    """Appends the states of a physical line, cleaned."""
    text = line.text
    if text[-1:] == "\r":
        text = text.rstrip("\r")
    if (
        text.isascii()
        and text.isprintable()
        and not ("[" in text and "m" in text)
        and "&" not in text
    ):
        states = clean.split_states(text, met)  # nothing to strip but tags and decoration
    else:
        states = [clean.strip_screen(part, met) for part in text.split("\r")]
        states = clean.split_states("\r".join(states), met)
    for state in states:
        bare = clean.strip_screen(state, met) if "<" in state else state
        pieces.append(_Piece(line.number, line.number, clean.strip_decoration(bare, met)))


def _expand_export(pieces: list[_Piece], met: dict[str, int]) -> list[_Piece]:
    """The messages of a pretty-printed JSON export; any other log as it is."""
    texts = [piece.text for piece in pieces]
    if not is_pretty_export(texts):
        return pieces
    met["json_export"] = 1
    expanded = []
    for index, record in read_pretty(texts):
        number = pieces[index].first
        expanded += [
            _Piece(number, number, text, record=record, stamp=record.stamp)
            for text in record.text.split("\n")
        ]
    return expanded


def _rejoin(pieces: list[_Piece]) -> tuple[list[_Piece], rewrap.Wrap | None]:
    """Pieces of wrapped lines put together, and the wrap; None when nothing was wrapped."""
    texts = [piece.text for piece in pieces]
    wrap = rewrap.find_wrap(texts)
    if wrap is None:
        return pieces, None
    joined = []
    for part in rewrap.rejoin(texts, wrap):
        piece = pieces[part.first]
        piece.text = part.text
        piece.last = pieces[part.last].last
        joined.append(piece)
    return joined, wrap


def _unwrap(pieces: list[_Piece], met: dict[str, int]) -> tuple[list[_Piece], bool]:
    """Wrappers and JSON taken off, lines cut by a container runtime joined; was there any?"""
    wrappers = Wrappers([piece.text for piece in pieces])
    unwrapped: list[_Piece] = []
    for piece in pieces:
        for inner in _unwrap_one(piece, wrappers, met, 0):
            before = unwrapped[-1] if unwrapped else None
            if before is not None and before.partial and len(before.text) < _MAX_JOINED:
                before.text += inner.text
                before.last, before.partial = inner.last, inner.partial
            else:
                unwrapped.append(inner)
    for name, count in wrappers.formats.items():
        met[name] = met.get(name, 0) + count
    return unwrapped, bool(wrappers.formats)


def _unwrap_one(piece: _Piece, wrappers: Wrappers, met: dict[str, int], depth: int) -> list[_Piece]:
    text = piece.text
    if not text:
        return [piece]
    if text[0].isspace() and "::" not in text[:80] and text.lstrip()[:1] != "{":
        return [piece]  # code and frames; of the wrappers only Rust's tracing indents
    peeled = wrappers.peel(text)
    piece.text = peeled.text
    piece.service = peeled.service or piece.service
    piece.process = peeled.process or piece.process
    piece.partial = peeled.partial
    if depth < 3 and "{" in piece.text[:120] and '"' in piece.text:
        return _open_json(piece, wrappers, met, depth)
    return [piece]


def _open_json(piece: _Piece, wrappers: Wrappers, met: dict[str, int], depth: int) -> list[_Piece]:
    """The pieces inside a JSON record, which may stand behind a process prefix."""
    start = piece.text.find("{")
    if piece.text[:1] == "[" and piece.text[1:].lstrip()[:1] in "{[":
        start = 0
    before = piece.text[:start]
    if before.strip() and parse_prefix(before).text.strip():
        return [piece]
    records = read_json_line(piece.text[start:])
    if records is None:
        return [piece]
    met["json_lines"] = met.get("json_lines", 0) + 1
    inner: list[_Piece] = []
    for record in records:
        for text in record.text.replace("\r\n", "\n").split("\n"):
            for state in clean.split_states(clean.strip_screen(text, met), met):
                part = _Piece(
                    piece.first,
                    piece.last,
                    before + state,
                    service=record.service or piece.service,
                    process=piece.process,
                    record=record,
                    stamp=record.stamp,
                )
                inner += _unwrap_one(part, wrappers, met, depth + 1) if not before else [part]
        if inner:
            inner[-1].partial = record.partial
    return inner


def _in_time_order(pieces: list[_Piece], remarks: list[str]) -> list[_Piece]:
    """Turns an export round that lists the newest record first."""
    stamps = [piece.stamp for piece in pieces if piece.stamp]
    if len(stamps) < 10:
        return pieces
    falling = sum(1 for one, two in itertools.pairwise(stamps) if two < one)
    rising = sum(1 for one, two in itertools.pairwise(stamps) if two > one)
    if falling < 5 or falling < 20 * rising:
        return pieces
    remarks.append("The records ran from the newest to the oldest and have been turned round.")
    groups: list[list[_Piece]] = []
    for piece in pieces:
        if groups and groups[-1][-1].record is piece.record and piece.record is not None:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [piece for group in reversed(groups) for piece in group]


def _parse_into(
    lines: list[LogLine],
    piece: _Piece,
    speakers: dict[tuple[object, ...], Speaker],
    met: dict[str, int],
) -> None:
    """Appends the messages of a piece."""
    for text in _split_glued(piece.text):
        prefix = parse_prefix(text)
        record = piece.record
        if record is not None:
            _complete(prefix, record)
        process = prefix.process or piece.process
        if process is not None and "ray" not in met and process.lower().startswith("ray"):
            met["ray"] = 1
        key = (process, prefix.pid, prefix.rank, piece.service, prefix.host)
        speaker = speakers.get(key)
        if speaker is None:
            speaker = Speaker(
                process=process,
                pid=prefix.pid,
                rank=prefix.rank,
                service=piece.service,
                host=prefix.host,
            )
            speakers[key] = speaker
        lines.append(
            LogLine(
                number=piece.first,
                text=prefix.text.rstrip(),
                speaker=speaker,
                level=prefix.level,
                time=prefix.time,
                source=prefix.source,
                last_number=piece.last if piece.last != piece.first else None,
                repeated=prefix.repeated,
            )
        )


def _complete(prefix: Prefix, record: Record) -> None:
    """Fills from the keys of a JSON record what the text itself does not say."""
    prefix.level = prefix.level or record.level
    prefix.time = prefix.time or record.time
    prefix.source = prefix.source or record.source
    prefix.pid = prefix.pid if prefix.pid is not None else record.pid


def _split_glued(text: str) -> list[str]:
    """The messages of a line: glued log lines, or a traceback whose line feeds were lost."""
    parts = [text]
    if len(text) > 40 and _may_hold_second_head(text):
        starts = _head_starts(text)
        if starts and len(starts) <= 2000:
            bounds = [0, *starts, len(text)]
            parts = [text[a:b] for a, b in itertools.pairwise(bounds) if text[a:b].strip()]
    if text.count('File "') < 2:
        return parts
    return [piece for part in parts for piece in _split_traceback(part)]


def _may_hold_second_head(text: str) -> bool:
    """A cheap look for a logger prefix behind the first."""
    for level in ("INFO ", "ERROR ", "WARNING "):
        at = text.find(level, 1)
        while at > 0:
            after = text[at + len(level) : at + len(level) + 1]
            if after.isdigit():
                return True
            at = text.find(level, at + 1)
    return text.find("pid=", 1 if text[0] != "(" else text.find(")")) > 0


def _head_starts(text: str) -> list[int]:
    """Where further log lines begin in a line: a level with a date, or a process that says more."""
    own = HEAD.match(text)
    letter = _LETTER.search(text)
    words_from = letter.start() if letter else len(text)
    starts = []
    for match in HEAD.finditer(text, own.end() if own else 1):
        dated = match.group()[-1:] in ":-" or match.group()[-4:-3] == ":"
        if dated or (
            match.group()[:5] != "(pid="
            and (_SAYS.match(text, match.end()) or match.start() <= words_from)
        ):
            starts.append(match.start())
    return starts


def _split_traceback(text: str) -> list[str]:
    """Frames, source lines and the exception of a traceback on one line."""
    frames = list(_FRAME.finditer(text))
    if len(frames) < 2 and not (frames and "Traceback (most" in text):
        return [text]
    parts = [text[: frames[0].start()]]
    for frame, after in zip(frames, [*frames[1:], None], strict=True):
        parts.append("  " + frame.group().strip())
        rest = text[frame.end() : after.start() if after else len(text)]
        parts.append("    " + rest.strip() if rest.strip() else "")
    split: list[str] = []
    for part in parts:
        for mark in _ONE_LINE_MARK.split(part):
            split += _ERROR_NAME.split(mark, maxsplit=1)
    return [
        part.rstrip() if part[:2] == "  " and part.strip() else part.strip()
        for part in split
        if part.strip()
    ]
