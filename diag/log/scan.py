"""The fast scan: chunks of bytes -> the lines worth parsing, with their numbers, in bounded memory.

Three steps: `line_blocks` cuts chunks into blocks of whole lines and shortens huge lines, `Anchors`
finds the lines that matter (RE2, one alternation), `Regions` keeps those with their surroundings,
the head and the tail. No step loops over all lines: newlines are searched only around hits.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from diag.units import KIB, MIB

MAX_LINE = 64 * KIB  # a longer line is cut to its start, windows around anchors, and its end
LINE_TAIL = 16 * KIB  # bytes kept of the end of a cut line
WINDOW = 4 * KIB  # bytes kept around an anchor in the middle of a cut line
WINDOWS = 4  # such windows a line
GAP = b" ... "  # stands for what was left out of a cut line

BEFORE, AFTER = 150, 60  # lines kept around a line with an anchor
HEAD_LINES, TAIL_LINES = 2_000, 1_500  # kept at both ends of the file
TAIL_BYTES = 8 * MIB  # ... but not more than this at the end

# Memory: a kept line costs its bytes and about LINE_COST for its objects. The first HEAD_BUDGET and
# the last TAIL_BUDGET of the regions stay.
LINE_COST = 140
HEAD_BUDGET, TAIL_BUDGET = 6 * MIB, 12 * MIB
PART_COST = MIB  # larger pieces are split
# When more than THRIFT is kept, hits that look like earlier ones get less context, so that a
# warning repeated for weeks does not push out the one crash between.
THRIFT = 4 * MIB
REPEATS = ((50, BEFORE, AFTER), (1_000, 10, 10))  # (up to this many repeats, before, after)
RARE_CONTEXT = (2, 2)  # beyond
SIGNATURES = 4_096  # different hits told apart

# A block with more hits than DENSE is sampled: after each hit the search goes on STRIDE bytes
# later; the lines jumped over are kept.
DENSE, STRIDE = 100, 4 * KIB

_RE2_MEMORY = 96 << 20  # below 64 MiB the catalogue's automaton is rebuilt all the time
_DIGITS = b"0123456789"
_CONTINUATION = bytes(range(0x80, 0xC0))

Span = tuple[int, int]


class Anchors:
    """Patterns that tell a line worth parsing, as one alternation over bytes.

    Compiled at the first search. `^` and `$` are dropped, since a raw line has prefixes and perhaps
    a carriage return. A pattern that can't be compiled or matches the empty text is left out and
    listed in `rejected`. A line that only a `plain` pattern finds is worth keeping without what
    stands around it.
    """

    def __init__(self, make: Callable[[], tuple[Sequence[str], Sequence[str]]]) -> None:
        self._make = make
        self.rejected: tuple[str, ...] = ()

    @classmethod
    def compile(cls, patterns: Sequence[str], plain: Sequence[str] = ()) -> Anchors:
        """Anchors from RE2 pattern strings."""
        return cls(lambda: (patterns, plain))

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """All patterns, made when they are first needed: a small log never does."""
        telling, plain = self._make()
        return (*telling, *plain)

    @cached_property
    def _telling(self) -> Anchors | None:
        telling, plain = self._make()
        return Anchors.compile(telling) if plain else None

    def search_telling(self, data: bytes, hit: Span, end: int) -> Span | None:
        """The first match that is not plain, from the line of a hit to `end`."""
        if self._telling is None:
            return hit
        start = data.rfind(b"\n", 0, hit[0]) + 1
        span = self._telling.search(data[start:end])
        return (start + span[0], start + span[1]) if span else None

    def search(self, data: bytes, pos: int = 0) -> Span | None:
        """Start and end of the first match at or after `pos`; a match never spans a newline."""
        return self._search(data, pos)

    @cached_property
    def _search(self) -> Callable[[bytes, int], Span | None]:
        try:
            import re2  # noqa: F401 - only asked for
        except ImportError:
            make = _regex_search
        else:
            make = _re2_search
        parts = [_loosen(pattern) for pattern in self.patterns]
        search = _compiled(parts, make)
        if search is None:
            fit = [part for part in parts if _compiled([part], make) is not None]
            self.rejected = tuple(
                pattern
                for pattern, part in zip(self.patterns, parts, strict=True)
                if part not in fit
            )
            search = _compiled(fit, make)
        return search or (lambda _data, _pos: None)


_Search = Callable[[bytes, int], "Span | None"]


def _compiled(parts: Sequence[str], make: Callable[[bytes], _Search]) -> _Search | None:
    """The search for an alternation; None if it does not compile or matches the empty text."""
    if not parts:
        return None
    try:
        search = make("|".join(f"(?:{part})" for part in parts).encode())
    except (ValueError, re.error):
        return None
    return None if search(b"", 0) else search


def _re2_search(pattern: bytes) -> _Search:
    import re2

    options = re2.Options()
    options.never_nl = True
    options.never_capture = True
    options.max_mem = _RE2_MEMORY
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        raise ValueError(str(error)) from error

    def search(data: bytes, pos: int) -> Span | None:
        found = compiled.search(data, pos)
        return (found.start(), found.end()) if found else None

    return search


def _regex_search(pattern: bytes) -> _Search:
    """The slow stand-in where google-re2 has no wheel: same result, a hundredth of the speed."""
    import regex

    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(str(error)) from error

    def search(data: bytes, pos: int) -> Span | None:
        while True:
            found = compiled.search(data, pos)
            if found is None:
                return None
            end = data.find(b"\n", found.start())
            if end < 0 or found.end() <= end:
                return found.start(), found.end()
            # It ran over a newline: is there a match that ends in its first line?
            found = compiled.search(data, found.start(), end)
            if found is not None:
                return found.start(), found.end()
            pos = end + 1

    return search


_TOKENS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|\(\?P?<\w+>|[\^$]|\{(\d+)(?:,(\d*))?\}", re.DOTALL
)
_EXACT_REPEATS = 8  # up to this many repeats are counted
_FLAGS = re.compile(r"\(\?([ims]+)\)")


def _loosen(pattern: str) -> str:
    r"""A pattern that finds all that this one does, and that an automaton is quick to search for.

    Without `^`, `$` and group names; large counts become `*` or `+`, since RE2 would need a state for
    each number (and a pattern that begins with `[^:]{1,200}` slows all others down to nothing);
    leading flags are bound to it.

    >>> print(_loosen(r"(?i)^(?P<what>killed) [^$]{1,80}\$\d{2}$"))
    (?i:(?:killed) [^$]+\$\d{2})
    """
    loose = _TOKENS.sub(_loose_token, pattern)
    flags = _FLAGS.match(loose)
    return f"(?{flags.group(1)}:{loose[flags.end() :]})" if flags else loose


def _loose_token(token: re.Match[str]) -> str:
    text = token.group()
    if text in ("^", "$"):
        return ""
    if text.startswith("("):
        return "(?:"
    low, high = token.group(1, 2)
    if low is None or (high != "" and int(high or low) <= _EXACT_REPEATS):
        return text
    return "+" if int(low) else "*"


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines, each with its newline. `cuts`: offsets of the lines that were shortened."""

    data: bytes
    cuts: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of lines; counted anew each time."""
        return self.data.count(b"\n")

    def cut_lines(self, first: int) -> Iterator[int]:
        """Numbers of the shortened lines when the block's first line has the number `first`."""
        return (first + self.data.count(b"\n", 0, offset) for offset in self.cuts)


