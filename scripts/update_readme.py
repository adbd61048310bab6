#!/usr/bin/env python3
"""Rewrite the marked blocks of README.md from what the program prints and what was measured.

    python scripts/update_readme.py [--check]

`example`: the first example log, shortened to the lines the diagnosis quotes, and what `oomdoc explain` prints for
it. `accuracy`: `docs/results/accuracy.json` of `scripts/evaluate.py --json`. `plan`:
`docs/results/receipts.json` of `scripts/receipts.py`. `proof`: `docs/results/prove_cpu.json` of
`scripts/prove_cpu.py`. `speed`: the `rows` of every other JSON
in `docs/results/`, as `scripts/bench/*.py --json` write them. A block without its data stays as it is. --check
writes nothing and exits 1 when the file would change. Needs oomdoc installed beside the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results"
ACCURACY = RESULTS / "accuracy.json"
RECEIPTS = RESULTS / "receipts.json"
PROOF = RESULTS / "prove_cpu.json"
TERM_NAMES = {
    "weights": "weights",
    "kv_bytes_per_token": "KV cache, bytes per token",
    "kv_tokens": "KV cache, tokens in the logged pool",
    "max_concurrency": "maximum concurrency",
    "peak_activation": "peak activation",
    "cuda_graphs": "CUDA graphs",
    "non_torch": "CUDA context, NCCL",
    "kv_pool": "KV pool, all terms planned",
    "kv_pool_of_logged_terms": "KV pool, all other terms as logged",
}
EXAMPLE = "examples/kv-max-len.log"
LONGEST = 110  # characters of a quoted log line
GROUP_NAMES = {
    "issues": "public threads, failures",
    "logs": "whole logs, half of them healthy",
    "vllmcpu": "runs of vLLM on a CPU",
    "all": "all",
}


def oomdoc(*arguments: str) -> str:
    """What the installed command prints, 100 columns wide and without colour."""
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    environment.pop("FORCE_COLOR", None)
    command = [str(Path(sys.executable).with_name("oomdoc")), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=True
    )
    return done.stdout


def example_block() -> str:
    """The quoted lines of the example and the answer to it."""
    found = json.loads(oomdoc("explain", EXAMPLE, "--json"))
    log = (ROOT / EXAMPLE).read_text(encoding="utf-8").split("\n")
    quoted = sorted(
        {item["line"] for item in found["diagnosis"]["evidence"] if item["role"] != "echo"}
    )
    lines = [f"$ sed -n '{'p;'.join(map(str, quoted))}p' {EXAMPLE} | cut -c1-{LONGEST}"]
    lines += [log[number - 1][:LONGEST] for number in quoted]
    lines += [
        "",
        f"$ oomdoc explain {EXAMPLE}",
        *oomdoc("explain", EXAMPLE).strip("\n").split("\n"),
    ]
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"


def accuracy_block() -> str | None:
    """Figures by group of cases, oomdoc beside the baselines; None before they were measured."""
    if not ACCURACY.is_file():
        return None
    body = json.loads(ACCURACY.read_text(encoding="utf-8"))
    rows = [
        ["cases", "answers by", "family", "subtype", "gmu verdict", "wrong way", "false alarms"],
        ["---", "---", "--:", "--:", "--:", "--:", "--:"],
    ]
    for group, runs in body["groups"].items():
        named = GROUP_NAMES.get(group, group)
        for run, score in runs.items():
            label = f"{named} ({score['cases']})"
            rows.append([label, run, *_figures(score)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n" + _facts(body["groups"])


def _figures(score: Mapping[str, Any]) -> list[str]:
    has_verdict, healthy = score["direction"]["total"], score["healthy"]
    return [
        _percent(score["family"]["rate"]),
        _percent(score["subtype"]["rate"]),
        _percent(score["direction"]["rate"]),
        str(score["wrong_direction"]) if has_verdict else "-",
        f"{score['false_alarms']} of {healthy}" if healthy else "-",
    ]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _facts(groups: Mapping[str, Mapping[str, Any]]) -> str:
    facts = groups["all"]["oomdoc"]["facts"]
    total = sum(facts.values())
    if not total:
        return ""
    return (
        f"\nOf {total:,} labelled numbers and settings in whole logs, {facts['right']:,} were read right, "
        f"{facts['missing']:,} not at all and {facts['wrong']:,} wrong."
    )


def plan_block() -> str | None:
    """The error of each planned term; None before it was measured."""
    if not RECEIPTS.is_file():
        return None
    body = json.loads(RECEIPTS.read_text(encoding="utf-8"))
    terms = body["terms"]
    rows = [
        f"| {named} | {term['logs']} | {term['mean_abs_pct']:.1f} % | {abs(term['worst_pct']):.1f} % |"
        for name, named in TERM_NAMES.items()
        if (term := terms.get(name))
    ]
    table = ["| term | logs | mean error | worst |", "|---|--:|--:|--:|", *rows]
    halves = [
        f"{TERM_NAMES[name]} {half['mean_abs_pct']:.1f} % ({half['tested_on']} logs)"
        for name, half in body["held_out"].items()
    ]
    table += ["", f"Fitted on one half and tested on the other: {', '.join(halves)}."]
    if peer := body["hf_mem"].get("kv_bytes_per_token"):
        version, error = body["hf_mem"]["version"], peer["mean_abs_pct"]
        table.append(
            f"hf-mem {version}, KV bytes per token on the {peer['logs']} of these logs that it can do: {error:.1f} %."
        )
    return "\n".join(table)


def proof_block() -> str | None:
    """The first fix of each failing start that was tried; None before it was."""
    if not PROOF.is_file():
        return None
    body = json.loads(PROOF.read_text(encoding="utf-8"))
    head = (
        f"{body['of']} starts of vLLM {body['vllm']} that fail for memory: {body['named']} named right, "
        f"{body['mended']} start and answer with the first fix."
    )
    rows = [
        f"| {case['what']} | `{case['class']}` | {_first_fix(case)} | {'yes' if case['mended'] else 'no'} |"
        for case in body["cases"]
    ]
    return "\n".join(
        [
            head,
            "",
            "| failure | named | first fix | starts and answers |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def _first_fix(case: Mapping[str, Any]) -> str:
    if not case["fixes"]:
        return "-"
    fix = case["fixes"][0]
    settings = [f"`{item['set']} {item['to']}`" for item in fix["changes"] if "set" in item]
    how = fix["run"]["how"] if fix["run"] else None
    return ", ".join(settings) or how or fix["title"]


def speed_block() -> str | None:
    """One row a measurement; None before anything was measured."""
    rows = [
        row
        for path in sorted(RESULTS.glob("*.json"))
        if path not in (ACCURACY, RECEIPTS, PROOF)
        for row in json.loads(path.read_text(encoding="utf-8")).get("rows", ())
    ]
    if not rows:
        return None
    table = ["| what | measured | beside |", "|---|---|---|"]
    table += [f"| {row['what']} | {row['measured']} | {row['beside']} |" for row in rows]
    return "\n".join(table)


def replace_block(text: str, name: str, content: str | None) -> str:
    """The text with the block between its two markers replaced. Raises ValueError without the markers."""
    if content is None:
        return text
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{README.name} has no block {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{content.rstrip()}\n{end}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 on a difference"
    )
    options = parser.parse_args(argv)
    old = new = README.read_text(encoding="utf-8")
    blocks = {
        "example": example_block(),
        "accuracy": accuracy_block(),
        "plan": plan_block(),
        "proof": proof_block(),
        "speed": speed_block(),
    }
    for name, content in blocks.items():
        new = replace_block(new, name, content)
    if options.check:
        if new != old:
            print("README.md is out of date; run: python scripts/update_readme.py", file=sys.stderr)
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
