from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from report_samples import SAMPLES

from diag.errors import Location, LogReadError


@pytest.fixture
def fake_diagnose(monkeypatch):
    """The core with canned answers: the file's stem names the sample; calls are recorded."""
    calls = []

    def diagnose(source, *, name=None, **options):
        calls.append({"source": source, "name": name, **options})
        if source == "-":
            sample = sys.stdin.buffer.read().decode().strip()
        else:
            assert isinstance(source, Path)
            sample = source.stem
            if not source.exists():
                raise LogReadError(
                    "no such file", location=Location(str(source)), hint="check the path"
                )
        if sample == "boom":
            raise ZeroDivisionError("\x1b[31mboom")
        if sample == "stopped":
            raise KeyboardInterrupt
        diagnosis = SAMPLES[sample]()
        return replace(diagnosis, source=replace(diagnosis.source, name=name))

    module = ModuleType("diag.pipeline")
    module.diagnose = diagnose
    monkeypatch.setitem(sys.modules, "diag.pipeline", module)
    return calls


@pytest.fixture
def logs(tmp_path, monkeypatch, fake_diagnose):
    """A folder, made the current one, with a file for each sample."""
    for name in (*SAMPLES, "boom", "stopped"):
        (tmp_path / f"{name}.log").write_text("log\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path
