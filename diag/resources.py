"""Where the data files are: `rules/` and `corpus/` beside the package in a checkout, `diag/_data/` in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The folder `rules` or `corpus`. Raises FileNotFoundError when the installation is broken."""
    for candidate in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"oomdoc's data folder {name!r} is missing; reinstall oomdoc")
