"""Facts about vLLM's flags that were read by other means: release notes, logs, the earlier hand-made table."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from diag.fixes.flag_history import describe, history, names, nearest, releases_read, spelled_out
from diag.fixes.flags import takes
from diag.resources import read_data

SHARED = Path(__file__).resolve().parents[4] / "shared"


def exists(name, version):
    found = history(name)
    return None if found is None else found.exists(Version(version))


@pytest.mark.parametrize(
    ("name", "version", "known"),
    [
        ("--kv-cache-memory-bytes", "0.10.1.1", False),
        ("--kv-cache-memory-bytes", "0.10.2", True),
        ("--cuda-graph-sizes", "0.8.5", False),
        ("--cuda-graph-sizes", "0.9.0", True),
        ("--cuda-graph-sizes", "0.12.0", True),
        ("--cuda-graph-sizes", "0.13.0", False),
        ("--cudagraph-capture-sizes", "0.11.0", False),
        ("--cudagraph-capture-sizes", "0.11.2", True),
        ("--swap-space", "0.17.1", True),
        ("--swap-space", "0.18.0", False),
        ("--preemption-mode", "0.10.2", True),
        ("--preemption-mode", "0.11.0", False),
        ("--num-scheduler-steps", "0.10.0", True),
        ("--num-scheduler-steps", "0.10.1", False),
        ("--guided-decoding-backend", "0.11.2", True),  # added in a loop, deprecated
        ("--speculative-model", "0.8.0", True),
        ("--speculative-model", "0.8.5", False),
        ("--device-memory-utilization", "0.30.0", False),
        ("--device-memory-utilization", "0.31.0", True),
        ("--language-model-only", "0.17.1", True),
        ("--config", "0.6.0", True),
        ("-tp", "0.2.7", True),
        ("-O", "0.20.0", True),  # taken by the parser before argparse
        ("VLLM_USE_V1", "0.11.0", True),
        ("VLLM_USE_V1", "0.11.1", False),
        ("VLLM_ATTENTION_BACKEND", "0.14.1", True),
        ("--max-model-len", "0.8.5.dev274+gabc", True),
        ("--max-model-len", "0.99.0", True),  # newer than what was read: as the newest
        ("--max-model-len", "0.2.0", None),  # older than what was read
        ("VLLM_USE_V1", "0.4.1", None),  # envs.py came with 0.4.2
    ],
)
def test_which_release_has_it(name, version, known):
    assert exists(name, version) is known


@pytest.mark.parametrize(
    ("name", "version", "default"),
    [
        ("--gpu-memory-utilization", "0.2.7", "0.9"),
        ("--gpu-memory-utilization", "0.19.1", "0.9"),
        ("--gpu-memory-utilization", "0.20.0", "0.92"),
        ("--device-memory-utilization", "0.33.0", "0.92"),
        ("--swap-space", "0.6.0", "4"),
        ("--mm-processor-cache-gb", "0.12.0", "4"),
        ("--max-num-seqs", "0.6.0", "256"),
        ("--max-seq-len-to-capture", "0.9.0", "8192"),
        ("--tensor-parallel-size", "0.33.0", "1"),
        ("--kv-cache-dtype", "0.11.0", "auto"),
        ("--disable-log-requests", "0.9.0", "False"),
        ("--cpu-offload-gb", "0.7.3", "0"),
        ("--swap-space", "0.18.0", None),
        ("VLLM_USE_V1", "0.7.3", "0"),
        ("VLLM_USE_V1", "0.8.0", "1"),
        ("VLLM_FUSED_MOE_CHUNK_SIZE", "0.11.2", "32768"),
        ("VLLM_FUSED_MOE_CHUNK_SIZE", "0.12.0", "16384"),
        ("VLLM_MM_INPUT_CACHE_GIB", "0.8.0", "8"),
        ("VLLM_MM_INPUT_CACHE_GIB", "0.8.5", "4"),
    ],
)
def test_default_by_release(name, version, default):
    assert history(name).default(Version(version)) == default


def test_nothing_is_said_about_an_unknown_release():
    found = history("--swap-space")
    assert (found.exists(None), found.default(None)) == (None, None)


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("--max-model-len", "value"),
        ("--enforce-eager", "switch"),
        ("--cudagraph-capture-sizes", "list"),
        ("--compilation-config", "json"),
        ("--limit-mm-per-prompt", "json"),
        ("-tp", "value"),
        ("--no-such-flag", "value"),
    ],
)
def test_what_follows_a_flag(flag, what):
    assert takes(flag) == what


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpu_memory_utilization", "--gpu-memory-utilization"),
        ("--max_model_len=4096", "--max-model-len"),
        ("--compilation-config.cudagraph_mode", "--compilation-config"),
        ("--no-enable-prefix-caching", "--enable-prefix-caching"),
        ("--no-such-flag", "--no-such-flag"),
        ("vllm_use_v1", "VLLM_USE_V1"),
        ("-tp", "-tp"),
    ],
)
def test_names_as_people_write_them(text, name):
    assert spelled_out(text) == name


def test_a_typo_has_a_nearest_name():
    assert nearest("--gpu-memory-utilisation")[0] == "--gpu-memory-utilization"
    assert nearest("VLLM_USE_VI", version=Version("0.9.0"))[0] == "VLLM_USE_V1"
    assert "--swap-space" not in nearest("--swap-spaces", version=Version("0.20.0"))
    assert nearest("--qqqqqqqqqq") == ()


@pytest.mark.parametrize(
    ("name", "version", "parts"),
    [
        ("--swap-space", "0.12.0", ["to 0.17.1", "default in 0.12.0: 4", "does nothing with V1"]),
        ("--swap-space", "0.20.0", ["not in 0.20.0", "--kv-offloading-size"]),
        ("--cuda-graph-sizes", "0.20.0", ["0.9.0 to 0.12.0", '"--cudagraph-capture-sizes"']),
        ("--num-speculative-tokens", "0.9.0", ['num_speculative_tokens in the JSON of "--spec']),
        ("-tp", "0.9.0", ["second spelling of --tensor-parallel-size"]),
        ("--gpu-memory-utilisation", None, ["no vLLM release", "nearest: --gpu-memory-utili"]),
    ],
)
def test_a_description_says_what_matters(name, version, parts):
    text = describe(name, Version(version) if version else None)
    assert [part for part in parts if part not in text] == []


def test_an_effect_belongs_to_an_engine():
    found = history("--swap-space")
    assert [effect.what for effect in found.in_force(Version("0.9.0"), "V1")] == ["no_effect"]
    assert found.in_force(Version("0.9.0"), "V0") == ()
    assert found.in_force(Version("0.7.3"), "V1") == ()


def test_the_hand_written_changes_fit_the_tables():
    body = read_data("corpus/flags/changes.yaml")
    for name, row in body["renamed"].items():
        found = history(name)
        assert found is not None, name
        assert found.runs[-1].gone or found.deprecated_since, name
        successor = history(found.successor.flag)
        assert successor is not None, name
        if found.runs[-1].gone and found.successor.exact:  # there when the old name goes
            assert successor.exists(Version(found.runs[-1].gone)) is not False, name
        assert row["evidence"], name
    for name, rows in body["effects"].items():
        found = history(name)
        assert found is not None, name
        for row in rows:
            assert row["what"] in ("no_effect", "falls_back", "refused"), name
            assert row["evidence"], name
            inside = SpecifierSet(row["releases"])
            assert any(found.exists(Version(r)) and r in inside for r in releases_read()), name


def test_every_release_since_0_4_is_in_the_table():
    minors = {tuple(map(int, release.split(".")[:2])) for release in releases_read()}
    assert minors >= {(0, minor) for minor in range(4, 34)}
    assert len(names("flag")) > 400
    assert len(names("variable")) > 300


FACTS = SHARED / "vllm-facts" / "defaults.yaml"


@pytest.mark.skipif(not FACTS.is_file(), reason="reference data is not here")
def test_agrees_with_an_independent_reading_of_46_releases():
    facts = yaml.safe_load(FACTS.read_text())
    ladder = [Version(str(release)) for release in facts["ladder"]]
    wrong = []
    for row in facts["renamed_or_removed"]:
        for name in (part.strip() for part in row["old"].split(",")):
            if row["last"] is None or history(name) is None:
                continue
            last = ladder.index(Version(str(row["last"])))
            having = [history(name).exists(release) for release in ladder[last : last + 2]]
            if having != [True, False]:
                wrong.append((name, row["last"], having))
    for row in facts["vllm_environment"]:
        for item in row["defaults"]:
            first = Version(item["versions"].split("..")[0])
            default = history(row["name"]).default(first)
            if {"None": "unset"}.get(default, default) != item["default"]:
                wrong.append((row["name"], str(first), default, item["default"]))
    assert wrong == []
