"""Config dumps, argument lines and command lines as vLLM and people write them -> config.* facts."""

from __future__ import annotations

import time

import pytest
from log_samples import GIB, line

from diag.facts.args import command_in, flags, from_command, from_event, pairs
from diag.facts.model import Event
from diag.terms import Origin, RowRole


def values(facts):
    return {fact.name.removeprefix("config."): fact.value for fact in facts}


def event(row: str, text: str) -> Event:
    group = "config" if row.startswith("cfg.engine") else "args"
    return Event(
        row=row, role=RowRole.INFO, phase=None, line=line(text, number=12), values={group: text}
    )


def test_the_config_of_a_v1_engine():
    text = (
        "model='Qwen/Qwen3-8B', speculative_config=None, tokenizer='Qwen/Qwen3-8B', trust_remote_code=False, "
        "dtype=torch.bfloat16, max_seq_len=32768, download_dir=None, load_format=auto, tensor_parallel_size=2, "
        "pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=fp8_e4m3, "
        "device_config=cuda, seed=0, served_model_name=other, enable_prefix_caching=True, "
        "chunked_prefill_enabled=True, compilation_config={'level': 3, 'cudagraph_capture_sizes': [512, 504]}"
    )
    facts = from_event(event("cfg.engine_v1", text))
    assert values(facts) == {
        "model": "Qwen/Qwen3-8B",
        "dtype": "bfloat16",
        "max_model_len": 32768,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "quantization": "None",
        "enforce_eager": False,
        "kv_cache_dtype": "fp8_e4m3",
        "backend": "cuda",
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    assert {(fact.line, fact.origin) for fact in facts} == {(12, Origin.LOGGED)}
    units = {fact.name: fact.unit for fact in facts}
    assert units["config.max_model_len"] == "tokens"
    assert units["config.tensor_parallel_size"] == "count"


def test_a_namespace():
    text = (
        "Namespace(host=None, port=8000, model='m', max_model_len=None, swap_space=4.0, cpu_offload_gb=0, "
        "gpu_memory_utilization=0.85, max_num_seqs=256, enable_lora=False, kv_cache_dtype='auto')"
    )
    assert values(from_event(event("ext.args_namespace", text))) == {
        "model": "m", "swap_space": 4 * GIB, "cpu_offload": 0, "gpu_memory_utilization": 0.85,
        "max_num_seqs": 256, "enable_lora": False, "kv_cache_dtype": "auto",
    }  # fmt: skip


def test_non_default_arguments():
    text = (
        "{'model_tag': 'm', 'port': 8001, 'max_model_len': 8192, 'enforce_eager': True, "
        "'limit_mm_per_prompt': {'image': 2, 'video': 0}, 'kv_cache_memory_bytes': 2147483648, "
        "'speculative_config': {'method': 'eagle', 'model': 'draft', 'num_speculative_tokens': 3}}"
    )
    found = values(from_event(event("cfg.non_default_args", text)))
    assert found["model"] == "m"  # and not the draft's
    assert found["max_model_len"] == 8192
    assert found["enforce_eager"] is True
    assert found["kv_cache_memory_bytes"] == 2 * GIB
    assert found["limit_mm_per_prompt"] == "{'image': 2, 'video': 0}"
    assert "eagle" in found["speculative"]


def test_keys_of_a_nested_dict_are_not_the_engines():
    text = "{'hf_overrides': {'text_config': {'model': 'in', 'max_model_len': 1}}, 'model': 'm', 'max_model_len': 8192}"
    found = values(from_event(event("cfg.non_default_args", text)))
    assert (found["model"], found["max_model_len"]) == ("m", 8192)


def test_the_draft_model_of_a_nested_speculative_config_is_not_the_model():
    text = "{'speculative_config': {'model': 'draft', 'extra': {'a': 1}}, 'model': 'target'}"
    assert values(from_event(event("cfg.non_default_args", text)))["model"] == "target"


def test_other_rows_are_no_arguments():
    assert from_event(event("kv.size_tokens", "model='m'")) == []


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("vllm serve org/m", {"model": "org/m"}),
        ("vllm serve org/m --max-model-len 32k", {"model": "org/m", "max_model_len": 32000}),
        ("vllm serve org/m --max-model-len=32K", {"model": "org/m", "max_model_len": 32768}),
        ("vllm serve org/m --max_model_len 8192", {"model": "org/m", "max_model_len": 8192}),
        ("vllm serve org/m --max-model-len -1", {"model": "org/m"}),  # "find out yourself"
        ("vllm serve org/m --max-model-len auto", {"model": "org/m"}),
        ("vllm serve org/m -tp 4 -pp 2", {"model": "org/m", "tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
        ("vllm serve org/m --enforce-eager --port 80", {"model": "org/m", "enforce_eager": True}),
        ("vllm serve org/m --no-enable-prefix-caching", {"model": "org/m", "enable_prefix_caching": False}),
        ("vllm serve 'org/my model' --swap-space 16", {"model": "org/my model", "swap_space": 16 * GIB}),
        ("python -m vllm.entrypoints.openai.api_server --model m \\\n --gpu-memory-utilization .92",
         {"model": "m", "gpu_memory_utilization": 0.92}),
        ("docker run --gpus all --device /dev/kfd --shm-size 16g vllm/vllm-openai:v0.11.0 --model m --max-num-seqs 64",
         {"model": "m", "max_num_seqs": 64}),
        ("vllm serve m --kv-cache-memory-bytes 25G", {"model": "m", "kv_cache_memory_bytes": 25 * GIB}),
        ("vllm serve m --max-num-seqs inf --swap-space 1e999", {"model": "m"}),
        ("vllm serve m --dtype half --quantization 'awq", {"model": "m", "dtype": "half", "quantization": "awq"}),
        ("vllm serve m --speculative-config '{\"method\": \"ngram\", \"model\": \"draft\"}'",
         {"model": "m", "speculative": '{"method": "ngram", "model": "draft"}'}),
        ("LLM(model='m', gpu_memory_utilization=0.5, enforce_eager=True)",
         {"model": "m", "gpu_memory_utilization": 0.5, "enforce_eager": True}),
        ("llm = LLM('m', speculative_model='d')", {"speculative": "d"}),
        ("", {}),
    ],
)  # fmt: skip
def test_a_command(command, wanted):
    assert values(from_command(command)) == wanted


def test_a_negated_flag_that_has_no_enable_in_its_name():
    assert values(from_command("vllm serve m --no-enforce-eager")) == {
        "model": "m",
        "enforce_eager": False,
    }


def test_what_the_user_gives_is_assumed_and_has_no_line():
    assert {(fact.origin, fact.line) for fact in from_command("vllm serve m --max-num-seqs 4")} == {
        (Origin.ASSUMED, None)
    }


def test_the_first_of_two_flags_wins_nothing_twice():
    facts = from_command("vllm serve m --max-num-seqs 4 --max-num-seqs 8")
    assert [fact.value for fact in facts if fact.name == "config.max_num_seqs"] in ([4], [8])


def test_of_a_repeated_flag_the_last_counts_as_in_vllm():
    found = values(from_command("vllm serve m --max-num-seqs 4 --max-num-seqs 8"))
    assert found["max_num_seqs"] == 8


@pytest.mark.parametrize(
    ("text", "level", "wanted"),
    [
        ("user@host:~$ vllm serve m --port 80", None, "vllm serve m --port 80"),
        ("+ exec python3 -m vllm.entrypoints.openai.api_server --model m", None,
         "-m vllm.entrypoints.openai.api_server --model m"),
        ("vllm serve m", None, None),  # says no more than the log does
        ("try vllm serve m --help", "ERROR", None),
        ("nothing of the kind --x", None, None),
    ],
)  # fmt: skip
def test_the_command_on_a_line(text, level, wanted):
    assert command_in([line(text, level=level)]) == wanted


def test_a_command_goes_on_after_a_backslash():
    pasted = [
        "docker run --gpus all \\",
        "  vllm/vllm-openai:v0.11.0 \\",
        "  --model m \\",
        "  -tp 2\\",
        "  --port 80",
        "Killed",
    ]
    found = command_in([line(text) for text in pasted])
    assert found == "vllm/vllm-openai:v0.11.0 --model m -tp 2 --port 80"
    assert values(from_command(found))["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    "unit", ["a='", 'a="', "a={", "a=[", "'a': ", "a=\\'", "--a ", "--a=", "("]
)
def test_hostile_argument_lines_are_read_quickly(unit):
    text = unit * (200_000 // len(unit))
    started = time.perf_counter()
    list(pairs(text))
    list(flags(text[:65536]))
    assert time.perf_counter() - started < 3
