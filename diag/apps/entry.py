"""Where the program starts: runs a command and maps every error to one message on stderr and an exit code.

`oomdoc explain FILE...` without options, which is what people type, does without the option parser: importing and
running it costs more than reading a log does (`scripts/bench/startup.py`).
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from diag.apps.console import (
    COULD_NOT,
    DONE,
    INTERRUPTED,
    STDIN,
    ColorChoice,
    StdoutClosedError,
    complain,
    look_of,
    open_sink,
)
from diag.apps.explain import Request, expand_sources, explain, internal_error
from diag.errors import OomdocError, RuleFileError

_GC_THRESHOLD = 50_000  # start-up makes many lasting objects; looking through them again and again finds nothing


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; never a traceback without `--debug`."""
    argv = list(sys.argv[1:] if args is None else args)
    gc.set_threshold(_GC_THRESHOLD)
    try:
        return _run(argv)
    except StdoutClosedError:
        _silence_stdout()
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except RuleFileError as error:
        for problem in error.problems:
            complain(problem)
    except OomdocError as error:
        complain(str(error))
    except Exception as error:
        if type(error).__name__ == "Abort":  # typer's, at a prompt
            return INTERRUPTED
        if _is_usage_error(error):
            complain(_usage_message(error, argv))
        else:
            if "--debug" in argv:
                traceback.print_exc()
            complain(str(internal_error(error)))
    return COULD_NOT


def _run(argv: list[str]) -> int:
    files = argv[1:]
    if argv[:1] == ["explain"] and files and not any(_is_option(word) for word in files):
        return _plain_explain(files)
    from diag.apps.cli import run

    return run(argv)


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != STDIN


def _plain_explain(files: list[str]) -> int:
    """`explain` with every option at its default."""
    request = Request(sources=expand_sources(files), **look_of(sys.stdout, ColorChoice.AUTO))
    return explain(request, open_sink(None, request.sources))


def _is_usage_error(error: Exception) -> bool:
    """Typer's own errors, wherever this release of typer defines them."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _usage_message(error: Any, argv: Sequence[str]) -> str:
    message = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "oomdoc"
    first = argv[0] if argv else ""
    if command == "oomdoc" and not first.startswith("-") and Path(first).is_file():
        return f"{first} is a file, not a command; type: oomdoc explain {first}"
    return f'{message[:1].lower()}{message[1:]}; see "{command} --help"'


def _silence_stdout() -> None:
    """Python flushes stdout at exit; give it somewhere to go."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
