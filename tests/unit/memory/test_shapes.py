"""Shapes against published parameter counts, weights that vLLM logged, and hand-made safetensors files."""

from __future__ import annotations

import json
import struct

import pytest
from packaging.version import Version

from diag.errors import UsageError
from diag.memory import find_shape as finder
from diag.memory.find_shape import find_shape, from_path, from_table, known_models
from diag.memory.kv_cache import Attention
from diag.memory.kv_layout import kv_layout
from diag.memory.quantization import named, of_config, of_name
from diag.memory.shape_config import from_config
from diag.memory.shapes import Split
from diag.memory.weights import possible_tp, stage_layers, weights_bytes

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def config(**changes):
    return from_config({**LLAMA_8B, **changes}, name="m", source="test")


def token_bytes(shape, **options):
    return kv_layout(shape, version=Version("0.33.0"), **options).token_bytes


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", known_models(), ids=lambda known: known.name)
def test_counted_parameters_match_the_published_number(known):
    assert known.shape().params == pytest.approx(known.params, rel=0.02)


def test_the_table_is_large_and_every_name_means_one_model():
    names = [name for known in known_models() for name in known.names]
    assert len(known_models()) >= 80
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "base", "method"),
    [
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B", None),
        ("qwen3-32b", "Qwen/Qwen3-32B", None),
        ("/data/models/Qwen3-32B/", "Qwen/Qwen3-32B", None),
        ("/hub/models--Qwen--Qwen3-32B/snapshots/0123abcd", "Qwen/Qwen3-32B", None),
        ("/data/Qwen--Qwen3-32B", "Qwen/Qwen3-32B", None),
        ("Qwen/Qwen3-32B-AWQ", "Qwen/Qwen3-32B", "awq"),
        ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B", "fp8"),
        ("RedHatAI/Qwen3-32B-FP8-dynamic", "Qwen/Qwen3-32B", "fp8"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct", "gptq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-7B-Instruct", "int8"),
        ("nvidia/Qwen3-32B-NVFP4", "Qwen/Qwen3-32B", "nvfp4"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama/Llama-3.1-8B-Instruct", "awq"),
        ("x/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-70B-Instruct", "gptq"),
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "meta-llama/Llama-3.2-3B-Instruct", "bitsandbytes"),
        ("openai/gpt-oss-20b", "openai/gpt-oss-20b", "mxfp4"),
        ("someone/Their-gpt-oss-20b-mxfp4-tuned", "openai/gpt-oss-20b", "mxfp4"),
    ],
)  # fmt: skip
def test_names_and_quantised_forks_find_their_shape(name, base, method):
    shape = from_table(name)
    expected = from_table(base)
    assert (shape.layers, shape.params) == (expected.layers, expected.params)
    assert (shape.quantization.method if shape.quantization else None) == method


@pytest.mark.parametrize(
    "name",
    ["someone/unheard-of-9B", "DeepSeek-R1-Distill-Other-9B", "x/EAGLE3-Qwen3-32B-draft", ""],
)
def test_a_name_that_is_not_known_is_not_guessed(name):
    assert from_table(name) is None


def test_an_unknown_model_says_what_to_do_and_asks_nobody():
    with pytest.raises(UsageError, match=r"not in the built-in table.*--hub"):
        find_shape("someone/unheard-of-9B")


def test_a_hub_that_cannot_be_reached_is_said_plainly(monkeypatch):
    def refuse(*_args, **_options):
        raise OSError("no route")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(UsageError, match=r"huggingface\.co cannot be reached.*local folder"):
        find_shape("someone/unheard-of-9B", hub=True)


def test_the_token_goes_to_the_hub_only(monkeypatch):
    seen = []

    class Reply:
        def read(self, _most):
            return json.dumps(LLAMA_8B).encode()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def answer(asked, timeout):
        seen.append(asked)
        return Reply()

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("urllib.request.urlopen", answer)
    assert finder.from_hub("someone/their-8b").layers == 32
    assert seen[0].full_url.startswith(
        "https://huggingface.co/someone/their-8b/resolve/main/config.json"
    )
    assert "Authorization" not in seen[0].headers  # those are sent on to redirects
    assert seen[0].unredirected_hdrs["Authorization"] == "Bearer hf_secret"


# --- config.json --------------------------------------------------------------------------------------------------


def test_a_plain_config():
    shape = config()
    assert shape.params == pytest.approx(8.030e9, rel=0.001)
    assert (shape.kv_heads, shape.head_dim, shape.context) == (8, 128, 131072)
    assert not shape.tied


def test_what_decides_a_size_must_be_there():
    with pytest.raises(UsageError, match="no hidden_size"):
        from_config({"model_type": "llama", "num_hidden_layers": 2}, name="m", source="test")


