from __future__ import annotations

import io
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from report_samples import SAMPLES
from rewrite_samples import sample

import diag.pipeline
from diag.apps.entry import main
from diag.apps.fix import choose
from diag.errors import UsageError
from diag.fixes.model import Change, Fix


@pytest.fixture
def deployed(tmp_path, monkeypatch, examples):
    """A folder, made the current one, with a log that asks for a shorter context and a compose file."""
    (tmp_path / "vllm.log").write_bytes((examples / "kv-max-len.log").read_bytes())
    (tmp_path / "healthy.log").write_bytes((examples / "healthy.log").read_bytes())
    for name in ("compose-list.yaml", "compose-strings.yaml", "serve.sh", "serve.yaml"):
        (tmp_path / name).write_text(sample(name), "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Answer(io.StringIO):
    """A terminal at which somebody types."""

    def isatty(self):
        return True


def fix(*args):
    return main(["fix", "vllm.log", "--in", "compose-list.yaml", *args])


def test_the_diff_is_printed_and_patch_takes_it(deployed, capsys):
    assert fix("--fix", "shorten_context") == 0
    out, err = capsys.readouterr()
    assert out.startswith("--- a/compose-list.yaml\n+++ b/compose-list.yaml\n@@ ")
    assert '-      - "32768"   # what the product asks for\n+      - "148752"   # what' in out
    assert err == "oomdoc: fix shorten_context: Limit the context to 148,752 tokens\n"
    assert (deployed / "compose-list.yaml").read_text() == sample("compose-list.yaml")
    subprocess.run(["patch", "-p1", "-s"], input=out, text=True, check=True)
    assert fix("--fix", "shorten_context") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("compose-list.yaml: has this fix already\n")


def test_the_first_fix_that_fits_is_taken(deployed, capsys):
    assert fix() == 0
    out, err = capsys.readouterr()
    assert err.startswith("oomdoc: fix raise_gmu: ")
    assert "+      - --gpu-memory-utilization" in out


def test_write_keeps_a_backup_and_the_mode(deployed, capsys):
    path = deployed / "compose-list.yaml"
    path.chmod(0o640)
    assert fix("--write", "--yes") == 0
    assert '"0.92"' in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (deployed / "compose-list.yaml.bak").read_text() == sample("compose-list.yaml")
    first = path.read_text()
    assert fix("--fix", "2", "--write", "--yes") == 0
    assert (deployed / "compose-list.yaml.bak.1").read_text() == first
    assert stat.S_IMODE((deployed / "compose-list.yaml.bak.1").stat().st_mode) == 0o640
    assert capsys.readouterr().err.endswith("written; the old one is compose-list.yaml.bak.1\n")
    assert sorted(item.name for item in deployed.iterdir() if item.name.startswith(".")) == []


def test_a_link_stays_a_link(deployed):
    (deployed / "link.yaml").symlink_to("compose-list.yaml")
    assert main(["fix", "vllm.log", "--in", "link.yaml", "--write", "--yes"]) == 0
    assert (deployed / "link.yaml").is_symlink()
    assert '"0.92"' in (deployed / "compose-list.yaml").read_text()


@pytest.mark.parametrize(
    ("answer", "written"), [("y\n", True), ("yes\n", True), ("\n", False), ("", False)]
)
def test_write_asks(deployed, capsys, monkeypatch, answer, written):
    monkeypatch.setattr(sys, "stdin", Answer(answer))
    assert fix("--write") == 0
    assert "Write compose-list.yaml? [y/N] " in capsys.readouterr().err
    assert (deployed / "compose-list.yaml.bak").exists() is written
    assert ('"0.92"' in (deployed / "compose-list.yaml").read_text()) is written


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["vllm.log", "--in", "compose-list.yaml", "--write"], "nobody can answer; add --yes"),
        (["vllm.log", "--in", "compose-list.yaml", "--yes"], "--yes does nothing without --write"),
        (["vllm.log", "--in", "nope.yaml"], "nope.yaml: no such file"),
        (["vllm.log", "--in", "."], "is a directory"),
        (["vllm.log", "--in", "-"], "--in needs a file"),
        (["nope.log", "--in", "compose-list.yaml"], "nope.log"),
        (["vllm.log", "--in", "vllm.log"], "vllm.log: "),
        (
            ["vllm.log", "--in", "compose-strings.yaml"],
            "several services run vLLM: embed, chat, ocr",
        ),
        (
            ["vllm.log", "--in", "compose-list.yaml", "--fix", "99"],
            "there is no fix '99'; there are: 1 raise_gmu",
        ),
        (["vllm.log", "--in", "compose-list.yaml", "--service", "x"], "there is no service 'x'"),
    ],
)
def test_what_can_not_be_done_ends_with_2(deployed, capsys, monkeypatch, args, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["fix", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_file_that_is_no_text(deployed, capsys):
    (deployed / "x.yaml").write_bytes(b"\xff\xfe\x00a")
    assert main(["fix", "vllm.log", "--in", "x.yaml"]) == 2
    assert "x.yaml: is no UTF-8 text" in capsys.readouterr().err


def test_nothing_to_fix(deployed, capsys):
    assert main(["fix", "healthy.log", "--in", "compose-list.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing failed" in err


def test_the_service_and_the_script(deployed, capsys):
    assert main(["fix", "vllm.log", "--in", "compose-strings.yaml", "--service", "chat"]) == 0
    assert (
        "+          --gpu-memory-utilization 0.92   # behind the proxy" in capsys.readouterr().out
    )
    assert main(["fix", "vllm.log", "--in", "serve.sh"]) == 0
    assert "+    --gpu-memory-utilization 0.92 2>&1 | tee" in capsys.readouterr().out


@pytest.fixture
def one_fix(monkeypatch):
    """The core proposes this one fix."""

    def use(*changes, fits=True):
        def diagnose(*args, **options):
            only = Fix(id="only", title="Do it", changes=changes, fits=fits, proof="")
            return replace(SAMPLES["kv_max_len"](), fixes=(only,))

        monkeypatch.setattr(diag.pipeline, "diagnose", diagnose)

    return use


def test_what_the_file_has_no_place_for_is_told(deployed, capsys, one_fix):
    one_fix(Change(env="NCCL_DEBUG", to="INFO"), Change(action="read the log"))
    assert main(["fix", "vllm.log", "--in", "serve.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "note: start vLLM with NCCL_DEBUG=INFO in its environment" in err
    assert "note: read the log" in err
    assert "serve.yaml: nothing of this fix can be put into a vLLM configuration" in err


def test_an_unproved_fix_says_so(deployed, capsys, one_fix):
    one_fix(Change(flag="--max-num-seqs", to=64), fits=None)
    assert main(["fix", "vllm.log", "--in", "serve.yaml"]) == 0
    out, err = capsys.readouterr()
    assert "+max-num-seqs: 64" in out
    assert "too few numbers to prove" in err


def test_a_fix_without_settings_is_not_chosen():
    talk = Fix(id="talk", title="", changes=(Change(action="free the card"),), fits=True, proof="")
    maybe = Fix(id="maybe", title="", changes=(Change(flag="--a", to=1),), fits=None, proof="")
    sure = Fix(id="sure", title="", changes=(Change(flag="--b", to=1),), fits=True, proof="")
    assert choose([talk, maybe, sure], None) is sure
    assert choose([talk, maybe], None) is maybe
    assert choose([talk, maybe], "1") is talk
    assert choose([talk, maybe], "talk") is talk
    with pytest.raises(UsageError, match="no fix for this failure is a setting"):
        choose([talk], None)


def test_the_command_of_the_file_serves_the_diagnosis(deployed, monkeypatch):
    asked = {}
    real = diag.pipeline.diagnose

    def diagnose(source, **options):
        asked.update(options)
        return real(source, **options)

    monkeypatch.setattr(diag.pipeline, "diagnose", diagnose)
    assert fix("--attempt", "first", "--gpu", "L4", "--vllm-version", "0.11.0") == 0
    assert asked == {
        "attempt": "first",
        "gpu": "L4",
        "vllm_version": "0.11.0",
        "name": "vllm.log",
        "launch": "vllm serve --model Qwen/Qwen3-32B --tensor-parallel-size 2 --max-model-len 32768 "
        "--served-model-name chat",
    }
