"""The errors oomdoc raises on purpose. The log itself is data and never raises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """Where a problem is: a file (or "<stdin>") and, when known, a line."""

    path: str
    line: int | None = None

    def __str__(self) -> str:
        return self.path if self.line is None else f"{self.path}:{self.line}"


class OomdocError(Exception):
    """Base of all. Printed as `oomdoc: WHERE: MESSAGE; HINT`."""

    def __init__(
        self, message: str, *, location: Location | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.location = location
        self.hint = hint

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{where}{self.message}{hint}"


def os_reason(error: OSError) -> str:
    """Why the system refused, in lower case: "permission denied"."""
    return (error.strerror or type(error).__name__).lower()


class LogReadError(OomdocError):
    """The input can't be read as a log: missing, a directory, no permission, binary, empty."""


class UnitError(OomdocError, ValueError):
    """A text is not a number with a unit."""


class RuleFileError(OomdocError):
    """A file below `rules/` or `corpus/` is wrong. `problems` holds every message."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class UsageError(OomdocError):
    """The options contradict each other or a value is off."""


class MissingExtraError(OomdocError):
    """An optional package is not installed; the hint is the command that installs it."""


class RewriteError(OomdocError):
    """A file of the user's can't be changed safely: not understood, ambiguous, or the edit failed its check."""