@pytest.mark.parametrize("value", [-1, 10**12, "12", None, True, []])
def test_odd_counts_are_errors_not_crashes(value):
    with pytest.raises(UsageError):
        config(hidden_size=value)


def test_the_text_part_of_a_multimodal_config():
    body = {
        "model_type": "some_vl",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {**LLAMA_8B, "torch_dtype": None},
        "vision_config": {
            "hidden_size": 1152,
            "depth": 27,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
        },
    }
    shape = from_config(body, name="m", source="test")
    assert shape.layers == 32
    assert shape.multimodal
    assert shape.params > config().params + 400e6


def test_hybrid_layers_by_their_list():
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    shape = config(
        layer_types=kinds,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
    )
    assert {group.kind: len(group.layers) for group in shape.cache} == {
        Attention.FULL: 8,
        Attention.STATE: 24,
    }


def test_sliding_layers_by_their_list():
    kinds = ["sliding_attention", "full_attention"] * 16
    shape = config(layer_types=kinds, sliding_window=1024)
    assert {group.kind: (len(group.layers), group.window) for group in shape.cache} == {
        Attention.FULL: (16, None),
        Attention.SLIDING: (16, 1024),
    }


def test_a_window_that_is_switched_off_counts_nothing():
    shape = config(model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert [group.window for group in shape.cache] == [None]


def test_llama_4_has_one_global_layer_in_four():
    shape = from_table("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert {group.kind: len(group.layers) for group in shape.cache} == {
        Attention.FULL: 12,
        Attention.CHUNKED: 36,
    }


# --- KV bytes a token ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 32 * 8 * 128 * 2 * 2),  # 128 KiB
        ("Qwen/Qwen3-32B", 64 * 8 * 128 * 2 * 2),  # 256 KiB
        ("deepseek-ai/DeepSeek-V3", 61 * 576 * 2),  # 68.6 KiB
        ("meta-llama/Llama-2-7b-hf", 32 * 32 * 128 * 2 * 2),  # 512 KiB
        ("tiiuae/falcon-7b", 32 * 1 * 64 * 2 * 2),
        ("google/gemma-3-27b-it", 10 * 16 * 128 * 2 * 2),  # only the 10 global layers grow
        ("openai/gpt-oss-120b", 18 * 8 * 64 * 2 * 2),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 12 * 2 * 256 * 2 * 2),
        ("ai21labs/AI21-Jamba-1.5-Mini", 4 * 8 * 128 * 2 * 2),
        ("deepseek-ai/DeepSeek-V3.2", 61 * (576 * 2 + 132)),  # with the sparse-attention index
    ],
)
def test_kv_bytes_per_token(name, expected):
    assert token_bytes(from_table(name)) == expected


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("Qwen/Qwen3-32B", {"tp": 4}, 64 * 2 * 128 * 2 * 2),
        ("Qwen/Qwen3-32B", {"tp": 16}, 64 * 1 * 128 * 2 * 2),  # never below one head
        ("Qwen/Qwen3-32B", {"pp": 2}, 32 * 8 * 128 * 2 * 2),
        ("Qwen/Qwen3-32B", {"kv_dtype": "fp8"}, 64 * 8 * 128 * 2),
        ("deepseek-ai/DeepSeek-V3", {"tp": 8}, 61 * 576 * 2),  # latent: not split
        ("deepseek-ai/DeepSeek-V3", {"kv_dtype": "fp8"}, 61 * 576),
        ("deepseek-ai/DeepSeek-V3.2", {"kv_dtype": "fp8_ds_mla"}, 61 * (656 + 132)),
    ],
)
def test_kv_bytes_per_token_divided(name, options, expected):
    assert token_bytes(from_table(name), **options) == expected


# Model, release, ranks, budget in GiB as logged, length, tokens and concurrency as logged. The budget is printed to
# a hundredth, so the tokens must lie between those of its two ends.
LOGGED = [
    ("openai/gpt-oss-120b", "0.10.1.1", 4, 45.32, 16384, 2048, 2640144, 284.25),
    ("Qwen/Qwen3.5-27B", "0.19.0", 4, 7.00, 32768, 2048, 114464, 12.98),
    ("Qwen/Qwen3-30B-A3B-Instruct-2507", "0.10.2", 1, 8.68, 6144, 8192, 94784, 15.43),
    ("Qwen/Qwen3-VL-30B-A3B-Instruct", "0.12.0", 2, 38.15, 65536, 8192, 833344, 12.72),
    ("meta-llama/Meta-Llama-3-8B-Instruct", "0.13.0", 4, 62.52, 8192, 8192, 2048704, 250.09),
    ("intfloat/e5-mistral-7b-instruct", "0.9.1", 1, 66.87, 1024, 8192, 547776, 526.71),
    ("rednote-hilab/dots.ocr", "0.9.1", 1, 2.83, 16384, 2048, 106032, 6.47),
]


