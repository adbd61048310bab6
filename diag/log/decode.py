"""Bytes of any input -> UTF-8 chunks of about 1 MiB: unpacked, transcoded, without NUL bytes.

gzip, zstd, bzip2 and xz are told by their magic bytes, UTF-16/32 by BOM or by NUL bytes in every
second place. Damage in the middle (a cut archive, a read error) keeps what came before and leaves
a note; input that is no text at all raises LogReadError. Memory is bounded, also for hostile data.
"""

from __future__ import annotations

import bz2
import codecs
import lzma
import zlib
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO, Protocol

from diag.errors import Location, LogReadError
from diag.units import KIB, MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

CHUNK = MIB  # bytes asked for at once, and the size of the chunks handed on
SNIFF = 64 * KIB  # bytes that decide whether this is text
# Compressed bytes given to an unpacker at once. Small, so that hostile data can't blow up: zstd has
# no output limit and may write 128 KiB for 4 bytes.
_FEED = {"gzip": 32 * KIB, "bzip2": 32 * KIB, "xz": 32 * KIB, "zstd": 2 * KIB}
_XZ_MEMORY = 128 * MIB

GIVE_A_LOG = 'give the server\'s log, e.g. "docker logs NAME > vllm.log 2>&1"'
_UNPACK = "unpack it and give the log inside"

