"""Makes the tables of vLLM's flags and environment variables by release from its source packages.

    python scripts/build_flags.py                 fetch every release, read it, write corpus/flags/
    python scripts/build_flags.py --sources DIR   read DIR/RELEASE/vllm instead of fetching
    python scripts/build_flags.py --check ...     write nothing, exit 1 on a difference

Sources are parsed, never imported or run, and deleted after reading. A release that can't be had in three minutes is
left out and named. Needs the network (pip's index) unless --sources is given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flagtable.arguments import Flag, read_flags
from flagtable.packages import chosen, listed, unpacked
from flagtable.runs import as_yaml, flag_rows, variable_rows
from flagtable.sources import Sources
from flagtable.variables import read_variables
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "corpus" / "flags"
FLAGS_HEAD = """Flags of `vllm serve` by release, made by scripts/build_flags.py from vLLM's sources; do not edit.
runs: [first release, first release without it]. is: the flag that a second spelling stands for.
default, takes, type, negated (--no-NAME works), choices: the value, or {release from which: value}; a default is
argparse's, as text; "=" starts source text that only running it would resolve. deprecated: the flag's own help says
so from that release on. Left out: default None, takes value, no type, no choices."""
VARIABLES_HEAD = """Environment variables of vllm/envs.py by release, made by scripts/build_flags.py; do not edit.
Written as flags.yaml. Older releases have no such file: what is in its first release may be older."""


def local(folder: Path) -> Iterator[tuple[str, Path | None]]:
    """Releases that lie unpacked below `folder`, oldest first."""
    for version in chosen(path.name for path in folder.iterdir() if path.is_dir()):
        yield version, folder / version


def fetched() -> Iterator[tuple[str, Path | None]]:
    """Releases from the index, oldest first, each unpacked for as long as it is looked at."""
    for version in chosen(listed()):
        with unpacked(version) as folder:
            yield version, folder


def build(releases: Iterator[tuple[str, Path | None]]) -> tuple[dict[str, str], list[str]]:
    """The texts of the two files by name, and the releases left out."""
    flags: dict[str, dict[str, Flag]] = {}
    variables: dict[str, dict[str, str | None]] = {}
    left_out: list[str] = []
    for version, folder in releases:
        sources = Sources(folder) if folder else None
        found = read_flags(sources) if sources else {}
        if sources is None or not found:
            left_out.append(version)
            continue
        release = Version(version).base_version
        flags[release] = found
        table = read_variables(sources)
        if table is not None:
            variables[release] = table
        print(f"{version}: {len(found)} flags, {len(table or ())} variables", file=sys.stderr)
    texts = {
        "flags.yaml": as_yaml(FLAGS_HEAD, list(flags), "flags", flag_rows(flags)),
        "environment.yaml": as_yaml(
            VARIABLES_HEAD, list(variables), "variables", variable_rows(variables)
        ),
    }
    return texts, left_out


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, help="folder with RELEASE/vllm, instead of pip")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the two files")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 on a difference"
    )
    options = parser.parse_args(argv)
    texts, left_out = build(local(options.sources) if options.sources else fetched())
    if left_out:
        print(f"left out, no source in time: {', '.join(left_out)}", file=sys.stderr)
    different = [
        name
        for name, text in texts.items()
        if not (options.output / name).is_file()
        or (options.output / name).read_text(encoding="utf-8") != text
    ]
    if options.check:
        if different:
            print(f"out of date: {', '.join(different)}", file=sys.stderr)
        return int(bool(different))
    for name in different:
        (options.output / name).write_text(texts[name], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
