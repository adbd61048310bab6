"""Labelled cases from three folder layouts -> one `Case` each.

* threads: `*.json`, one case a file: log, label, acceptable readings, the direction verdict, launch command;
* logs: `index.jsonl` beside whole `.log` files, with the facts a perfect parser finds; healthy ones included;
* runs: the same shape, written by a harness that ran vLLM (family "none" = healthy, or failed for another reason).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEALTHY = "healthy"
ANY = "*"  # as subtype: every subtype of the family is right

FAMILY_OF_PREFIX = {
    "kv": "kv_reservation",
    "tp": "tp_buffer",
    "act": "activation_spike",
    "alloc": "allocator_transient",
    "weights": "weights",
    "graph": "cuda_graph",
    "base": "device_baseline",
    "host": "host_memory",
    "compile": "compile",
    "look": "lookalike",
    "unknown": "unknown",
}

Reading = tuple[str, str]  # family, subtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One labelled log. `gmu`, `vllm_version` and `launch` None: the label does not say."""

    id: str
    group: str
    log: str | Path  # the text itself, or the file that holds it
    label: Reading
    acceptable: frozenset[Reading]
    agreed: bool = True
    gmu: str | None = None
    vllm_version: str | None = None
    launch: str | None = None
    facts: tuple[Mapping[str, Any], ...] = ()  # of the labelled start; further starts, if labelled

    @property
    def healthy(self) -> bool:
        """Whether the right answer is that nothing failed."""
        return self.label[0] == HEALTHY

    @property
    def families(self) -> frozenset[str]:
        """The families that count as right."""
        return frozenset(family for family, _ in self.acceptable)

    def accepts(self, reading: Reading) -> bool:
        """Whether a family and subtype count as right."""
        return reading in self.acceptable or (reading[0], ANY) in self.acceptable


def family_of(subtype: str) -> str:
    """The family a dotted subtype belongs to."""
    return FAMILY_OF_PREFIX.get(subtype.partition(".")[0], "unknown")


def read_cases(folder: Path) -> list[Case]:
    """All cases of a folder, or of its subfolders when it holds none itself.

    Raises:
        FileNotFoundError: there is no labelled case.
    """
    found = list(_one_folder(folder))
    if not found:
        found = [
            case
            for inside in sorted(folder.iterdir())
            if inside.is_dir()
            for case in _one_folder(inside)
        ]
    if not found:
        raise FileNotFoundError(
            f"{folder}: no labelled cases (*.json with a label, or index.jsonl)"
        )
    return found


def _one_folder(folder: Path) -> Iterator[Case]:
    index = folder / "index.jsonl"
    if index.is_file():
        for line in index.read_text(encoding="utf-8").splitlines():
            if line.strip():
                row = json.loads(line)
                make = _run_case if "command" in row else _log_case
                yield make(row, folder)
        return
    for path in sorted(folder.glob("*.json")):
        body = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(body, dict) and "label" in body and "log" in body:
            yield _thread_case(body, folder.name)


def _thread_case(body: Mapping[str, Any], group: str) -> Case:
    label = (body["label"]["family"], body["label"]["subtype"])
    return Case(
        id=body["id"],
        group=group,
        log=body["log"] + "\n",  # a newline says that it is no file name
        label=label,
        acceptable=frozenset(
            [label, *((family, subtype) for family, subtype in body["acceptable"])]
        ),
        agreed=body["agreed"],
        gmu=body.get("gmu_verdict"),
        vllm_version=clean_version(body.get("vllm_version")),
        launch=clean_launch(body.get("launch")),
    )


def _log_case(row: Mapping[str, Any], folder: Path) -> Case:
    if row["outcome"] == HEALTHY:
        label = (HEALTHY, HEALTHY)
    else:
        label = (row["family"], row["subtype"])
    others = ((family_of(subtype), subtype) for subtype in row.get("also_acceptable") or ())
    return Case(
        id=f"{folder.name}/{row['file']}",
        group=folder.name,
        log=folder / row["file"],
        label=label,
        acceptable=frozenset([label, *others]),
        agreed=row.get("label_confidence") == "high",
        facts=(row["facts"], *(row.get("facts_per_run") or ())),
    )


def _run_case(row: Mapping[str, Any], folder: Path) -> Case:
    family, subtype = row["family"], row["subtype"]
    if family == "none":
        label = (HEALTHY, HEALTHY) if subtype == HEALTHY else ("lookalike", ANY)
    elif family_of(subtype) == "host_memory" and subtype == "host.address_space_limit":
        label = ("host_memory", ANY)  # a limit our taxonomy has no name of its own for
    else:
        label = (family, subtype)
    other = (row.get("alt_subtype") or "").split(" ")[0]
    acceptable = {label} | ({(family_of(other), other)} if other else set())
    return Case(
        id=f"{folder.name}/{row['file']}",
        group=folder.name,
        log=folder / row["file"],
        label=label,
        acceptable=frozenset(acceptable),
        facts=(row["facts"],),
    )


_VERSION = re.compile(r"v?(?P<first>\d+\.\d+(?:\.[0-9x]+)?\S*)")
_VAGUE = re.compile(r"\d+\.\d*x|\d+\.\d+-\d")  # "0.2x" is any of 0.20 to 0.29


def clean_version(text: str | None) -> str | None:
    """The release at the start of a label's prose, None when it names none.

    >>> clean_version("0.7.1 (vllm-ascend 0.7.1rc1)"), clean_version("0.2x fork"), clean_version("main (2025-09)")
    ('0.7.1', None, None)
    """
    match = _VERSION.match(text or "")
    if match is None or _VAGUE.match(match["first"]):
        return None
    return match["first"]


_RUNNER = re.compile(
    r"(?:[A-Z_][A-Z0-9_]*=\S+\s+)*"
    r"(?:vllm serve|vllm-openai\S* (?:serve|--)|python3? |docker run|api_server |(?:vllm\.)?LLM\()"
)
_FLAG = re.compile(r"(?:^|\s)--?[a-z]|LLM\(|^\S+ \S+ \S+$")


def clean_launch(text: str | None) -> str | None:
    """The launch text when it reads like a command and not like prose.

    >>> clean_launch("vllm serve openai/gpt-oss-120b")
    'vllm serve openai/gpt-oss-120b'
    >>> clean_launch("vllm serve with tensor parallel over L4 cards") is None
    True
    """
    if text and _RUNNER.match(text) and _FLAG.search(text):
        return text
    return None
