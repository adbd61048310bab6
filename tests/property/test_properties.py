"""What holds for any log: no error, a valid document, the same answer however ranks interleave, no alarm on a
part of a healthy log.
"""

from __future__ import annotations

import io
import json
import random
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_samples import (
    INIT_FAILED,
    MAX_LEN,
    NO_BLOCKS,
    OOM,
    SERVING,
    STATS,
    core,
    planned,
    start,
    traceback,
)

from diag.errors import LogReadError
from diag.facts.catalogue import message_files
from diag.pipeline import diagnose
from diag.report.jsonout import json_schema, to_json
from diag.resources import data_dir
from diag.terms import Outcome

TESTS = Path(__file__).resolve().parents[1]
QUIET, EXAMPLES = TESTS / "quiet", TESTS.parent / "examples"
few = settings(max_examples=50, deadline=None, derandomize=True)
fewer = settings(max_examples=10, deadline=None, derandomize=True)

PROFILE = (
    ("v1/worker/gpu_worker.py", "determine_available_memory"),
    ("v1/worker/gpu_model_runner.py", "profile_run"),
    ("model_executor/models/qwen3.py", "forward"),
)


@lru_cache(maxsize=1)
def messages() -> tuple[str, ...]:
    """Every example line of the catalogue."""
    rows = [row for _, body in message_files(data_dir("rules")) for row in body["messages"]]
    texts = [row.get("example") or () for row in rows]
    return tuple(one for each in texts for one in ([each] if isinstance(each, str) else each))


FIXED = (
    start(), planned(), SERVING, core(NO_BLOCKS), core(MAX_LEN), core(OOM), INIT_FAILED, "Killed", "",
    STATS.format(running=3, waiting=9, usage=99.0), *traceback(*PROFILE, error=OOM),
    "During handling of the above exception, another exception occurred:", "vllm serve m --max-model-len 0",
    "non-default args: {'gpu_memory_utilization': nan, 'max_model_len': -1, 'block_size': 0, 'swap_space': inf}",
)  # fmt: skip

NUMBERS = st.sampled_from(
    ["0", "-1", "0.00", "9" * 400, "1e999", "nan", "inf", "-0.0", "1,2,3.4", ""]
)


@st.composite
def fragments(draw) -> str:
    """A real message, whole, cut, with another number in it, or glued to something else."""
    text = draw(st.sampled_from(FIXED) | st.sampled_from(messages()))
    how = draw(st.integers(0, 5))
    if how == 1:
        text = text[: draw(st.integers(0, len(text)))]
    elif how == 2:
        text = text[draw(st.integers(0, len(text))) :]
    elif how == 3:
        words = text.split(" ")
        at = [index for index, word in enumerate(words) if any(char.isdigit() for char in word)]
        if at:
            words[draw(st.sampled_from(at))] = draw(NUMBERS)
        text = " ".join(words)
    elif how == 4:
        text += draw(st.text(max_size=20)) + draw(st.sampled_from(FIXED))
    return text


def valid(found) -> None:
    """The document is what its schema says, and says nothing impossible."""
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(to_json(found))
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert 1 <= found.source.attempt <= found.source.attempts
    assert (found.diagnosis is None) or found.outcome is not Outcome.HEALTHY
    for item in found.diagnosis.evidence if found.diagnosis else ():
        assert 1 <= item.line <= found.source.lines


@few
@given(st.lists(fragments() | st.text(max_size=80), max_size=25))
def test_no_mix_of_real_messages_and_any_text_raises(parts):
    try:
        found = diagnose("\n".join(parts) + "\n")
    except LogReadError:
        assert not "".join(parts).strip() or not any(part.strip("\0 \t\r\n") for part in parts)
        return
    valid(found)


@few
@given(st.binary(max_size=600))
def test_no_bytes_raise_but_what_is_no_log(data):
    try:
        found = diagnose(io.BytesIO(data))
    except LogReadError:
        return
    valid(found)
    assert found.outcome in (Outcome.UNKNOWN, Outcome.OTHER_FAILURE)


@few
@given(
    st.lists(fragments(), min_size=1, max_size=6),
    st.binary(min_size=1, max_size=40),
    st.integers(0, 2000),
)
def test_damaged_bytes_inside_a_log_raise_nothing(parts, junk, at):
    data = "\n".join(["x", *parts]).encode()
    at = min(at, len(data))
    try:
        found = diagnose(io.BytesIO(data[:at] + junk + data[at:]))
    except LogReadError:
        return
    valid(found)


