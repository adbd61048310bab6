"""Exceptions and failure lines -> problems: gathered by speaker, chains joined, copies folded."""

from __future__ import annotations

import random

import pytest
from log_samples import (
    INIT_FAILED,
    NO_BLOCKS,
    OOM,
    SERVING,
    core,
    facts_of,
    planned,
    start,
    traceback,
)

from diag.facts.problems import MAX_FRAMES, MAX_PROBLEMS
from diag.terms import Phase, RowRole

PROFILE = (
    ("v1/worker/gpu_worker.py", "determine_available_memory"),
    ("v1/worker/gpu_model_runner.py", "profile_run"),
    ("model_executor/models/qwen3.py", "forward"),
)
SERVE = (
    ("v1/engine/core.py", "run_busy_loop"),
    ("v1/worker/gpu_model_runner.py", "execute_model"),
)


def worker(rank: int, text: str) -> str:
    return f"(Worker_TP{rank} pid={200 + rank}) ERROR 04-17 02:01:23 [multiproc_executor.py:949] {text}"


def functions(problem) -> list[str]:
    return [frame.function for frame in problem.frames]


def eight_ranks(seed: int | None = None) -> str:
    """The same traceback from eight ranks, line by line in turn, or in a random mix that keeps each rank's order."""
    each = {
        rank: [
            worker(rank, text)
            for text in traceback(*PROFILE, error=OOM.replace("GPU 0", f"GPU {rank}"))
        ]
        for rank in range(8)
    }
    order = [rank for _ in each[0] for rank in range(8)]
    if seed is not None:
        random.Random(seed).shuffle(order)
    return "\n".join(each[rank].pop(0) for rank in order) + "\n"


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_interleaved_tracebacks_of_eight_ranks_are_one_problem(seed):
    (problem,) = facts_of(eight_ranks(seed)).problems
    assert problem.exception == "OutOfMemoryError"
    assert len(problem.copies) == 7
    assert functions(problem) == ["determine_available_memory", "profile_run", "forward"]
    assert problem.phase is Phase.PROFILE
    assert {problem.rank, *(line.rank for line in problem.copies)} == set(range(8))


def test_the_numbers_of_a_problem():
    text = "\n".join(core(part) for part in traceback(*PROFILE, error=NO_BLOCKS)) + "\n"
    (problem,) = facts_of(text).problems
    assert problem.first_number == 1
    assert problem.line.number == 8  # "Traceback", three frames of two lines, the exception
    assert [frame.number for frame in problem.frames] == [2, 4, 6]
    assert [frame.lineno for frame in problem.frames] == [10, 11, 12]
    assert problem.text == NO_BLOCKS
    assert "kv.no_blocks" in problem.rows


def test_a_logged_and_a_raw_copy_are_one_problem():
    lines = traceback(*PROFILE, error=OOM)
    text = "\n".join(
        [*(core(part) for part in lines), *(f"(EngineCore_DP0 pid=97) {part}" for part in lines)]
    )
    (problem,) = facts_of(text + "\n").problems
    assert len(problem.copies) == 1


