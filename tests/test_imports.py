"""A plain `explain` stays light and quiet: no heavy library is imported, no connection is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = (
    "torch transformers sentence_transformers chromadb langchain langchain_core langgraph openai github "
    "slack_bolt slack_sdk mcp numpy pandas scipy sklearn requests httpx"
).split()

EXPLAIN = """
import json, socket, sys

def refuse(self, address):
    raise AssertionError(f"connect to {address}")

socket.socket.connect = socket.socket.connect_ex = refuse
from diag.apps.entry import main

code = main(["explain", sys.argv[1], "--json"])
print("\\n" + json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # With tracing asked for, LangChain would connect at import time.
    environment = {**os.environ, "LANGSMITH_TRACING": "true", "LANGCHAIN_TRACING_V2": "true"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment, capture_output=True, encoding="utf-8", timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["kv-max-len.log", "serving-prefill-oom.log", "healthy.log"])
def test_explain_loads_nothing_heavy_and_opens_no_socket(examples, name):
    done = run(EXPLAIN, str(examples / name))
    assert done.returncode == 0, done.stderr
    body, _, report = done.stdout.rstrip("\n").rpartition("\n")
    seen = json.loads(report)
    assert seen["code"] == 0, done.stderr
    assert json.loads(body)["schema_version"] == 1
    assert [module for module in HEAVY if module in seen["modules"]] == []


def test_importing_the_package_loads_no_parts():
    done = run("import diag, sys; print([m for m in sys.modules if m.startswith('diag.')])")
    assert done.stdout.strip() == "[]", done.stderr


def test_help_does_not_load_the_core():
    done = run(
        "import sys; from diag.apps.entry import main; code = main(['--help'])\n"
        "print('\\nLOADED', code, [m for m in ('diag.pipeline', 'regex', 're2') if m in sys.modules])"
    )
    assert done.stdout.rstrip().endswith("LOADED 0 []"), done.stdout[-300:] + done.stderr