@fewer
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "vllm_version": st.sampled_from(
                ["0.6.3", "0.8.5.post1", "0.11.0", "0.25.1rc1", "0.13.0+cu128"]
            ),
            "gpu": st.sampled_from(["L4", "80 GiB", "2x A100-80GB", "24 GiB"]),
            "launch": st.sampled_from(
                [
                    "vllm serve m",
                    "vllm serve m --max-model-len 0 --tensor-parallel-size 0",
                    "python x.py",
                    "'",
                ]
            ),
            "attempt": st.sampled_from(["first", "last", 1]),
        },
    ),
    st.lists(fragments(), min_size=1, max_size=8),
)
def test_no_option_raises_on_any_log(options, parts):
    valid(diagnose("\n".join(["x", *parts]) + "\n", **options))


ERRORS = {
    "profile": ([*traceback(*PROFILE, error=OOM)], "act.profile_run"),
    "no blocks": ([NO_BLOCKS], "kv.no_blocks"),
    "software": (
        [*traceback(PROFILE[0], error="TypeError: forward() got an unexpected argument")],
        "look.other",
    ),
}


@pytest.mark.parametrize("kind", list(ERRORS))
@fewer
@given(st.integers(2, 8), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_speak_changes_nothing(kind, ranks, rng: random.Random):
    lines, subtype = ERRORS[kind]
    each = {
        rank: [
            f"(Worker_TP{rank} pid={200 + rank}) ERROR 04-17 02:01:23 [multiproc_executor.py:949] "
            + text.replace("GPU 0", f"GPU {rank}")
            for text in lines
        ]
        for rank in range(ranks)
    }
    order = [rank for rank, texts in each.items() for _ in texts]
    rng.shuffle(order)
    found = diagnose("\n".join([start(), *(each[rank].pop(0) for rank in order)]) + "\n")
    assert found.diagnosis.subtype == subtype
    assert found.source.attempts == 1


def healthy_logs() -> list[Path]:
    return [
        EXAMPLES / "healthy.log",
        *(p for p in sorted(QUIET.glob("0*.log")) if p.stem not in ("05b", "08b")),
    ]


@pytest.mark.parametrize("path", healthy_logs(), ids=lambda path: path.stem)
@fewer
@given(st.floats(0.01, 1), st.booleans())
def test_a_part_of_a_healthy_log_is_no_failure(path, share, at_a_line):
    """Cut anywhere: the answer may be that it can't tell, or that the capture may have failed, never that it did."""
    data = path.read_bytes()
    data = data[: max(40, round(share * len(data)))]
    if at_a_line:
        data = data[: data.rfind(b"\n") + 1] or data
    found = diagnose(io.BytesIO(data))
    assert found.outcome is not Outcome.OTHER_FAILURE
    assert found.diagnosis is None or found.diagnosis.confidence < 0.6


def failing_logs() -> list[Path]:
    examples = [path for path in sorted(EXAMPLES.glob("*.log")) if path.stem != "healthy"]
    return [*examples, *(p for p in sorted(QUIET.glob("1*.log")) if not p.stem.startswith("10"))]


@pytest.mark.parametrize("path", failing_logs(), ids=lambda path: path.stem)
@fewer
@given(st.floats(0.01, 1))
def test_a_part_of_a_failing_log_is_not_surely_another_memory_failure(path, share):
    """A cut takes evidence away. What is left may be less, or less sure, not surely something else."""
    whole = diagnose(path)
    data = path.read_bytes()
    found = diagnose(io.BytesIO(data[: max(40, round(share * len(data)))]))
    if (
        found.diagnosis
        and found.outcome is Outcome.MEMORY_FAILURE
        and found.diagnosis.confidence >= 0.9
    ):
        assert found.diagnosis.family is whole.diagnosis.family


@pytest.mark.parametrize("path", failing_logs(), ids=lambda path: path.stem)
def test_a_log_said_again_is_a_crash_loop_with_the_same_cause(path):
    whole = diagnose(path)
    again = diagnose(io.BytesIO(path.read_bytes() * 3))
    assert (again.outcome, again.diagnosis.family) == (whole.outcome, whole.diagnosis.family)
    assert again.diagnosis.subtype == whole.diagnosis.subtype
