#!/usr/bin/env python3
"""Do oomdoc's fixes work? Tried on the real vLLM, on the CPU, with a tiny random model.

    python scripts/prove_cpu.py --venv DIR [--install] [--only CASE ...] [--keep DIR] [--json OUT]

Each case is a start that fails for memory. Its log is explained, the first fix made, and vLLM started again: it must
start and answer at the first try, and its log must be called healthy. Where the first fix is an action and no
setting, the script does what it says if it set up the cause itself (a limit, another process), and says so. DIR is
a virtual environment with vLLM's CPU build; --install makes it (2.5 GB). Linux; the /dev/shm case needs root.
Exit code 0, with a fix that failed 1, without vLLM 2. Needs oomdoc installed beside the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from proving.cases import Case, all_cases, read_host
from proving.install import RELEASE, install
from proving.server import may_mount
from proving.trial import Run, Trial, prepare, run_trial


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True, help="where vLLM's CPU build is")
    parser.add_argument("--install", action="store_true", help="make it there first")
    parser.add_argument("--release", default=RELEASE, help="with --install")
    parser.add_argument("--only", nargs="+", default=(), metavar="CASE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and models here")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="OUT",
        help="write the figures here; with --only the others in it stay",
    )
    options = parser.parse_args(argv)
    if options.list:
        for case in all_cases(read_host()):
            print(f"{case.name:16}  {case.what}")
        return 0
    if options.install:
        install(options.venv, options.release)
    programs = options.venv.absolute() / "bin"
    if not (programs / "vllm").is_file():
        print(f"{programs / 'vllm'} is missing; --install makes it", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="oomdoc-prove-"))
        )
        trials = _try_all(folder.absolute(), programs, options.only)
    print(table(trials))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        before = None
        if options.only and options.json.is_file():
            before = json.loads(options.json.read_text(encoding="utf-8"))
        body = as_json(trials, _version(programs), before)
        options.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return int(not all(trial.mended and trial.named for trial in trials))


def _try_all(folder: Path, programs: Path, only: Sequence[str]) -> list[Trial]:
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    trials = []
    for name in only or [case.name for case in all_cases(read_host())]:
        case = _case(name)
        if case.limits.shared_memory is not None and not may_mount():
            print(f"{name}: skipped, a /dev/shm of its own needs root", file=sys.stderr)
            continue
        trials.append(run_trial(case, folder=folder, programs=programs))
        print(_progress(trials[-1]), file=sys.stderr, flush=True)
    return trials


def _case(name: str) -> Case:
    """The case, sized for the memory that is there now. Raises SystemExit for an unknown name."""
    found = {case.name: case for case in all_cases(read_host())}
    if name not in found:
        raise SystemExit(f"no case {name!r}; there are {', '.join(found)}")
    return found[name]


def _version(programs: Path) -> str:
    """What `vllm --version` prints."""
    done = subprocess.run(
        [str(programs / "python"), "-c", "import vllm.version as v; print(v.__version__)"],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return (done.stdout.strip().splitlines() or [RELEASE])[-1]


def _progress(trial: Trial) -> str:
    first = trial.tried[0] if trial.tried else None
    verdict = "mended" if trial.mended else "NOT MENDED"
    named = trial.subtype or trial.outcome
    return (
        f"{trial.case}: {named}{'' if trial.named else ' (WRONG)'}; "
        f"{first[0].title if first else 'no fix'}: {verdict} ({trial.failed.seconds:.0f} s"
        + (f", {first[1].seconds:.0f} s)" if first and first[1] else ")")
    )


def table(trials: Sequence[Trial]) -> str:
    """A Markdown table, one case a row."""
    lines = ["| failure | named | first fix | started and answered |", "|---|---|---|---|"]
    for trial in trials:
        first, run = trial.tried[0] if trial.tried else (None, None)
        done = _setting(trial) or "-"
        named = f"`{trial.subtype}`" if trial.named else f"`{trial.subtype}`, wrong"
        verdict = "yes" if trial.mended else "no" if run or first is None else "not tried"
        lines.append(f"| {trial.what} | {named} | {done} | {verdict} |")
    return "\n".join(lines)


def _setting(trial: Trial) -> str:
    """The first fix in short: what was set, or what was done."""
    if not trial.tried:
        return ""
    fix, run = trial.tried[0]
    if run is not None and fix.command is None:
        return run.how
    settings = [
        f"`{item.flag or item.env} {item.to}`" for item in fix.changes if item.flag or item.env
    ]
    return ", ".join(settings) or fix.title


def as_json(
    trials: Sequence[Trial], version: str, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The figures. `before`: those of an earlier run with the same release; its other cases are kept."""
    cases = [_case_json(trial) for trial in trials]
    if before and before.get("vllm") == version:
        anew = {case["case"] for case in cases}
        cases = [case for case in before["cases"] if case["case"] not in anew] + cases
    return {
        "vllm": version,
        "mended": sum(case["mended"] for case in cases),
        "named": sum(case["class"] in case["expected"] for case in cases),
        "of": len(cases),
        "cases": cases,
    }


def _case_json(trial: Trial) -> dict[str, Any]:
    return {
        "case": trial.case,
        "what": trial.what,
        "failed": _run_json(trial.failed),
        "error": trial.error,
        "class": trial.subtype,
        "expected": list(trial.expected),
        "same_without_command": trial.same_without_command,
        "mended": trial.mended,
        "log_after": trial.after,
        "fixes": [
            {
                "id": fix.id,
                "title": fix.title,
                "fits": fix.fits,
                "changes": [
                    {"set": item.flag or item.env, "from": item.from_, "to": item.to}
                    if item.action is None
                    else {"do": item.action}
                    for item in fix.changes
                ],
                "run": _run_json(run) if run else None,
            }
            for fix, run in trial.tried
        ],
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "command": run.command,
        "how": run.how,
        "ready": run.ready,
        "answered": run.answered,
        "came_back": run.came_back,
        "exit_code": run.exit_code,
        "seconds": run.seconds,
        "killed": list(run.killed),
    }


if __name__ == "__main__":
    sys.exit(main())