@pytest.mark.parametrize("case", LOGGED, ids=str)
def test_tokens_and_concurrency_that_vllm_printed(case):
    name, release, tp, gib, length, step, tokens, concurrency = case
    layout = kv_layout(from_table(name), version=Version(release), tp=tp, step=step)
    low, high = round((gib - 0.005) * GIB), round((gib + 0.005) * GIB)
    assert layout.tokens(low, length) <= tokens <= layout.tokens(high, length)
    least, most = layout.concurrency(low, length), layout.concurrency(high, length)
    assert least - 0.005 <= concurrency <= most + 0.005


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        ("Qwen/Qwen3.5-27B", 4, 784),
        ("Qwen/Qwen3.5-122B-A10B", 1, 2096),
    ],  # "Setting attention block size to ..."
)
def test_the_block_that_holds_a_whole_state(name, tp, expected):
    assert kv_layout(from_table(name), version=Version("0.19.0"), tp=tp).block_size == expected


def test_chunked_layers_are_kept_whole_by_older_releases():
    shape = from_table("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    old = kv_layout(shape, version=Version("0.12.0"), step=8192)
    new = kv_layout(shape, version=Version("0.20.0"), step=8192)
    assert old.request_bytes(131072) > 2.5 * new.request_bytes(131072)


def test_without_the_hybrid_manager_windows_save_nothing():
    shape = from_table("google/gemma-3-27b-it")
    on = kv_layout(shape, version=Version("0.33.0"))
    off = kv_layout(shape, version=Version("0.33.0"), hybrid=False)
    assert off.as_full
    assert off.request_bytes(131072) > 4 * on.request_bytes(131072)


def test_the_longest_length_fits_and_one_block_more_does_not():
    layout = kv_layout(from_table("Qwen/Qwen3-32B"), version=Version("0.20.0"))
    longest = layout.longest(6 * GIB, 40960)
    assert longest == 24576  # 6 GiB / 256 KiB
    assert layout.fits(6 * GIB, longest)
    assert not layout.fits(6 * GIB, longest + 16)


def test_an_encoder_keeps_no_cache():
    assert kv_layout(from_table("BAAI/bge-m3"), version=None) is None


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp", "method", "logged_gib"),
    [
        ("Meta-Llama-3-8B-Instruct", 1, None, 14.9595),
        ("Meta-Llama-3-8B-Instruct", 4, None, 3.7418),
        ("Qwen2.5-32B-Instruct", 4, None, 15.3916),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1, None, 2.8875),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 1, None, 56.9342),
        ("Qwen3-235B-A22B-FP8", 8, None, 27.6656),
        ("cpatonn/Qwen3-30B-A3B-Thinking-2507-AWQ-4bit", 1, None, 15.6116),
        ("Qwen/Qwen2-VL-7B-Instruct-AWQ", 1, None, 6.4651),
        ("gpt-oss-120b", 4, None, 17.2217),
        ("openai/gpt-oss-120b", 1, None, 65.9651),
        ("openai/gpt-oss-20b", 1, None, 13.7193),
        ("starcoder2-15b", 2, None, 14.8672),
        ("ai21labs/AI21-Jamba-1.5-Mini", 1, "experts_int8", 51.4723),
        ("intfloat/e5-mistral-7b-instruct", 1, "bitsandbytes", 3.9099),
    ],
)
def test_weights_that_vllm_logged(name, tp, method, logged_gib):
    shape = from_table(name)
    found = weights_bytes(
        shape, tp=tp, quantization=named(method) if method else shape.quantization
    )
    assert found.total / GIB == pytest.approx(logged_gib, rel=0.01)


def test_parts_add_up_and_embedding_stays_in_16_bit():
    shape = from_table("Qwen/Qwen3-32B-AWQ")
    found = weights_bytes(shape, quantization=shape.quantization)
    parts = dict(found.parts)
    assert sum(parts.values()) == found.total
    assert parts["embedding"] == parts["head"] == 151936 * 5120 * 2
    assert parts["mlp"] == 64 * round(3 * 5120 * 25600 * (0.5 + 2.5 / 128))


def test_replicated_heads_and_padded_vocabulary():
    shape = config(vocab_size=128255)
    one, sixteen = weights_bytes(shape), weights_bytes(shape, tp=16)
    assert dict(one.parts)["head"] == 128256 * 4096 * 2  # up to a multiple of 64
    kv_one_rank = 32 * 2 * 4096 * 1 * 128 * 2
    q_and_o = 32 * 2 * 4096 * 4096 * 2 // 16
    assert dict(sixteen.parts)["attention"] == q_and_o + kv_one_rank


