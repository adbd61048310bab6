"""Build hook: puts the data files under `diag/_data/` of the wheel, and all of it as one JSON.

In a checkout (editable install) nothing is copied: `diag.resources` finds `rules/` and `corpus/` beside the package,
so an edited rule takes effect at once.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA_FOLDERS = ("rules", "corpus")
HIDDEN_OR_COMPILED = (".", "__pycache__")


class DataHook(BuildHookInterface[Any]):
    """Adds `rules/`, `corpus/` and `bundle.json` to a standard wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before the wheel is written. Raises RuleFileError when a message or rule file is wrong."""
        if version != "standard":
            return
        root = Path(self.root)
        included = build_data["force_include"]
        for folder in DATA_FOLDERS:
            for path in sorted((root / folder).rglob("*")):
                inside = path.relative_to(root)
                hidden = any(part.startswith(HIDDEN_OR_COMPILED) for part in inside.parts)
                if path.is_file() and not hidden:
                    included[str(path)] = f"diag/_data/{inside.as_posix()}"
        for name, text in _compiled(root).items():
            included[str(self._temporary(name, text))] = f"diag/_data/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the temporary files."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()

    def _temporary(self, name: str, text: str) -> Path:
        """A file that lives until the wheel is written."""
        if not hasattr(self, "_folder"):
            self._folder = tempfile.TemporaryDirectory(prefix="oomdoc-build-")
        path = Path(self._folder.name) / name
        path.write_text(text, encoding="utf-8")
        return path


def _compiled(root: Path) -> dict[str, str]:
    """File name -> JSON: what the program reads instead of YAML."""
    sys.path.insert(0, str(root))
    try:
        from diag import resources
        from diag.rules import load
    finally:
        sys.path.remove(str(root))
    load.read_rules(root / "rules")  # a wheel is never built from a bad rule
    return {resources.BUNDLE: resources.build_bundle(root)}
