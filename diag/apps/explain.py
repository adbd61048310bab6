"""`oomdoc explain` without the command line: sources in, documents to a sink, exit code out.

One source that can't be read does not stop the others; in JSON an error document keeps its place.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from diag.apps.console import COULD_NOT, DONE, FOUND, STDIN, Sink, complain, log_source
from diag.errors import Location, LogReadError, OomdocError, UsageError, os_reason
from diag.report.safe import clean, to_ascii
from diag.terms import Outcome

if TYPE_CHECKING:
    from diag.report.model import Diagnosis

AttemptChoice = int | Literal["first", "last"]
_FAILURES = (Outcome.MEMORY_FAILURE, Outcome.OTHER_FAILURE)


class OutputFormat(str, Enum):
    """How the answer is written."""

    TEXT = "text"
    PLAIN = "plain"
    JSON = "json"
    JSONL = "jsonl"
    MD = "md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to read and how to show it. `width` in terminal cells."""

    sources: tuple[str, ...]
    format: OutputFormat = OutputFormat.TEXT
    attempt: AttemptChoice = "last"
    vllm_version: str | None = None
    gpu: str | None = None
    launch: str | None = None
    exit_code: bool = False
    color: bool = False
    unicode: bool = True
    width: int = 80
    show_all: bool = False
    show_evidence: bool = False
    show_facts: bool = False
    debug: bool = False


def parse_attempt(text: str) -> AttemptChoice:
    """The value of `--attempt`. Raises UsageError.

    >>> parse_attempt("2"), parse_attempt("first")
    (2, 'first')
    """
    if text == "first":
        return "first"
    if text == "last":
        return "last"
    if text.isascii() and text.isdecimal() and int(text[:9]) > 0:
        return int(text[:9])
    raise UsageError(
        f"--attempt {clean(text, 40)!r} is no start in the log",
        hint='give a number from 1, "first" or "last"',
    )


def explain(request: Request, sink: Sink) -> int:
    """Diagnose every source in order and write the result; returns the exit code.

    Nothing is committed when no source could be read: a file of the last run stays as it was.
    """
    writer = _WRITERS[request.format](request, sink)
    unread = found = 0
    try:
        for name in request.sources:
            result = _diagnose(name, request)
            if isinstance(result, OomdocError):
                unread += 1
                writer.error(log_source(name)[1], result)
            else:
                found += result.outcome in _FAILURES
                writer.answer(result)
        writer.finish(empty=unread == len(request.sources))
    except BaseException:
        sink.discard()
        raise
    if unread == len(request.sources):
        sink.discard()
    else:
        sink.commit()
    if unread:
        return COULD_NOT
    return FOUND if found and request.exit_code else DONE


def _diagnose(name: str, request: Request) -> Diagnosis | OomdocError:
    """The diagnosis, or the error after telling the user."""
    from diag.pipeline import diagnose

    source, shown = log_source(name)
    try:
        return diagnose(
            source,
            attempt=request.attempt,
            vllm_version=request.vllm_version,
            gpu=request.gpu,
            launch=request.launch,
            name=shown,
        )
    except OomdocError as error:
        problem = error
    except OSError as error:
        problem = LogReadError(
            f"can't be read ({os_reason(error)})", location=Location(shown), hint="check the file"
        )
    except Exception as error:  # the last line of defence: the other files still get their answer
        if request.debug:
            traceback.print_exc()
        problem = internal_error(error, shown)
    where = "" if problem.location else f"{shown}: "
    complain(f"{where}{problem}")
    return problem


def internal_error(error: BaseException, where: str | None = None) -> OomdocError:
    """What a user sees of a bug of ours."""
    detail = clean(str(error), 160)
    return OomdocError(
        f"internal error ({type(error).__name__}{f': {detail}' if detail else ''})",
        location=Location(where) if where else None,
        hint="please report it; run again with --debug for the details to add",
    )


class _Writer:
    """One output format; `error` by default writes nothing, stderr has said it."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.several = len(request.sources) > 1

    def answer(self, diagnosis: Diagnosis) -> None:
        raise NotImplementedError

    def error(self, name: str, error: OomdocError) -> None:
        """Keep the place of a source that could not be read, where the format has places."""

    def finish(self, *, empty: bool) -> None:
        """All sources are through; `empty` when none could be read."""


class _TextWriter(_Writer):
    written = 0

    def answer(self, diagnosis: Diagnosis) -> None:
        gap = "\n" if self.written else ""
        head = f"==> {clean(diagnosis.source.name, 200)} <==\n" if self.several else ""
        self.sink.write(f"{gap}{self.ascii(head)}{self.body(diagnosis)}")
        self.written += 1

    def ascii(self, text: str) -> str:
        narrow = self.request.format is OutputFormat.PLAIN or not self.request.unicode
        return to_ascii(text) if narrow else text

    def body(self, diagnosis: Diagnosis) -> str:
        from diag.report import terminal

        request = self.request
        shown: dict[str, bool] = {
            "show_all": request.show_all,
            "show_evidence": request.show_evidence,
            "show_facts": request.show_facts,
        }
        if request.format is OutputFormat.PLAIN:
            return terminal.render_plain(diagnosis, **shown)
        return terminal.render(
            diagnosis, width=request.width, color=request.color, unicode=request.unicode, **shown
        )


class _MarkdownWriter(_Writer):
    written = 0

    def answer(self, diagnosis: Diagnosis) -> None:
        from diag.report import markdown

        head = f"## {markdown.code(diagnosis.source.name)}\n\n" if self.several else ""
        self.sink.write(("\n" if self.written else "") + head + markdown.render(diagnosis))
        self.written += 1


class _JsonWriter(_Writer):
    """One document, or an array when several sources were given."""

    def __init__(self, request: Request, sink: Sink) -> None:
        super().__init__(request, sink)
        self.documents: list[dict[str, Any]] = []

    def answer(self, diagnosis: Diagnosis) -> None:
        from diag.report import jsonout

        self.documents.append(jsonout.document(diagnosis))

    def error(self, name: str, error: OomdocError) -> None:
        from diag.report import jsonout

        self.documents.append(jsonout.error_document(name, error))

    def finish(self, *, empty: bool) -> None:
        from diag.report import jsonout

        if self.several:
            self.sink.write(jsonout.dump(self.documents) + "\n")
        elif not empty:
            self.sink.write(jsonout.dump(self.documents[0]) + "\n")


class _JsonlWriter(_Writer):
    """A line for each source, in order, as soon as it is known."""

    def answer(self, diagnosis: Diagnosis) -> None:
        from diag.report import jsonout

        self.sink.write(jsonout.to_jsonl([diagnosis]))

    def error(self, name: str, error: OomdocError) -> None:
        from diag.report import jsonout

        self.sink.write(jsonout.dump(jsonout.error_document(name, error), indent=None) + "\n")


_WRITERS: dict[OutputFormat, type[_Writer]] = {
    OutputFormat.TEXT: _TextWriter,
    OutputFormat.PLAIN: _TextWriter,
    OutputFormat.MD: _MarkdownWriter,
    OutputFormat.JSON: _JsonWriter,
    OutputFormat.JSONL: _JsonlWriter,
}


def expand_sources(files: Sequence[str]) -> tuple[str, ...]:
    """The sources as given. Raises UsageError when stdin is named twice: it can be read once."""
    if list(files).count(STDIN) > 1:
        raise UsageError('"-" is given more than once', hint="stdin can be read only once")
    return tuple(files)
