"""The data files: `rules/` and `corpus/` beside the package in a checkout, below `diag/_data/` in a wheel.

People edit YAML; the program reads one JSON made from all of it. A wheel carries that JSON; a checkout makes it on
first use and keeps it in the user's cache folder until a file changes.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from diag.errors import RuleFileError
from diag.patterns import required_clauses

FOLDERS = ("rules", "corpus")
BUNDLE = "bundle.json"
_PACKAGE = Path(__file__).resolve().parent
_FOR_TESTS_ONLY = ("example", "examples", "values")  # left out of the bundle


def data_dir(name: str) -> Path:
    """The folder `rules` or `corpus`. Raises FileNotFoundError when the installation is broken."""
    for candidate in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"oomdoc's data folder {name!r} is missing; reinstall oomdoc")


def read_data(name: str) -> Any:
    """The body of one data file, e.g. `read_data("rules/sites.yaml")`. Raises KeyError for an unknown name."""
    return _bundle()[name]


def data_names(folder: str) -> tuple[str, ...]:
    """Names of the data files below a folder, e.g. `data_names("rules/messages")`, in a stable order."""
    return tuple(name for name in _bundle() if name.startswith(f"{folder}/"))


def read_yaml(path: Path) -> Any:
    """A YAML file by the C loader when there is one. Raises RuleFileError with the line of a syntax error."""
    import yaml

    try:
        with path.open("rb") as stream:
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            return yaml.load(stream, Loader=loader)  # noqa: S506 - the safe loader, in C where there is one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path.name}:{mark.line + 1}" if mark else path.name
        raise RuleFileError([f"{where}: not YAML: {getattr(error, 'problem', error)}"]) from error


def yaml_files(root: Path) -> list[Path]:
    """Every YAML file below `rules/` and `corpus/` of a checkout or of an unpacked wheel's data."""
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.yaml"))


def build_bundle(root: Path) -> str:
    """All data files as one JSON text, without what only tests need. Raises RuleFileError with every bad file."""
    bodies: dict[str, Any] = {}
    problems: list[str] = []
    for path in yaml_files(root):
        try:
            bodies[path.relative_to(root).as_posix()] = _lean(read_yaml(path))
        except RuleFileError as error:
            problems.extend(error.problems)
    if problems:
        raise RuleFileError(problems)
    return json.dumps(bodies, ensure_ascii=False, separators=(",", ":"))


def _lean(body: Any) -> Any:
    """The body without the examples of rows, rules and bugs; each row with the texts its matches must hold."""
    if not isinstance(body, dict):
        return body
    lean = {key: value for key, value in body.items() if key not in _FOR_TESTS_ONLY}
    if isinstance(lean.get("bugs"), list):
        lean["bugs"] = [_lean(bug) for bug in lean["bugs"]]
    if isinstance(lean.get("messages"), list):
        lean["messages"] = [
            {**_lean(row), "clauses": required_clauses(str(row.get("pattern", "")))}
            for row in lean["messages"]
        ]
    return lean


@lru_cache(maxsize=1)
def _bundle() -> dict[str, Any]:
    shipped = _PACKAGE / "_data" / BUNDLE
    return _parsed(shipped.read_text("utf-8")) if shipped.is_file() else _cached(_PACKAGE.parent)


def _parsed(text: str) -> dict[str, Any]:
    bundle: dict[str, Any] = json.loads(text)
    return bundle


def _cached(root: Path) -> dict[str, Any]:
    """The bundle of a checkout from the cache folder, made anew when any file changed.

    A cache that can't be used is passed over in silence: it only saves time.
    """
    folder = _cache_folder()
    if folder is None:
        return _parsed(build_bundle(root))
    kept = folder / f"{_state(root)}.json"
    try:
        return _parsed(kept.read_text("utf-8"))
    except (OSError, ValueError):
        text = build_bundle(root)
    with suppress(OSError):
        _keep(text, kept)
    return _parsed(text)


def _keep(text: str, kept: Path) -> None:
    """Write the cache whole or not at all, and remove older ones."""
    import tempfile

    kept.parent.mkdir(parents=True, exist_ok=True)
    for old in kept.parent.glob("*.json"):
        old.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=kept.parent, delete=False) as part:
        part.write(text)
    Path(part.name).replace(kept)


def _cache_folder() -> Path | None:
    """Where the bundle is kept; None for a user without a home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "oomdoc" / "bundle"


def _state(root: Path) -> str:
    """Changes when a data file, or the code that reads it, is added, removed or written."""
    import hashlib

    digest = hashlib.sha256(str(root).encode())
    for path in (Path(__file__), *yaml_files(root)):
        status = path.stat()
        digest.update(f"{path}:{status.st_mtime_ns}:{status.st_size}\n".encode())
    return digest.hexdigest()[:32]
