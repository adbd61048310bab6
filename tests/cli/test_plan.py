"""`oomdoc plan` from outside: what it prints, what it refuses, with which exit code."""

from __future__ import annotations

import json

import pytest

from diag.apps.entry import main

QWEN = ["plan", "Qwen/Qwen3-32B", "--gpu", "A100-80GB", "--vllm", "0.33"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for variable in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def run(capfd, *arguments):
    code = main(list(arguments))
    out, err = capfd.readouterr()
    return code, out, err


def document(capfd, *arguments):
    code, out, err = run(capfd, *arguments, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_text_says_whether_it_starts_and_why(capfd):
    code, out, err = run(capfd, *QWEN, "--max-model-len", "131072")
    assert (code, err) == (0, "")
    assert out.startswith("It will not start: one request of full length does not fit the KV pool.")
    assert "needs 32.00 of" in out
    assert "256 KiB a rank" in out
    assert "--max-model-len" in out
    assert "\x1b" not in out
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("width", ["40", "60", "80", "160"])
def test_text_keeps_to_the_width(capfd, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    _, out, _ = run(capfd, *QWEN, "--max-model-len", "8192")
    assert max(map(len, out.splitlines())) <= int(width)


def test_json_has_every_term_with_range_and_source(capfd):
    plan = document(capfd, *QWEN, "--max-model-len", "16384")
    assert plan["starts"] is True
    assert plan["kv"]["bytes_per_token"] == 262144
    assert plan["deployment"]["gpu_memory_utilization"] == 0.92
    terms = {term["term"]: term for term in plan["terms"]}
    assert set(terms) == {"context", "weights", "peak_activation", "non_torch", "cuda_graphs"}
    assert all(
        term["low"] <= term["bytes"] <= term["high"] and term["source"] for term in terms.values()
    )
    charged = sum(term["bytes"] for term in plan["terms"] if term["charged"])
    assert plan["requested_bytes"] - charged == plan["kv"]["bytes"]


def test_vllm_flags_pass_through(capfd):
    plan = document(
        capfd, "plan", "Qwen/Qwen3-32B-FP8", "--gpu", "2xL40S", "-tp", "2", "--gpu-memory-utilization=0.95",
        "--kv-cache-dtype", "fp8", "--max-num-seqs", "32", "--enforce-eager", "--trust-remote-code",
    )  # fmt: skip
    own = plan["deployment"]
    assert (own["tensor_parallel_size"], own["gpu_memory_utilization"]) == (2, 0.95)
    assert (own["kv_cache_dtype"], own["max_num_seqs"]) == ("fp8", 32)
    assert plan["kv"]["bytes_per_token"] == 64 * 4 * 128 * 2
    assert plan["model"]["quantization"] == "fp8"
    assert plan["ignored_flags"] == []


def test_a_whole_command_is_a_model(capfd):
    plan = document(capfd, "plan", "vllm serve Qwen/Qwen3-8B --max-model-len 4096", "--gpu", "L4")
    assert plan["model"]["name"] == "Qwen/Qwen3-8B"
    assert plan["deployment"]["max_model_len"] == 4096


def test_automatic_length(capfd):
    plan = document(capfd, *QWEN, "--max-model-len", "auto")
    assert plan["deployment"]["max_model_len"] is None
    assert plan["starts"] is True
    assert plan["kv"]["length"] == plan["kv"]["largest_context"]


def test_markdown(capfd):
    _, out, _ = run(capfd, *QWEN, "--format", "md")
    assert "| weights | 61." in out
    assert out.startswith("**")


def test_sweep(capfd):
    plan = document(capfd, *QWEN, "--sweep")
    assert len(plan["sweep"]) == 2 * 5
    _, out, _ = run(capfd, *QWEN, "--sweep")
    assert "TP 1, KV fp8, 4,096" in out


def test_instances_and_limit(capfd):
    two = document(capfd, "plan", "Qwen/Qwen2.5-1.5B-Instruct", "--gpu", "24GB", "--instances", "2")
    assert two["starts"] is True
    assert two["deployment"]["gpu_memory_utilization"] < 0.5
    limited = document(capfd, "plan", "Qwen/Qwen3-8B", "--gpu", "H100", "--limit-gib", "30")
    assert limited["requested_bytes"] <= 30 * 2**30


def test_several_cards_are_divided(capfd):
    plan = document(capfd, "plan", "meta-llama/Llama-3.3-70B-Instruct", "--gpu", "4xA100-80GB")
    assert (
        plan["parallel"][0]["tensor_parallel_size"]
        == plan["deployment"]["tensor_parallel_size"]
        == 4
    )


def test_a_local_folder(capfd, tmp_path):
    body = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "head_dim": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(body))
    plan = document(capfd, "plan", str(tmp_path), "--gpu", "L4")
    assert plan["kv"]["bytes_per_token"] == 16 * 8 * 64 * 2 * 2
    assert plan["model"]["params"] == pytest.approx(1.2358e9, rel=0.001)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "someone/unheard-of-9B", "--gpu", "L4"], "not in the built-in table"),
        (["plan", "Qwen/Qwen3-8B", "--gpu", "toaster"], "no card"),
        (["plan", "Qwen/Qwen3-8B", "--gpu", "A100"], "which one"),
        (["plan", "Qwen/Qwen3-8B"], "--gpu"),
        (["plan", "Qwen/Qwen3-8B", "--gpu", "L4", "--vllm", "latest"], "not a release"),
        (["plan", "Qwen/Qwen3-8B", "--gpu", "L4", "--json", "-f", "md"], "contradict"),
        (["plan", "Qwen/Qwen3-8B", "--gpu", "L4", "-tp", "2"], "2 cards are needed"),
        (["plan", "Qwen/Qwen3-8B", "--gpu", "L4", "--max-model-len", "long"], "not a number"),
        (["plan", "Qwen/Qwen3-8B", "--gpu", "L4", "--instances", "0"], "between 1 and 64"),
    ],
)
def test_what_cannot_be_planned_ends_with_2_and_one_line(capfd, arguments, words):
    code, out, err = run(capfd, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_output_file(capfd, tmp_path):
    target = tmp_path / "plan.json"
    code, out, _ = run(capfd, *QWEN, "--json", "-o", str(target))
    assert (code, out) == (0, "")
    assert json.loads(target.read_text())["schema_version"] == 1