@pytest.mark.parametrize(
    "joint",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_a_chain_is_one_problem_that_quotes_the_known_cause(joint):
    """The catalogue knows the middle one; the last is what the clean-up made of it."""
    text = "\n".join(
        core(part)
        for part in [
            *traceback(("a.py", "first"), error="KeyError: 'cache'"),
            "", joint, "",
            *traceback(*PROFILE, error=OOM),
            "", joint, "",
            *traceback(("b.py", "clean_up"), error="AttributeError: 'NoneType' object has no attribute 'x'"),
        ]
    )  # fmt: skip
    (problem,) = facts_of(text + "\n").problems
    assert problem.exception == "OutOfMemoryError"
    assert problem.text.startswith(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 432.00 MiB"
    )
    assert functions(problem) == [
        "first", "determine_available_memory", "profile_run", "forward", "clean_up"
    ]  # fmt: skip
    assert problem.first_number == 1


def test_a_chain_of_unknown_exceptions_quotes_the_first():
    text = "\n".join(
        core(part)
        for part in [
            *traceback(("a.py", "one"), error="KeyError: 'a'"),
            "During handling of the above exception, another exception occurred:",
            *traceback(("b.py", "two"), error="TypeError: b"),
        ]
    )
    (problem,) = facts_of(text + "\n").problems
    assert problem.text == "KeyError: 'a'"


def test_two_tracebacks_without_a_joint_are_two_problems():
    text = "\n".join(
        core(part)
        for part in [
            *traceback(("a.py", "one"), error="KeyError: 'a'"),
            *traceback(("b.py", "two"), error="TypeError: b"),
        ]
    )
    assert [(p.exception, functions(p)) for p in facts_of(text + "\n").problems] == [
        ("KeyError", ["one"]),
        ("TypeError", ["two"]),
    ]


def test_an_exception_text_of_several_lines_is_joined():
    text = "\n".join(
        core(part) for part in ("ValueError: first part", "  second part", "third part")
    )
    (problem,) = facts_of(text + "\n").problems
    assert problem.text == "ValueError: first part\nsecond part\nthird part"


def test_the_next_message_of_the_logger_is_not_part_of_the_text():
    text = "\n".join([core("ValueError: all of it"), core("Next step", "INFO", "core.py:12")])
    (problem,) = facts_of(text + "\n").problems
    assert problem.text == "ValueError: all of it"


def test_a_traceback_cut_before_its_exception_keeps_its_frames():
    text = "\n".join(core(part) for part in traceback(*PROFILE, error="")[:-2])
    (problem,) = facts_of(text + "\n").problems
    assert problem.exception is None
    assert problem.text == ""
    assert functions(problem)[:2] == ["determine_available_memory", "profile_run"]
    assert problem.phase is Phase.PROFILE


def test_a_traceback_on_one_line_has_all_its_frames():
    text = " ".join(part.strip() for part in traceback(*PROFILE, error=""))
    (problem,) = facts_of(text + "\n").problems
    assert functions(problem) == ["determine_available_memory", "profile_run", "forward"]


def test_the_method_in_a_v0_workers_message_is_a_frame():
    text = (
        "(VllmWorkerProcess pid=67) ERROR 11-05 03:21:52 multiproc_worker_utils.py:233] Exception in worker "
        "VllmWorkerProcess while processing method determine_num_available_blocks: CUDA out of memory. Tried to "
        "allocate 2.00 GiB. GPU 1 has a total capacity of 23.64 GiB of which 1.00 GiB is free. \n"
    )
    (problem,) = facts_of(text).problems
    assert functions(problem) == ["determine_num_available_blocks"]
    assert problem.phase is Phase.PROFILE


def test_a_v0_workers_message_counts_though_its_traceback_is_cut_off():
    text = (
        "(VllmWorkerProcess pid=67) ERROR 07-24 08:26:01 multiproc_worker_utils.py:226] Exception in worker "
        "VllmWorkerProcess while processing method init_device: NCCL error: unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), Traceback (most recent call last):\n"
    )
    (problem,) = facts_of(text).problems
    assert "unhandled cuda error" in problem.text


@pytest.mark.parametrize(
    ("before", "phase"),
    [
        ("", None),
        (start().rsplit("\n", 1)[0], Phase.WEIGHT_LOAD),
        (start(), Phase.PROFILE),  # weights are loaded
        (f"{start()}\n{planned()}", Phase.SERVING),
        (f"{start()}\n{planned()}\n{SERVING}", Phase.SERVING),
    ],
)
def test_without_telling_frames_the_lines_before_tell_the_phase(before, phase):
    (problem,) = facts_of(f"{before}\n{core(OOM)}\n".lstrip("\n")).problems
    assert problem.phase is phase


def test_frames_outrank_the_lines_before():
    text = "\n".join(
        [start(), planned(), SERVING, *(core(p) for p in traceback(*PROFILE, error=OOM))]
    )
    (problem,) = facts_of(text + "\n").problems
    assert problem.phase is Phase.PROFILE


def test_a_report_that_something_else_failed_is_an_echo():
    problems = facts_of(f"{core(NO_BLOCKS)}\n(APIServer pid=1) {INIT_FAILED}\n").problems
    assert [problem.role for problem in problems] == [RowRole.CAUSE, RowRole.ECHO]


def test_the_same_words_with_other_numbers_are_copies():
    text = "\n".join(
        core(f"ValueError: rank {rank} of 8 at 0x7f{rank}a0 has 3.{rank} GiB") for rank in range(3)
    )
    (problem,) = facts_of(text + "\n").problems
    assert len(problem.copies) == 2
    assert "rank 0" in problem.text


def test_a_copy_lends_its_frames_to_one_without():
    """The front end quotes the worker's error before the worker's own traceback is printed."""
    text = "\n".join(
        [f"(APIServer pid=1) {OOM}", *(core(part) for part in traceback(*PROFILE, error=OOM))]
    )
    (problem,) = facts_of(text + "\n").problems
    assert problem.line.number == 1
    assert "profile_run" in functions(problem)
    assert problem.phase is Phase.PROFILE


def test_two_failures_at_different_places_are_not_copies():
    """An error while serving that one request got, and a later one in another part of the code."""
    text = "\n".join(
        [
            start(), planned(), SERVING,
            *(core(part) for part in traceback(*SERVE, error=OOM)),
            *(core(part) for part in traceback(("v1/executor/abstract.py", "wake_up"), error=OOM)),
        ]
    )  # fmt: skip
    assert len(facts_of(text + "\n").problems) == 2


def test_a_log_of_problems_only_stays_bounded():
    text = "\n".join(
        core(f"{'ABCDEFGHIJ'[n % 10]}{n}xError: {chr(97 + n % 26)}") for n in range(3000)
    )
    assert len(facts_of(text + "\n").problems) <= MAX_PROBLEMS
    frames = "\n".join(core(f'  File "x.py", line {n}, in f{n}') for n in range(1000))
    (problem,) = facts_of(frames + "\n").problems
    assert len(problem.frames) == MAX_FRAMES


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.", "OutOfMemoryError"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "OutOfMemoryError"),
        ("OutOfMemoryError: CUDA out of memory.", "OutOfMemoryError"),
        ("AssertionError", "AssertionError"),
        ("KeyboardInterrupt: terminated", "KeyboardInterrupt"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 1", "OutOfResources"),
        ("ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper.execute_method()", "RayTaskError"),
        ("Exception: EngineCore failed", "Exception"),
    ],
)  # fmt: skip
def test_the_name_of_an_exception(text, name):
    problems = facts_of(core(text) + "\n").problems
    assert [problem.exception for problem in problems] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "No error: all is well",
        "errors: 0",
        "the Error was mended",
        "INFO: ready",
        "NotAnErrorAtAll: x",
    ],
)
def test_words_that_are_no_exception(text):
    assert facts_of(core(text, "INFO", "x.py:1") + "\n").problems == ()


def test_a_frame_is_read_within_bounds():
    long = core(f'  File "{"d" * 400}", line 7, in {"f" * 5000}')
    (problem,) = facts_of(long + "\n").problems
    assert len(problem.frames[0].file) == 400
    assert len(problem.frames[0].function) == 200
    assert facts_of(core(f'  File "{"d" * 401}", line 7, in f', "INFO") + "\n").problems == ()
