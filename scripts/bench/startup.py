#!/usr/bin/env python3
"""How long does `oomdoc explain` take on a log of about 100 KB, beside importing its libraries alone?

    python scripts/bench/startup.py [--rounds N] [--json OUT]

The two commands run in turn, so a busy machine slows both; medians of wall and CPU time are printed with their
ratio. The log is an example of `examples/` with more statistics and access lines. Needs oomdoc installed beside
the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "serving-prefill-oom.log"
SIZE = 100_000
IMPORTS = "import typer, rich, pydantic, yaml"


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one run of a command."""

    wall: float
    cpu: float


def make_log(size: int) -> str:
    """The example, its serving part repeated until the text has about `size` characters."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    started = next(i for i, line in enumerate(lines) if "Application startup complete" in line) + 1
    failed = next(i for i, line in enumerate(lines) if "Dumping input data" in line)
    serving = lines[started:failed]
    missing = size - sum(len(line) + 1 for line in lines)
    times = 1 + max(0, missing) // sum(len(line) + 1 for line in serving)
    return "\n".join([*lines[:started], *serving * times, *lines[failed:]]) + "\n"


def run(command: Sequence[str], folder: str) -> Spent:
    """One run in `folder`. Raises CalledProcessError when it fails."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(wall=wall, cpu=cpu)


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians in seconds: command name -> wall and cpu. One unmeasured round warms the caches."""
    with tempfile.TemporaryDirectory(prefix="oomdoc-bench-") as folder:
        log = Path(folder) / "vllm.log"
        log.write_text(make_log(SIZE), encoding="utf-8")
        commands = {
            "explain": [str(Path(sys.executable).with_name("oomdoc")), "explain", log.name],
            "imports": [sys.executable, "-c", IMPORTS],
        }
        spent: dict[str, list[Spent]] = {name: [] for name in commands}
        for number in range(rounds + 1):
            for name, command in commands.items():
                taken = run(command, folder)
                if number:
                    spent[name].append(taken)
    return {
        name: {"wall": median(one.wall for one in runs), "cpu": median(one.cpu for one in runs)}
        for name, runs in spent.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    options = parser.parse_args(argv)
    found = measure(options.rounds)
    explain, imports = found["explain"], found["imports"]
    ratio = {kind: explain[kind] / imports[kind] for kind in ("wall", "cpu")}
    for name, figures in found.items():
        print(f"{name:8}  wall {figures['wall']:.3f} s  cpu {figures['cpu']:.3f} s")
    print(f"ratio     wall {ratio['wall']:.2f}    cpu {ratio['cpu']:.2f}")
    if options.json:
        row = {
            "what": "`oomdoc explain` on a log of 100 KB, whole process",
            "measured": f"{explain['wall']:.2f} s ({explain['cpu']:.2f} s CPU)",
            "beside": f"`python -c '{IMPORTS}'`: {imports['wall']:.2f} s; ratio {ratio['wall']:.1f}",
        }
        body = {"rounds": options.rounds, "seconds": found, "ratio": ratio, "rows": [row]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
