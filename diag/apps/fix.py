"""`oomdoc fix`: a log and the file that vLLM is started from -> the diff that makes the fix, or the file changed.

The diff goes to stdout, so that `patch` can take it; what the fix is and what the file can't hold go to stderr.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diag.apps.console import (
    COULD_NOT,
    DONE,
    STDIN,
    FileSink,
    StdoutSink,
    committing,
    complain,
    is_terminal,
    log_source,
)
from diag.apps.explain import AttemptChoice
from diag.apps.startfile import read_start_file
from diag.errors import Location, RewriteError, UsageError, os_reason
from diag.report.safe import clean, clean_block
from diag.terms import Outcome

if TYPE_CHECKING:
    from diag.fixes.model import Fix
    from diag.fixes.rewrite import Rewritten
    from diag.report.model import Diagnosis

_SHOWN_DIFF = 100_000  # characters of a diff on a terminal
_BACKUPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FixRequest:
    """What to diagnose, what to change, and whether to write."""

    log: str
    file: str
    fix: str | None = None
    service: str | None = None
    write: bool = False
    yes: bool = False
    attempt: AttemptChoice = "last"
    vllm_version: str | None = None
    gpu: str | None = None


def run(request: FixRequest) -> int:
    """Print the diff and, if asked, write the file; returns the exit code. Raises OomdocError."""
    from diag.fixes.rewrite import rewrite

    _check_asking(request)
    path = Path(request.file)
    old = read_start_file(path)
    diagnosis = _diagnose(request, old)
    if diagnosis.outcome is Outcome.HEALTHY and request.fix is None:
        complain(f"{request.log}: nothing failed, so there is nothing to fix")
        return DONE
    fix = choose(diagnosis.fixes, request.fix)
    _say_fix(fix)
    try:
        result = rewrite(old, fix.changes, service=request.service, name=_shown_name(path))
    except RewriteError as error:
        error.location = error.location or Location(request.file)
        raise
    for note in result.notes:
        complain(f"note: {note}")
    if not result.diff:
        return _nothing_to_do(result, request.file)
    _show(result.diff)
    if request.write:
        _write(path, old, result.text, ask=not request.yes)
    return DONE


def choose(fixes: Sequence[Fix], wanted: str | None) -> Fix:
    """The fix with this number (from 1) or id; without one the first that fits and changes a setting.

    Raises UsageError when there is none.
    """
    if wanted is not None:
        if wanted.isascii() and wanted.isdecimal() and 0 < int(wanted[:6]) <= len(fixes):
            return fixes[int(wanted[:6]) - 1]
        found = next((fix for fix in fixes if fix.id == wanted), None)
        if found is None:
            listed = ", ".join(f"{k} {fix.id}" for k, fix in enumerate(fixes, 1))
            raise UsageError(
                f"there is no fix {clean(wanted, 40)!r}", hint=f"there are: {listed or 'none'}"
            )
        return found
    settings = [fix for fix in fixes if any(change.flag or change.env for change in fix.changes)]
    if not settings:
        raise UsageError(
            "no fix for this failure is a setting" if fixes else "there is no fix for this log",
            hint="see what oomdoc explain says",
        )
    return next((fix for fix in settings if fix.fits), settings[0])


def _check_asking(request: FixRequest) -> None:
    if request.yes and not request.write:
        raise UsageError("--yes does nothing without --write")
    if request.file == STDIN:
        raise UsageError("--in needs a file", hint="give its name")
    if request.write and not request.yes and (request.log == STDIN or not is_terminal(sys.stdin)):
        raise UsageError("--write asks before it writes, and nobody can answer", hint="add --yes")


def _diagnose(request: FixRequest, text: str) -> Diagnosis:
    from diag.fixes.rewrite import command_in_file
    from diag.pipeline import diagnose

    source, shown = log_source(request.log)
    return diagnose(
        source,
        attempt=request.attempt,
        vllm_version=request.vllm_version,
        gpu=request.gpu,
        launch=command_in_file(text, Path(request.file).name, service=request.service),
        name=shown,
    )


def _shown_name(path: Path) -> str:
    """The name in the diff: as given, so that `patch -p1` finds the file from here."""
    return clean(path.name if path.is_absolute() else path.as_posix(), 400)


def _say_fix(fix: Fix) -> None:
    sure = "" if fix.fits else " (the log has too few numbers to prove that it fits)"
    complain(f"fix {fix.id}: {fix.title}{sure}")


def _nothing_to_do(result: Rewritten, file: str) -> int:
    if result.held:
        complain(f"{file}: has this fix already")
        return DONE
    complain(f"{file}: nothing of this fix can be put into {result.kind.label}")
    return COULD_NOT


def _show(diff: str) -> None:
    """The diff as it is for a pipe; on a terminal without what could act on it."""
    if is_terminal(sys.stdout):
        diff = clean_block(diff, _SHOWN_DIFF) + "\n"
    StdoutSink().write(diff)


# --- writing --------------------------------------------------------------------------------------------------


def _write(path: Path, old: str, new: str, *, ask: bool) -> None:
    if ask and not _confirmed(path):
        complain(f"{path}: left as it was")
        return
    target = Path(os.path.realpath(path))  # through a link: the link stays
    if read_start_file(target) != old:
        raise UsageError(
            "was changed in the meantime", location=Location(str(path)), hint="run again"
        )
    backup = _back_up(target)
    sink = FileSink(target)
    with committing(sink):
        sink.write(new)
    complain(f"{path}: written; the old one is {backup.name}")


def _confirmed(path: Path) -> bool:
    with suppress(OSError):
        sys.stderr.write(f"Write {clean(str(path), 400)}? [y/N] ")
        sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _back_up(path: Path) -> Path:
    """A copy beside the file under the first free name FILE.bak, FILE.bak.1, ... with its permissions."""
    names = [f"{path.name}.bak", *(f"{path.name}.bak.{number}" for number in range(1, _BACKUPS))]
    for name in names:
        backup = path.with_name(name)
        try:
            with backup.open("xb") as copy:
                copy.write(path.read_bytes())
            backup.chmod(stat.S_IMODE(path.stat().st_mode))
            return backup
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"no backup could be made ({os_reason(error)})", location=Location(str(path))
            ) from error
    raise UsageError("has too many backups", location=Location(str(path)), hint="remove some")
