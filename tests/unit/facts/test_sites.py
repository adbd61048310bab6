"""Frames of a traceback -> named places, and the phase they settle."""

from __future__ import annotations

import pytest

from diag.facts.model import Frame
from diag.facts.sites import frame_key, phase_of_sites, places, sites_of
from diag.terms import Phase

PACKAGES = "/opt/venv/lib/python3.12/site-packages/"


def frames(*paths: str) -> list[Frame]:
    made = []
    for number, path in enumerate(paths):
        file, function = path.split(":")
        made.append(Frame(file=PACKAGES + file, lineno=1, function=function, number=number))
    return made


@pytest.mark.parametrize(
    ("file", "key"),
    [
        (f"{PACKAGES}vllm/v1/engine/core.py", "vllm/v1/engine/core.py:step"),
        ("/usr/lib/python3/dist-packages/torch/cuda/graphs.py", "torch/cuda/graphs.py:step"),
        ("/workspace/vllm/vllm/v1/engine/core.py", "/workspace/vllm/vllm/v1/engine/core.py:step"),
        ("<string>", "<string>:step"),
    ],
)
def test_a_frame_is_written_from_its_package_on(file, key):
    assert frame_key(Frame(file=file, lineno=3, function="step", number=1)) == key


@pytest.mark.parametrize(
    ("paths", "phase"),
    [
        (["vllm/v1/worker/gpu_worker.py:init_device"], Phase.INIT_DEVICE),
        (["vllm/v1/worker/gpu_model_runner.py:load_model"], Phase.WEIGHT_LOAD),
        (["vllm/v1/worker/gpu_worker.py:determine_available_memory", "vllm/v1/worker/gpu_model_runner.py:profile_run"],
         Phase.PROFILE),
        (["vllm/v1/worker/gpu_model_runner.py:initialize_kv_cache"], Phase.KV_ALLOC),
        (["vllm/v1/worker/gpu_worker.py:compile_or_warm_up_model", "vllm/v1/worker/gpu_model_runner.py:capture_model"],
         Phase.GRAPH_CAPTURE),
        # compile_or_warm_up_model calls both; the dummy sampler run is the more telling place
        (["vllm/v1/worker/gpu_worker.py:compile_or_warm_up_model",
          "vllm/v1/worker/gpu_model_runner.py:_dummy_sampler_run"], Phase.SAMPLER_WARMUP),
        (["vllm/v1/engine/core.py:run_busy_loop", "vllm/v1/worker/gpu_model_runner.py:execute_model"], Phase.SERVING),
        (["vllm/v1/executor/abstract.py:wake_up", "vllm/device_allocator/cumem.py:wake_up"], Phase.SLEEP_WAKE),
        (["vllm/entrypoints/cli/main.py:main"], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_phase_of_a_traceback(paths, phase):
    assert phase_of_sites(sites_of(frames(*paths))) is phase


def test_a_profile_run_inside_a_busy_loop_is_no_serving():
    """Of two places the one listed first in sites.yaml wins, whatever the order of the frames."""
    names = [site.name for site in places().sites if site.phase]
    assert names.index("profile_run") < names.index("serving")
    assert phase_of_sites(["serving", "profile_run"]) is Phase.PROFILE


def test_the_text_part_of_a_vision_model_is_not_its_encoder():
    """Language layers of a VL model are called through the VL file: only the innermost model frame tells."""
    vision = frames("vllm/model_executor/models/qwen2_5_vl.py:forward")
    text = frames(
        "vllm/model_executor/models/qwen2_5_vl.py:forward",
        "vllm/model_executor/models/qwen2.py:forward",
    )
    assert "multimodal" in sites_of(vision)
    assert "multimodal" not in sites_of(text)


def test_names_that_are_no_sites_settle_nothing():
    assert phase_of_sites(["nowhere"]) is None


def test_frames_of_any_text_are_taken():
    strange = [Frame(file="\u2588" * 400, lineno=None, function="x" * 70_000, number=1)]
    assert phase_of_sites(sites_of(strange)) is None
