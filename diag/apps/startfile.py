"""The file that vLLM is started from, as `--in` and `--config` name it: its text, and the command line in it."""

from __future__ import annotations

from pathlib import Path

from diag.errors import Location, UsageError, os_reason

MAX_BYTES = 1_500_000


def read_start_file(path: Path) -> str:
    """The file's text, line ends as they are. Raises UsageError."""
    where = Location(str(path))
    try:
        if not path.is_file():
            problem = "is a directory" if path.is_dir() else "no such file"
            raise UsageError(
                problem, location=where, hint="give the file that vLLM is started from"
            )
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"has more than {MAX_BYTES:,} bytes", location=where)
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("is no UTF-8 text", location=where) from error
    except OSError as error:
        raise UsageError(f"can't be read ({os_reason(error)})", location=where) from error


def launch_in_file(name: str) -> str:
    """`vllm serve MODEL --flag value ...` as the file starts it. Raises UsageError when that can't be told."""
    from diag.fixes.rewrite import command_in_file

    path = Path(name)
    launch = command_in_file(read_start_file(path), path.name)
    if launch is None:
        raise UsageError(
            "no start of vLLM could be read in it",
            location=Location(name),
            hint='give the command itself: --launch "vllm serve MODEL ..."',
        )
    return launch