def test_latent_attention_keeps_its_down_projections_whole():
    shape = from_table("deepseek-ai/DeepSeek-V3")
    whole = {block.module for block in shape.blocks if block.split is Split.NONE}
    assert "model.layers.{i}.self_attn.kv_a_proj_with_mqa" in whole


def test_stages_and_the_fullest_of_them():
    assert [len(stage) for stage in stage_layers(48, 3)] == [16, 16, 16]
    shape = from_table("Qwen/Qwen3-32B")
    two = weights_bytes(shape, pp=2)
    assert two.total == pytest.approx(weights_bytes(shape).total / 2, rel=0.001)


def test_expert_parallel_divides_experts_only():
    shape = from_table("Qwen/Qwen3-30B-A3B")
    plain, spread = weights_bytes(shape), weights_bytes(shape, expert_ranks=8)
    assert dict(spread.parts)["experts"] * 8 == dict(plain.parts)["experts"]
    assert dict(spread.parts)["attention"] == dict(plain.parts)["attention"]


def test_ranks_that_do_not_divide_the_heads():
    shape = from_table("Qwen/Qwen2.5-7B-Instruct")  # 28 heads, 4 KV heads
    assert possible_tp(shape, 8) == (1, 2, 4)
    with pytest.raises(UsageError, match="28 attention heads"):
        weights_bytes(shape, tp=8)


# --- quantisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "method", "size"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "gptq", 1 + 2 / 32),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 1 + 4 / 16384),
        ({"quant_method": "mxfp4"}, "mxfp4", 0.5 + 1 / 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", 0.5 + 4 / 64),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5 + 1 / 16),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}
                },
            },
            "int4",
            0.5 + 2 / 128,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
                },
            },
            "nvfp4",
            0.5 + 1 / 16,
        ),
    ],
)
def test_formats_of_configs(body, method, size):
    found = of_config({"quantization_config": body})
    assert found.method == method
    assert found.weight_bytes == pytest.approx(size)


@pytest.mark.parametrize(
    "body", [None, {}, [], {"quant_method": "unheard-of"}, {"quant_method": "compressed-tensors"}]
)
def test_a_format_that_is_not_known_is_none(body):
    assert of_config({"quantization_config": body}) is None


def test_ignored_modules_stay_in_16_bit():
    shape = config(
        quantization_config={
            "quant_method": "fp8",
            "ignored_layers": ["re:.*self_attn.*", "lm_head"],
        }
    )
    parts = dict(weights_bytes(shape, quantization=shape.quantization).parts)
    plain = dict(weights_bytes(shape).parts)
    assert parts["attention"] == plain["attention"]
    assert parts["mlp"] == pytest.approx(plain["mlp"] / 2, rel=0.001)


@pytest.mark.parametrize("pattern", ["re:(((", "re:(.*)*(.*)*(.*)*z", "*", ""])
def test_hostile_ignore_patterns_do_no_harm(pattern):
    shape = config(quantization_config={"quant_method": "fp8", "ignore": [pattern]})
    assert weights_bytes(shape, quantization=shape.quantization).total > 0


def test_a_name_without_a_format():
    assert of_name("Qwen3-32B") == ("Qwen3-32B", None)


# --- local folders ------------------------------------------------------------------------------------------------


def write_tensors(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)  # no tensor data: it must never be read


def test_headers_give_the_bytes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    write_tensors(
        tmp_path / "model-1.safetensors",
        {"model.embed_tokens.weight": 800, "model.layers.0.mlp.up_proj.weight": 600},
    )
    write_tensors(
        tmp_path / "model-2.safetensors",
        {"lm_head.weight": 800, "model.layers.0.self_attn.q_proj.weight": 200},
    )
    write_tensors(tmp_path / "consolidated.safetensors", {"output.weight": 10**9})
    shape = from_path(tmp_path)
    assert dict(shape.checkpoint_parts) == {
        "embedding": 800,
        "mlp": 600,
        "head": 800,
        "attention": 200,
    }
    assert weights_bytes(shape).source == "safetensors headers"
    assert weights_bytes(shape).total == 2400
    assert weights_bytes(shape, tp=2).source == "parameter counts of the shape"


def test_the_index_gives_the_total(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 16_060_522_496}})
    )
    assert weights_bytes(from_path(tmp_path)).total == pytest.approx(16_060_522_496, abs=64)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"\xff" * 64,
        struct.pack("<Q", 10) + b"not json!!",
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_a_file_that_is_no_safetensors_file_counts_as_not_there(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert from_path(tmp_path).checkpoint_bytes is None


@pytest.mark.parametrize("text", ["", "[]", "{", "12"])
def test_a_config_that_is_none_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        from_path(tmp_path)


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        from_path(tmp_path)
