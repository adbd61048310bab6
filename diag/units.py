"""Text <-> bytes, and numbers as people read them. Inside oomdoc a size is whole bytes.

GiB is 2**30, GB is 10**9. Older vLLM prints "GB" for values divided by 2**30: a catalogue row says so
by naming its group `_gib`; `parse_size` itself takes units literally.
"""

from __future__ import annotations

import math
import re

from diag.errors import UnitError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTORS = {
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    # One letter is binary, as in XLA's "528.72M" and Docker's "64m".
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
}
# As vLLM reads the value of --max-model-len and the like: a small letter is decimal, a capital binary.
_COUNT_SUFFIX = {"k": 1000, "K": KIB, "m": 1000**2, "M": MIB, "g": 1000**3, "G": GIB}
_SIZE = re.compile(r"\s*([+-]?(?:\d[\d,]*)?\.?\d*(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def parse_number(text: str) -> float:
    """A printed number: thousands separators, sign and exponent allowed.

    >>> parse_number("62,608")
    62608.0
    """
    try:
        number = float(text.replace(",", "").replace("_", "").strip())
    except ValueError as error:
        raise UnitError(f"{text[:40]!r} is not a number") from error
    if not math.isfinite(number):
        raise UnitError(f"{text[:40]!r} is not a number that can be computed with")
    return number


def parse_short_count(text: str) -> int:
    """A count or a size in bytes as vLLM's flags take it. Raises ValueError, and OverflowError for infinity.

    >>> parse_short_count("32768"), parse_short_count("32k"), parse_short_count("1.5K")
    (32768, 32000, 1536)
    """
    factor = _COUNT_SUFFIX.get(text[-1:])
    return int(float(text)) if factor is None else int(float(text[:-1]) * factor)


def parse_size(text: str) -> int:
    """Bytes of a printed size. No unit means bytes.

    >>> parse_size("8.60 GiB"), parse_size("64m"), parse_size("0 bytes")
    (9234179686, 67108864, 0)
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or not match.group(1).strip("+-.") or (unit and unit not in _FACTORS):
        raise UnitError(f"{text[:40]!r} is not a size", hint='write it like "17.1 GiB"')
    return round(parse_number(match.group(1)) * (_FACTORS[unit] if unit else 1))


def gib(size: float) -> float:
    """Bytes as GiB."""
    return size / GIB


def format_size(size: int) -> str:
    """Bytes for people: GiB from half a GiB on, else MiB, else KiB or bytes.

    >>> format_size(13 * GIB), format_size(-300 * MIB), format_size(512)
    ('13.00 GiB', '-300 MiB', '512 bytes')
    """
    amount = abs(size)
    if amount >= GIB // 2:
        return f"{size / GIB:,.2f} GiB"
    if amount >= MIB:
        return f"{size / MIB:,.0f} MiB"
    if amount >= 4 * KIB:
        return f"{size / KIB:,.0f} KiB"
    return f"{size:,} bytes"


def format_gib(size: int) -> str:
    """Bytes as a bare GiB number, for columns: `61.03`."""
    return f"{size / GIB:,.2f}"


def format_count(number: float) -> str:
    """A count with thousands separators.

    >>> format_count(138272)
    '138,272'
    """
    return f"{number:,.0f}"
