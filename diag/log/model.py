"""What the reader hands on: physical lines, cleaned log lines with their speaker, and start attempts.

`source` makes RawLine from bytes, `reader` makes LogLine from RawLine, `attempts` groups LogLines.
Nothing here knows what a line means.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RawLine:
    """One physical line: text between two newline characters, decoded, without the newline.

    `number` is 1-based and counts only newline characters (as `grep -n` does), never a carriage return.
    A very long line is cut (see `source.MAX_LINE`); `cut` then says so.
    """

    number: int
    text: str
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """Which process printed a line, as far as the line says. All None: the line has no prefix."""

    process: str | None = (
        None  # "EngineCore_DP0", "Worker_TP3", "APIServer", "RayWorkerWrapper", "kernel"
    )
    pid: int | None = None
    rank: int | None = None  # world or TP rank, when printed
    service: str | None = None  # compose service, pod/container or host, when the log is a mix
    host: str | None = None  # "ip=" of a Ray worker on another node


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One message: wrapper prefixes, colours and damage removed.

    A physical line that holds several messages gives several LogLines with the same `number`; a message that was
    hard-wrapped over several physical lines gives one LogLine from `number` to `last_number`.
    """

    number: int
    text: str  # the message itself, e.g. "Available KV cache memory: 8.72 GiB" or '  File "x.py", line 3, in f'
    speaker: Speaker = field(default=Speaker())
    level: str | None = None  # DEBUG INFO WARNING ERROR CRITICAL
    time: str | None = None  # as printed by the logger, e.g. "12-08 08:15:30"; None when absent
    source: str | None = None  # "gpu_worker.py:298"
    last_number: int | None = None
    repeated: int = 1  # Ray's "[repeated 8x across cluster]"

    @property
    def rank(self) -> int | None:
        """The speaker's rank."""
        return self.speaker.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A whole input after reading. For a large input `lines` holds the parts worth parsing, in order."""

    name: str
    lines: tuple[LogLine, ...]
    total_lines: int
    total_bytes: int
    formats: tuple[str, ...] = ()  # e.g. ("docker_compose", "ansi", "hard_wrapped:120", "gzip")
    truncated: bool = False  # something was left out: lines cut, regions dropped, archive cut short
    notes: tuple[str, ...] = ()  # sentences for the user about what was repaired or dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of vLLM inside a log: its lines, from its first start-up line to the line before the next start."""

    index: int  # 1-based
    lines: tuple[LogLine, ...]
    service: str | None = None

    @property
    def first_line(self) -> int:
        """Number of the first line; 0 when empty."""
        return self.lines[0].number if self.lines else 0
