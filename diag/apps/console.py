"""Where an app's output goes: results to stdout or a file, everything else to stderr.

Decides on colour, width and characters from the stream and the environment, and replaces a file only
when the whole result is there.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Protocol, TypedDict

from diag.errors import Location, OomdocError, UsageError, os_reason
from diag.report.safe import clean, to_ascii

DONE, FOUND, COULD_NOT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes of every command; FOUND only with `--exit-code`."""

STDIN = "-"  # as a FILE of the command line; as a target it is stdout
_PIPE_WIDTHS = (80, 100)


class ColorChoice(str, Enum):
    """When to use colour."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class DocumentFormat(str, Enum):
    """How one document is written."""

    TEXT = "text"
    PLAIN = "plain"
    JSON = "json"
    MD = "md"


class Look(TypedDict):
    """What a stream can show; `width` in terminal cells."""

    color: bool
    unicode: bool
    width: int


class StdoutClosedError(Exception):
    """The program that read our stdout has ended, as `head` does: stop quietly."""


def look_of(stream: IO[str] | None, choice: ColorChoice) -> Look:
    """Colour, characters and width for text on a stream; None is a file."""
    return Look(
        color=wants_color(choice, stream), unicode=shows_unicode(stream), width=text_width(stream)
    )


def wants_color(
    choice: ColorChoice, stream: IO[str] | None, environ: Mapping[str, str] = os.environ
) -> bool:
    """Whether to colour: the option, then NO_COLOR, FORCE_COLOR, TERM=dumb, then the terminal.

    `stream` None is a file: no colour unless asked for.
    """
    if choice is not ColorChoice.AUTO:
        return choice is ColorChoice.ALWAYS
    if stream is None or environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0", "false"):
        return True
    return environ.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether a person sits at the other end."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def text_width(stream: IO[str] | None, environ: Mapping[str, str] = os.environ) -> int:
    """Columns for text: COLUMNS, the terminal's width, or 80 to 100 when no terminal reads."""
    columns = environ.get("COLUMNS", "")
    if columns.isdecimal() and 0 < int(columns) < 10_000:
        return int(columns)
    if is_terminal(stream) and (width := _terminal_width(stream)):
        return width
    behind = next(filter(None, map(_terminal_width, (sys.stderr, sys.stdin))), 0)  # a pager's
    return min(max(behind, _PIPE_WIDTHS[0]), _PIPE_WIDTHS[1])


def _terminal_width(stream: IO[str] | None) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream else 0
    except (OSError, ValueError):
        return 0


def shows_unicode(stream: IO[str] | None) -> bool:
    """Whether the stream can take the bars and marks; a file always can."""
    encoding = "utf-8" if stream is None else (getattr(stream, "encoding", None) or "ascii")
    return encoding.lower().replace("_", "-").startswith("utf")


def log_source(given: str) -> tuple[str | Path, str]:
    """What `diagnose` reads for a FILE of the command line, and the name to show for it."""
    return (STDIN, "<stdin>") if given == STDIN else (Path(given), given)


def complain(message: str) -> None:
    """One line for the user on stderr, `oomdoc: ...`; quoted text can't act on the terminal."""
    text = f"oomdoc: {clean(message, 2_000)}"
    with suppress(OSError):  # nobody reads stderr; the exit code still tells
        sys.stderr.write(f"{text if shows_unicode(sys.stderr) else to_ascii(text)}\n")
        sys.stderr.flush()


class Sink(Protocol):
    """Takes the result; `commit` makes it final, `discard` leaves things as they were."""

    def write(self, text: str) -> None:
        """Take a piece of the result."""

    def commit(self) -> None:
        """The result is complete."""

    def discard(self) -> None:
        """There is no result."""


def open_sink(output: str | None, inputs: tuple[str, ...] = ()) -> Sink:
    """stdout, or a file that is replaced when done. Raises UsageError when it can't be written."""
    if output in (None, STDIN):
        return StdoutSink()
    path = Path(output)
    if any(name != STDIN and _same_file(path, Path(name)) for name in inputs):
        raise UsageError(
            "is one of the inputs", location=Location(output), hint="give another file to -o"
        )
    return FileSink(path)


@contextmanager
def committing(sink: Sink) -> Iterator[None]:
    """Make what the block writes final, or leave things as they were when it raises."""
    try:
        yield
        sink.commit()
    except BaseException:
        sink.discard()
        raise


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


class StdoutSink:
    """Writes UTF-8 at once, so that several files show up one by one."""

    def write(self, text: str) -> None:
        """Write and flush. Raises StdoutClosedError when nobody reads any more."""
        try:
            buffer = getattr(sys.stdout, "buffer", None)
            if buffer is None:
                sys.stdout.write(text)
            else:
                sys.stdout.flush()
                buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise StdoutClosedError from error

    def commit(self) -> None:
        """Nothing is held back."""

    def discard(self) -> None:
        """Nothing is held back."""


class FileSink:
    """Writes beside the target and renames at the end: readers see old or new, never half."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))  # through a link: the link stays
        self.temporary: Path | None = None
        self.where = Location(str(path))
        if self.path.is_dir():
            raise UsageError("is a directory", location=self.where, hint="give a file name to -o")
        if not self.path.parent.is_dir():
            raise UsageError(
                f"there is no directory {clean(str(self.path.parent))}",
                location=self.where,
                hint="create it first",
            )
        try:
            self.stream = self._open()
        except OSError as error:
            raise _unwritable(self.where, error) from error

    def _open(self) -> IO[bytes]:
        if self.path.exists() and not self.path.is_file():
            return self.path.open("wb")  # a device or pipe: nothing to keep
        number, name = tempfile.mkstemp(prefix=f".{self.path.name[:40]}.", dir=self.path.parent)
        self.temporary = Path(name)
        return os.fdopen(number, "wb")

    def write(self, text: str) -> None:
        """Write beside the target. Raises UsageError, as on a full disk."""
        try:
            self.stream.write(text.encode("utf-8", "replace"))
        except OSError as error:
            raise _unwritable(self.where, error) from error

    def commit(self) -> None:
        """Put the new content in place."""
        try:
            self.stream.close()
            if self.temporary is not None:
                self.temporary.chmod(_mode(self.path))
                self.temporary.replace(self.path)
                self.temporary = None
        except OSError as error:
            raise _unwritable(self.where, error) from error

    def discard(self) -> None:
        """Leave the old content in place."""
        with suppress(OSError):
            self.stream.close()
        if self.temporary is not None:
            self.temporary.unlink(missing_ok=True)
            self.temporary = None


def _mode(path: Path) -> int:
    """Permissions of the file that is replaced, or those of a new file."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _unwritable(where: Location, error: OSError) -> OomdocError:
    return UsageError(
        f"can't be written ({os_reason(error)})", location=where, hint="give another file to -o"
    )