@dataclass(frozen=True, slots=True)
class Piece:
    """Lines: the number of the first, their count, their bytes, each line with its newline."""

    first: int
    count: int
    data: bytes

    @property
    def last(self) -> int:
        """Number of the last line."""
        return self.first + self.count - 1

    @property
    def cost(self) -> int:
        """Bytes the lines take in memory, about."""
        return len(self.data) + LINE_COST * self.count

    def parts(self) -> Iterator[Piece]:
        """The piece in parts of about PART_COST at most, so that a budget can drop some of them."""
        first, start = self.first, 0
        if self.cost > PART_COST:
            step = max(len(self.data) * PART_COST // self.cost, MAX_LINE + 1)
            while len(self.data) - start > step:
                end = self.data.rfind(b"\n", start, start + step) + 1
                count = self.data.count(b"\n", start, end)
                yield Piece(first, count, self.data[start:end])
                first, start = first + count, end
        yield Piece(first, self.last + 1 - first, self.data[start:]) if start else self


def line_blocks(chunks: Iterable[bytes], anchors: Anchors | None = None) -> Iterator[Block]:
    """Blocks of whole lines, none longer than MAX_LINE, from chunks cut anywhere."""
    pending = b""  # the start of a line, at most MAX_LINE bytes
    long: _LongLine | None = None
    for chunk in chunks:
        start = 0
        if long is not None:
            start = chunk.find(b"\n") + 1
            if not start:
                long.feed(chunk)
                continue
            long.feed(chunk[: start - 1])
            yield Block(long.finish() + b"\n", (0,))
            long = None
        end = chunk.rfind(b"\n", start) + 1
        if end:
            yield _shorten(b"".join((pending, memoryview(chunk)[start:end])), anchors)
            pending = chunk[end:]
        else:
            pending += chunk[start:]
        if len(pending) > MAX_LINE:
            long = _LongLine(anchors)
            long.feed(pending)
            pending = b""
    if long is not None:
        yield Block(long.finish() + b"\n", (0,))
    elif pending:
        yield Block(pending + b"\n")


def _shorten(data: bytes, anchors: Anchors | None) -> Block:
    """The block with its long lines cut. Hops from newline to newline in steps of MAX_LINE."""
    done: list[bytes] = []
    cuts: list[int] = []
    copied = size = pos = 0
    while len(data) - pos > MAX_LINE:
        end = data.rfind(b"\n", pos, pos + MAX_LINE + 1)
        if end < 0:
            end = data.find(b"\n", pos + MAX_LINE)
            line = _LongLine(anchors)
            line.feed(data[pos:end])
            cuts.append(size + pos - copied)
            done += (data[copied:pos], line.finish())
            size += len(done[-2]) + len(done[-1])
            copied = end
        pos = end + 1
    if cuts:
        data = b"".join((*done, data[copied:]))
    return Block(data, tuple(cuts))


class _LongLine:
    """A line longer than MAX_LINE, fed in parts: its start, windows around anchors, its end."""

    _KEEP = MAX_LINE - LINE_TAIL  # of the start, until the windows' need is known
    _OVERLAP = WINDOW  # an anchor across two parts may be as long as this

    def __init__(self, anchors: Anchors | None) -> None:
        self._anchors = anchors
        self._total = 0
        self._head = b""
        self._tail = b""
        self._windows: list[tuple[int, bytes]] = []
        # The start of the line surely kept needs no search.
        self._next = self._KEEP - WINDOWS * (WINDOW + len(GAP)) - len(GAP)

    def feed(self, part: bytes) -> None:
        base = self._total - len(self._tail)
        data = self._tail + part
        self._total += len(part)
        if len(self._head) < self._KEEP:
            self._head += part[: self._KEEP - len(self._head)]
        if self._anchors is not None:
            self._find_windows(self._anchors, data, base)
        self._tail = data[-LINE_TAIL:]

    def _find_windows(self, anchors: Anchors, data: bytes, base: int) -> None:
        while len(self._windows) < WINDOWS:
            pos = max(self._next - base, 0)
            span = anchors.search(data, pos) if pos < len(data) else None
            if span is None:
                self._next = max(self._next, base + len(data) - self._OVERLAP)
                return
            if span[0] + WINDOW // 2 > len(data):  # what follows is still to come, or in the tail
                self._next = base + span[0]
                return
            start = max(span[0] - WINDOW // 2, 0)
            if self._windows:
                before, kept = self._windows[-1]
                start = max(start, before + len(kept) - base)
            window = data[start : start + WINDOW]
            self._windows.append((base + start, window))
            self._next = base + start + len(window)

    def finish(self) -> bytes:
        """The shortened line, at most MAX_LINE bytes."""
        tail_start = self._total - len(self._tail)
        windows = [
            (start, window[: tail_start - start])
            for start, window in self._windows
            if start < tail_start
        ]
        spent = len(self._tail) + len(GAP) + sum(len(window) + len(GAP) for _, window in windows)
        head = self._head[: MAX_LINE - spent]
        parts, end = [_trim(head)], len(head)
        for start, window in (*windows, (tail_start, self._tail)):
            new = window[max(end - start, 0) :]
            if new:
                parts += (GAP, _trim(new)) if start > end else (new,)
                end = start + len(window)
        return b"".join(parts)


def _trim(part: bytes) -> bytes:
    """Without the halves of characters at both ends."""
    part = part.lstrip(_CONTINUATION)
    if part[-1:] >= b"\x80":
        part = part.rstrip(_CONTINUATION)[:-1]
    return part


class Store:
    """Kept pieces: the first ones up to HEAD_BUDGET, the last ones up to TAIL_BUDGET."""

    def __init__(self) -> None:
        self._head: deque[Piece] = deque()
        self._tail: deque[Piece] = deque()
        self._tail_cost = 0
        self.cost = 0  # of everything kept
        self.lines = 0  # kept
        self.dropped = 0  # lines of regions that found no room

    def add(self, piece: Piece) -> None:
        """Keep a piece; drop the oldest of the tail when there is no room."""
        for part in piece.parts():
            self._add(part)

    def _add(self, piece: Piece) -> None:
        self.cost += piece.cost
        self.lines += piece.count
        if not self._tail and self.cost <= HEAD_BUDGET:
            self._head.append(piece)
            return
        self._tail.append(piece)
        self._tail_cost += piece.cost
        while self._tail_cost > TAIL_BUDGET and len(self._tail) > 1:
            old = self._tail.popleft()
            self._tail_cost -= old.cost
            self.cost -= old.cost
            self.lines -= old.count
            self.dropped += old.count

    def take(self) -> Iterator[Piece]:
        """The pieces in order; each is given up as it is handed out."""
        for part in (self._head, self._tail):
            while part:
                yield part.popleft()


@dataclass(slots=True)
class _Region:
    """Lines to keep of one block, by number; each end with a (line number, offset) near it."""

    low: int
    low_point: Span
    high: int
    high_point: Span


class Regions:
    """Keeps the head, the tail and the surroundings of the hits of a stream of blocks."""

    def __init__(self, anchors: Anchors | None) -> None:
        self._anchors = anchors
        self.store = Store()
        self.total_lines = 0
        self.cut_lines: set[int] = set()
        self._done = 0  # the last line stored
        self._until = HEAD_LINES  # the last line wanted so far
        self._recent: deque[Piece] = deque()  # whole blocks: the tail, and what comes before a hit
        self._recent_lines = self._recent_bytes = 0
        self._seen: dict[bytes, int] = {}

    def add(self, block: Block) -> None:
        """Take the next block."""
        first = self.total_lines + 1
        regions, count = self._wanted(block.data, first)
        self.total_lines += count
        self.cut_lines.update(block.cut_lines(first))
        piece = Piece(first, count, block.data)
        for region in regions:
            self._keep(piece, region)
        self._remember(piece)

    def finish(self) -> None:
        """Keep the tail. Call once, after the last block."""
        self._keep_recent(self.total_lines - TAIL_LINES + 1)

    def _wanted(self, data: bytes, first: int) -> tuple[list[_Region], int]:
        """The regions of a block that starts with line `first`, and the number of its lines.

        Lines are counted from hit to hit, so that the block is passed over only once.
        """
        regions: list[_Region] = []
        if self._until >= first:
            regions.append(_Region(first, (first, 0), self._until, (first, 0)))
        hits = 0
        line, offset = first, 0  # `line` begins at `offset`; newlines before it are counted
        while offset < len(data) and (span := self._search(data, offset)):
            hits += 1
            begin = data.rfind(b"\n", offset, span[0]) + 1 or offset
            line += data.count(b"\n", offset, begin)
            jump = min(span[0] + (STRIDE if hits > DENSE else 0), len(data) - 1)
            offset = data.find(b"\n", jump) + 1
            before, after = self._context(data, span, offset)
            low = max(line - before, self._done + 1)
            low_point = (line, begin)
            line += data.count(b"\n", begin, offset)
            high = line - 1 + after
            if regions and low <= regions[-1].high + 1:
                if high > regions[-1].high:
                    regions[-1].high, regions[-1].high_point = high, (line, offset)
            else:
                regions.append(_Region(low, low_point, high, (line, offset)))
        return regions, line + data.count(b"\n", offset) - first

    def _search(self, data: bytes, pos: int) -> Span | None:
        return self._anchors.search(data, pos) if self._anchors is not None else None

    def _context(self, data: bytes, hit: Span, end: int) -> Span:
        """Lines before and after a hit: none around a plain one, fewer around what was seen often.

        `end` is where the search goes on: a sampled block may hold more than one line up to there.
        """
        span = self._anchors.search_telling(data, hit, end) if self._anchors is not None else hit
        if span is None:
            return 0, 0
        key = data[span[0] : min(span[1], span[0] + 64)].translate(None, _DIGITS)[:40]
        times = self._seen.get(key, 0) + 1
        if times > 1 or len(self._seen) < SIGNATURES:
            self._seen[key] = times
        else:
            times = REPEATS[0][0] + 1
        if self.store.cost < THRIFT:
            return BEFORE, AFTER
        return next(((low, high) for limit, low, high in REPEATS if times <= limit), RARE_CONTEXT)

    def _keep(self, block: Piece, region: _Region) -> None:
        if region.low < block.first:
            self._keep_recent(region.low)
        start, low = 0, max(region.low, block.first)
        if low > block.first:
            start = _back(block.data, region.low_point[1], region.low_point[0] - low)
        end, high = len(block.data), min(region.high, block.last)
        if high < block.last:
            end = _forward(block.data, region.high_point[1], high + 1 - region.high_point[0])
        self.store.add(Piece(low, high - low + 1, block.data[start:end]))
        self._done = high
        self._until = region.high

    def _keep_recent(self, low: int) -> None:
        """Store the lines from `low` to the end of the recent blocks that are not stored yet."""
        low = max(low, self._done + 1)
        for piece in self._recent:
            if piece.last >= low:
                count = piece.last - max(low, piece.first) + 1
                start = _back(piece.data, len(piece.data), count) if count < piece.count else 0
                self.store.add(Piece(piece.last - count + 1, count, piece.data[start:]))
                self._done = piece.last

    def _remember(self, piece: Piece) -> None:
        self._recent.append(piece)
        self._recent_lines += piece.count
        self._recent_bytes += len(piece.data)
        while len(self._recent) > 1 and (
            self._recent_lines - self._recent[0].count >= max(TAIL_LINES, BEFORE)
            or self._recent_bytes > TAIL_BYTES
        ):
            old = self._recent.popleft()
            self._recent_lines -= old.count
            self._recent_bytes -= len(old.data)


def _back(data: bytes, offset: int, lines: int) -> int:
    """Start of the line that is `lines` lines before the one that begins at `offset`."""
    for _ in range(lines):
        offset = data.rfind(b"\n", 0, offset - 1) + 1
    return offset


def _forward(data: bytes, offset: int, lines: int) -> int:
    """Start of the line that is `lines` lines after the one that begins at `offset`."""
    for _ in range(lines):
        offset = data.find(b"\n", offset) + 1
    return offset
