"""Plans against what vLLM logged, and the logic of checks, changes and choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from diag.errors import UsageError
from diag.memory.deployment import parse_cards, resolve
from diag.memory.eras import Era, era_of
from diag.memory.estimates import capture_sizes
from diag.memory.find_shape import from_table
from diag.memory.plan_model import Deployment
from diag.memory.plan_search import best_parallel, changes, sweep
from diag.memory.predict import predict

GIB = 1 << 30


def deployment(release="0.33.0", total=79.15, **options):
    version = Version(release)
    engine = options.pop("engine", "V1")
    era = era_of(version, engine)
    options.setdefault("gmu", era.default_gmu)
    return Deployment(
        version=version,
        engine=engine,
        era=era,
        total=round(total * GIB),
        gpu_name="card",
        **options,
    )


def plan_of(name, release="0.33.0", total=79.15, **options):
    return predict(from_table(name), deployment(release, total, **options))


# --- against logs -------------------------------------------------------------------------------------------------


def test_v0_split_line_of_qwen2_5_1_5b():
    """0.6.6.post1, 44.52 GiB: activation 1.40 GiB, KV 35.55 GiB, 83,208 blocks."""
    plan = plan_of(
        "Qwen/Qwen2.5-1.5B-Instruct", "0.6.6.post1", 44.52, engine="V0", dtype="float16",
        length=4096, step=4096, gmu=0.9,
    )  # fmt: skip
    assert plan.term("peak_activation").bytes / GIB == pytest.approx(1.40, rel=0.05)
    assert plan.pool.bytes / GIB == pytest.approx(35.55, rel=0.01)
    assert plan.pool.tokens / 16 == pytest.approx(83208, rel=0.01)


def test_sampler_of_a_thousand_rows():
    """0.10.2, H100: 8192 tokens, 1024 requests, peak activation 5.58 GiB, KV 8.68 GiB of 0.9 x 79.18."""
    plan = plan_of(
        "Qwen/Qwen3-30B-A3B-Instruct-2507", "0.10.2", 79.18, length=6144, step=8192, seqs=1024
    )
    assert plan.term("peak_activation").low <= 5.58 * GIB <= plan.term("peak_activation").high
    assert plan.pool.low <= 8.68 * GIB <= plan.pool.high


def test_a_newer_release_needs_less():
    """0.26.1rc, A100: peak activation 0.23 GiB with 16 requests, KV 13.84 GiB, graphs 0.15 estimated."""
    plan = plan_of(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "0.26.1",
        79.25,
        length=131072,
        step=2048,
        seqs=16,
        gmu=0.9,
    )
    assert plan.term("peak_activation").low <= 0.23 * GIB <= plan.term("peak_activation").high
    assert plan.pool.bytes / GIB == pytest.approx(13.84, rel=0.03)
    assert plan.starts is True


# --- terms --------------------------------------------------------------------------------------------------------


def test_what_an_era_charges():
    charged = {
        era: {term.term for term in plan_of("Qwen/Qwen3-8B", release, engine=engine, tp=2).terms if term.charged}
        for era, release, engine in [
            (Era.C, "0.7.3", "V0"), (Era.D, "0.8.5", "V1"), (Era.E, "0.10.2", "V1"),
            (Era.F, "0.12.0", "V1"), (Era.G, "0.19.0", "V1"), (Era.H, "0.20.0", "V1"), (Era.I, "0.30.0", "V1"),
        ]
    }  # fmt: skip
    assert {era for era, terms in charged.items() if "context" in terms} == {Era.D}
    assert {era for era, terms in charged.items() if "collectives" in terms} == {
        Era.C,
        Era.D,
        Era.E,
    }
    assert {era for era, terms in charged.items() if "cuda_graphs" in terms} == {Era.H, Era.I}


def test_terms_and_pool_are_the_requested_share():
    plan = plan_of("Qwen/Qwen3-8B", tp=2)
    assert plan.pool.bytes == plan.requested - sum(
        term.bytes for term in plan.terms if term.charged
    )
    assert all(term.low <= term.bytes <= term.high for term in plan.terms)
    assert plan.pool.low < plan.pool.bytes < plan.pool.high


def test_eager_has_no_graphs_and_a_larger_pool():
    shape = from_table("Qwen/Qwen3-8B")
    plain, eager = (predict(shape, deployment(eager=flag)) for flag in (False, True))
    assert eager.term("cuda_graphs") is None
    assert eager.pool.bytes - plain.pool.bytes == plain.term("cuda_graphs").bytes


@pytest.mark.parametrize(
    ("release", "seqs", "count"),
    [
        ("0.8.5", 256, 67),
        ("0.10.2", 256, 67),
        ("0.12.0", 256, 51),
        ("0.20.0", 16, 7),
        ("0.20.0", 1024, 51),
    ],
)
def test_number_of_captured_sizes(release, seqs, count):
    assert capture_sizes(Version(release), "V1", seqs) == count


def test_a_pinned_pool_is_taken_as_it_is():
    plan = plan_of("Qwen/Qwen3-8B", kv_bytes=4 * GIB)
    assert (plan.pool.bytes, plan.pool.low, plan.pool.high) == (4 * GIB,) * 3


# --- checks -------------------------------------------------------------------------------------------------------


def failed(plan):
    return {check.name for check in plan.checks if check.ok is False}


def test_weights_larger_than_the_card():
    assert "weights" in failed(plan_of("meta-llama/Llama-3.1-70B-Instruct"))


def test_nothing_left_for_blocks():
    plan = plan_of("Qwen/Qwen3-32B", gmu=0.75)
    assert "KV blocks" in failed(plan)
    assert plan.pool.bytes < 0


def test_one_request_does_not_fit():
    plan = plan_of("Qwen/Qwen3-32B", length=131072)
    assert failed(plan) == {"length"}
    assert plan.pool.request_bytes == 32 * GIB


def test_others_on_the_card():
    plan = plan_of("Qwen/Qwen3-8B", used=20 * GIB)
    assert "free memory" in failed(plan)
    assert failed(plan_of("Qwen/Qwen3-8B", "0.8.5", used=20 * GIB)) == set()  # charged, not checked


def test_close_calls_are_called_so():
    shape = from_table("Qwen/Qwen3-32B")
    length = predict(shape, deployment(length=None)).pool.longest
    assert predict(shape, deployment(length=length)).starts is None


def test_automatic_length():
    plan = plan_of("Qwen/Qwen3-32B", length=None)
    assert plan.starts is True
    assert plan.length == plan.pool.longest < 40960
    assert plan.pool.concurrency >= 1


def test_an_encoder_needs_no_pool():
    plan = plan_of("BAAI/bge-m3", total=14.6)
    assert plan.pool is None
    assert plan.starts is True


# --- changes ------------------------------------------------------------------------------------------------------


def test_every_change_was_computed_and_starts():
    plan = plan_of("Qwen/Qwen3-32B", length=131072, gpus=2)
    found = changes(plan)
    assert {change.flags.split()[0] for change in found} >= {
        "--max-model-len",
        "--tensor-parallel-size",
    }
    assert all(change.plan.starts for change in found)


def test_the_share_goes_up_for_the_pool_and_down_for_the_free_check():
    short = changes(plan_of("Qwen/Qwen3-32B", gmu=0.85, length=32768))
    assert next(c.plan.deployment.gmu for c in short if "utilization" in c.flags) > 0.85
    crowded = changes(plan_of("Qwen/Qwen3-8B", used=20 * GIB))
    assert next(c.plan.deployment.gmu for c in crowded if "utilization" in c.flags) < 0.92


def test_no_share_is_offered_when_the_weights_do_not_fit():
    found = changes(plan_of("meta-llama/Llama-3.1-70B-Instruct"))
    assert found
    assert not any("utilization" in change.flags for change in found)


def test_a_plan_that_starts_needs_no_change():
    assert changes(plan_of("Qwen/Qwen3-8B")) == ()


def test_the_best_division_is_the_one_that_holds_most():
    rows = best_parallel(from_table("Qwen/Qwen3-32B"), deployment(gpus=4, length=32768))
    assert rows[0].plan.starts is True
    assert [row.tokens for row in rows] == sorted((row.tokens for row in rows), reverse=True)


def test_the_table_has_every_combination():
    rows = sweep(from_table("Qwen/Qwen3-8B"), deployment(gpus=2))
    labels = {row.label for row in rows}
    assert "TP 2, KV fp8, 32,768" in labels
    assert len(labels) == len(rows) == 2 * 2 * 5  # TP x dtype x lengths up to 40,960


# --- flags and cards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count", "low", "high"),
    [
        ("2xA100-80GB", 2, 79, 80), ("L4", 1, 21.9, 22.2), ("8x H100", 8, 79, 80), ("24GB", 1, 21, 24),
        ("22.1 GiB", 1, 22.1, 22.1), ("4090", 1, 23, 24), ("4xNVIDIA H200", 4, 139, 141),
    ],
)  # fmt: skip
def test_cards(text, count, low, high):
    cards = parse_cards(text)
    assert cards.count == count
    assert low - 0.01 <= cards.total / GIB <= high + 0.01


@pytest.mark.parametrize("text", ["", "toaster", "0xL4", "A100", "x" * 500, "12"])
def test_cards_that_are_none(text):
    with pytest.raises(UsageError, match="--gpu"):
        parse_cards(text)


def resolved(settings, *, name="Qwen/Qwen3-8B", gpu="H100", release="0.33.0", **options):
    return resolve(
        from_table(name), parse_cards(gpu), settings, version=Version(release), **options
    )


def test_defaults_of_release_and_card():
    own = resolved({}).deployment
    assert (own.gmu, own.step, own.seqs, own.length) == (0.92, 8192, 1024, 40960)
    small = resolved({}, gpu="L4", release="0.12.0").deployment
    assert (small.gmu, small.step, small.seqs) == (0.9, 2048, 256)


def test_flags_are_read_with_their_short_forms():
    own = resolved(
        {"tp": "2", "max_model_len": "32k", "gpu_memory_utilization": "0.8", "kv_cache_dtype": "fp8",
         "max_num_seqs": "64", "enforce_eager": "True"},
        gpu="2xH100",
    ).deployment  # fmt: skip
    assert (own.tp, own.length, own.gmu, own.kv_dtype, own.seqs, own.eager) == (
        2,
        32000,
        0.8,
        "fp8",
        64,
        True,
    )


@pytest.mark.parametrize("value", ["auto", "-1"])
def test_automatic_length_flag(value):
    assert resolved({"max_model_len": value}).deployment.length is None


@pytest.mark.parametrize(
    "settings",
    [{"max_model_len": "many"}, {"gpu_memory_utilization": "2"}, {"tp": "0"}, {"tp": "2"},
     {"quantization": "magic"}, {"max_num_seqs": "inf"}],
)  # fmt: skip
def test_values_that_make_no_sense(settings):
    with pytest.raises(UsageError):
        resolved(settings)


def test_a_flag_that_was_not_looked_at_is_named():
    assert resolved({"enable_lora": "True", "port": "8000"}).ignored == ("--enable-lora",)


@pytest.mark.parametrize(("release", "left_out"), [("0.10.2", False), ("0.20.0", True)])
def test_without_images_the_tower_is_not_loaded(release, left_out):
    limits = {"limit_mm_per_prompt": '{"image": 0, "video": 0}'}
    own = resolved(limits, name="Qwen/Qwen2.5-VL-7B-Instruct", release=release).deployment
    assert (own.language_only, own.encoder) == (left_out, False)


def test_tensor_parallel_size_is_chosen_for_several_cards():
    found = resolved({}, name="meta-llama/Llama-3.1-70B-Instruct", gpu="4xH100")
    assert found.deployment.tp == 4
    assert "--tensor-parallel-size 4" in found.assumed


def test_several_instances_share_a_card():
    found = resolved({}, name="Qwen/Qwen2.5-1.5B-Instruct", gpu="24GB", instances=2)
    plan = predict(from_table("Qwen/Qwen2.5-1.5B-Instruct"), found.deployment)
    assert plan.starts is True
    assert 0.4 < found.deployment.gmu < 0.5
    greedy = replace(found.deployment, gmu=0.6)
    assert "free memory" in failed(predict(from_table("Qwen/Qwen2.5-1.5B-Instruct"), greedy))


def test_a_limit_in_gib_becomes_a_share():
    own = resolved({}, limit=40 * GIB).deployment
    assert own.total * own.gmu <= 40 * GIB < own.total * (own.gmu + 0.002)
    with pytest.raises(UsageError, match="limit"):
        resolved({}, limit=200 * GIB)