_PACKED = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
)
_ARCHIVES = (
    (b"PK\x03\x04", "a zip archive"),
    (b"PK\x05\x06", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x04\x22\x4d\x18", "lz4 data"),
    (b"\x1f\x9d", "compress (.Z) data"),
)
_BINARY = (
    (b"\x7fELF", "an ELF header"),
    (b"%PDF-", "a PDF header"),
    (b"\x89PNG\r\n", "a PNG header"),
    (b"\xff\xd8\xff", "a JPEG header"),
    (b"GIF8", "a GIF header"),
    (b"SQLite format 3\x00", "an SQLite header"),
    (b"GGUF", "a GGUF header"),
    (b"\x93NUMPY", "a NumPy header"),
    (b"\x89HDF\r\n", "an HDF5 header"),
    (b"PAR1", "a Parquet header"),
    (b"\xcf\xfa\xed\xfe", "a Mach-O header"),
    (b"\xca\xfe\xba\xbe", "a Java class header"),
    (b"\x80\x02", "a pickle header"),
    (b"\x80\x03", "a pickle header"),
    (b"\x80\x04\x95", "a pickle header"),
    (b"\x80\x05\x95", "a pickle header"),
)
_JOURNAL = b"LPKSHHRH"
_BOMS = (  # UTF-32 first: its little-endian mark begins like that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# C0 controls that no log holds; tab, newline, \r, \b, \f, ESC and BEL (terminal titles) do occur.
_CONTROL = bytes(sorted(set(range(0x20)) - set(b"\0\t\n\r\b\f\x1b\x07"))) + b"\x7f"


class TextChunks:
    """UTF-8 chunks of a binary stream. Iterate once; the other fields are complete at the end.

    Iterating raises LogReadError when the input is binary or can't be read at all.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.formats: list[str] = []
        self.notes: list[str] = []
        self.total_bytes = 0  # after unpacking, before transcoding
        self.truncated = False

    def __iter__(self) -> Iterator[bytes]:
        raw = self._read()
        start, raw = _peek(raw)
        self._refuse_archives(start)
        packing = next((kind for magic, kind in _PACKED if start.startswith(magic)), None)
        if packing is not None:
            self.formats.append(packing)
            raw = _gather(self._unpack(packing, raw))
            start, raw = _peek(raw)
            if not start and self.truncated:
                raise self._error(f"damaged {packing} data", "copy the file again")
            self._refuse_archives(start)
        self._refuse_binary(start)
        start, text = _peek(self._transcode(raw, *_encoding(start)))
        self._refuse_control_bytes(start[:SNIFF])
        nul_seen = False
        for chunk in text:
            if b"\0" in chunk:
                nul_seen = True
                chunk = chunk.replace(b"\0", b"")  # noqa: PLW2901 - the cleaned chunk takes its place
            if chunk:
                yield chunk
        if nul_seen:
            self.formats.append("nul_bytes")

    def _read(self) -> Iterator[bytes]:
        """The stream in pieces of CHUNK bytes; a read error ends it with a note."""
        parts: list[bytes] = []
        size, seen = 0, 0
        while True:
            try:
                part = self._stream.read(CHUNK - size)
            except (OSError, ValueError) as error:
                reason = _reason(error)
                if not seen and not size:
                    raise self._error(f"can't be read ({reason})", GIVE_A_LOG) from error
                self._stop(f"reading stopped after {format_size(seen + size)}: {reason}")
                part = b""
            if part:
                parts.append(part)
                size += len(part)
            if parts and (not part or size >= CHUNK):
                seen += size
                yield b"".join(parts) if len(parts) > 1 else parts[0]
                parts, size = [], 0
            if not part:
                return

    def _unpack(self, packing: str, raw: Iterable[bytes]) -> Iterator[bytes]:
        """Unpacked pieces of one or several members of an archive."""
        make = self._unpacker(packing)
        magic = next(magic for magic, kind in _PACKED if kind == packing)
        member, fresh, size = make(), True, 0
        try:
            for data in _slices(raw, _FEED[packing]):
                rest = data
                while rest:
                    if fresh:
                        rest = rest.lstrip(b"\0")  # padding, as tapes and block devices leave it
                        if not rest:
                            break
                        if not rest.startswith(magic[: len(rest)]):
                            self._note(f"bytes after the end of the {packing} data were ignored")
                            return
                    for piece in member.feed(rest):
                        size += len(piece)
                        yield piece
                    fresh, rest = False, b""
                    if member.eof:
                        rest = member.unused_data
                        member, fresh = make(), True
        except _UNPACK_ERRORS as error:
            self._stop(
                f"the {packing} data is damaged after {format_size(size)} of text "
                f"({_reason(error)}); what came before was read"
            )
            return
        if not fresh:
            self._stop(
                f"the {packing} data ends in the middle, after {format_size(size)} of text; "
                "what came before was read"
            )

    def _unpacker(self, packing: str) -> Callable[[], _Member]:
        if packing != "zstd":
            makers: dict[str, Callable[[], _Member]]
            makers = {"gzip": _Zlib, "bzip2": _Bzip2, "xz": _Xz}
            return makers[packing]
        try:
            import zstandard
        except ImportError as error:
            hint = f'unpack it first: "zstd -dc {self._name} | oomdoc explain -"'
            raise self._error("zstd data, and zstandard is not installed", hint) from error
        return lambda: _Zstd(zstandard.ZstdDecompressor(max_window_size=_XZ_MEMORY))

    def _transcode(self, raw: Iterable[bytes], bom: bytes, encoding: str) -> Iterator[bytes]:
        """UTF-8 from the given encoding, without its byte order mark."""
        if encoding == "utf-8":
            if bom:
                self.formats.append("utf-8-bom")
            for chunk in raw:
                clean = chunk if self.total_bytes else chunk[len(bom) :]
                self.total_bytes += len(chunk)
                yield clean
            return
        self.formats.append(encoding)
        decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        for chunk in raw:
            clean = chunk if self.total_bytes else chunk[len(bom) :]
            self.total_bytes += len(chunk)
            yield decoder.decode(clean).encode("utf-8", "replace")
        yield decoder.decode(b"", final=True).encode("utf-8", "replace")

    def _refuse_archives(self, start: bytes) -> None:
        for magic, what in _ARCHIVES:
            if start.startswith(magic):
                raise self._error(f"{what}, not a log", _UNPACK)
        if start[257:262] == b"ustar":
            raise self._error("a tar archive, not a log", _UNPACK)
        if start.startswith(_JOURNAL):
            hint = f'export it: "journalctl --file {self._name} > vllm.log"'
            raise self._error("not text (a systemd journal)", hint)

    def _refuse_binary(self, start: bytes) -> None:
        for magic, what in _BINARY:
            if start.startswith(magic):
                raise self._error(f"not text (starts with {what})", GIVE_A_LOG)
        if start[8:10] == b'{"' and int.from_bytes(start[:8], "little") < 100 * MIB:
            raise self._error("not text (starts with a safetensors header)", GIVE_A_LOG)

    def _refuse_control_bytes(self, start: bytes) -> None:
        sample = start.replace(b"\0", b"")
        control = len(sample) - len(sample.translate(None, _CONTROL))
        if control * 50 <= len(sample):  # up to 2 %: a log with damage
            return
        broken = sample.decode("utf-8", "replace").count("\ufffd")
        if control * 10 > len(sample) or broken * 5 > len(sample):
            share = round(100 * (control + broken) / len(sample))
            what = f"{share} % of its start is control bytes or not UTF-8"
            raise self._error(f"not text ({what})", GIVE_A_LOG)

    def _error(self, message: str, hint: str) -> LogReadError:
        return LogReadError(message, location=Location(self._name), hint=hint)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _stop(self, note: str) -> None:
        self.truncated = True
        self._note(note)


class _Member(Protocol):
    """One member (frame) of a packed stream."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def feed(self, data: bytes) -> Iterator[bytes]: ...


class _Zlib:
    """A gzip member; at most CHUNK bytes come out at once."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def feed(self, data: bytes) -> Iterator[bytes]:
        while True:
            out = self._inner.decompress(data, CHUNK)
            yield out
            data = self._inner.unconsumed_tail
            if self._inner.eof or (not data and len(out) < CHUNK):
                return


class _Limited:
    """A bzip2 or xz stream of the standard library; at most CHUNK bytes come out at once."""

    _inner: bz2.BZ2Decompressor | lzma.LZMADecompressor

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield self._inner.decompress(data, CHUNK)
        while not self._inner.eof and not self._inner.needs_input:
            yield self._inner.decompress(b"", CHUNK)


class _Bzip2(_Limited):
    def __init__(self) -> None:
        self._inner = bz2.BZ2Decompressor()


class _Xz(_Limited):
    def __init__(self) -> None:
        self._inner = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)


class _Zstd:
    """A zstd frame. Its reader would swallow a cut frame in silence; this object tells."""

    def __init__(self, decompressor: Any) -> None:  # zstandard is imported only when needed
        self._inner = decompressor.decompressobj()

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data)

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            yield self._inner.decompress(data)
        except Exception as error:
            # zstandard.ZstdError: the class is not at hand without the import
            raise ValueError(str(error)) from error


_UNPACK_ERRORS = (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError)


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return str(text)[:1].lower() + str(text)[1:]


def _peek(chunks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """At least SNIFF bytes of the start, if there are so many, and all chunks with that start."""
    rest = iter(chunks)
    seen: list[bytes] = []
    while sum(map(len, seen)) < SNIFF:
        chunk = next(rest, None)
        if chunk is None:
            break
        seen.append(chunk)
    return b"".join(seen), chain(seen, rest)


def _slices(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]


def _gather(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Small pieces joined until they reach CHUNK bytes."""
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size >= CHUNK:
            yield b"".join(parts)
            parts, size = [], 0
    if size:
        yield b"".join(parts)


def _encoding(start: bytes) -> tuple[bytes, str]:
    """Byte order mark (may be empty) and encoding of a text that starts so."""
    for bom, encoding in _BOMS:
        if start.startswith(bom):
            return bom, encoding
    sample = start[:4096]
    pairs = len(sample) // 2
    if pairs:
        even, odd = sample[0::2].count(0) / pairs, sample[1::2].count(0) / pairs
        if odd > 0.6 and even < 0.1:
            return b"", "utf-16-le"
        if even > 0.6 and odd < 0.1:
            return b"", "utf-16-be"
    return b"", "utf-8"
