"""`diagnose` from bytes to the answer: starts in one log, options, what is a file and what is text."""

from __future__ import annotations

import io

import pytest
from log_samples import (
    GIB,
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

from diag import pipeline
from diag.errors import LogReadError, UsageError
from diag.pipeline import diagnose
from diag.terms import Family, GmuVerdict, Origin, Outcome

UP = f"{start()}\n{planned()}\n{SERVING}"
DOWN = f"{start()}\n{core(NO_BLOCKS)}\n(APIServer pid=1) {INIT_FAILED}"
TOO_LONG = f"{start()}\n{core(MAX_LEN)}\n(APIServer pid=1) {INIT_FAILED}"


def subtype(found):
    return found.diagnosis and found.diagnosis.subtype


# --- several starts in one log ----------------------------------------------------------------------------------


def test_a_crash_loop_is_told_by_its_last_start():
    found = diagnose("\n".join([DOWN] * 4) + "\n")
    source = found.source
    assert (
        source.attempts,
        source.attempt,
        source.attempts_failed,
        source.attempts_same_failure,
    ) == (4, 4, 4, 4)
    assert subtype(found) == "kv.no_blocks"
    assert found.diagnosis.line == 3 * 7 + 6  # the error is the sixth of seven lines


def test_the_last_start_that_failed_and_not_the_last():
    found = diagnose(f"{DOWN}\n{TOO_LONG}\n{UP}\n")
    assert (found.source.attempts, found.source.attempt) == (3, 2)
    assert (found.source.attempts_failed, found.source.attempts_same_failure) == (2, 1)
    assert subtype(found) == "kv.max_len_exceeds"


def test_a_start_that_only_breaks_off_is_no_better_answer_than_a_failure():
    found = diagnose(f"{DOWN}\n{start()}\n")
    assert (found.source.attempt, subtype(found)) == (1, "kv.no_blocks")


def test_an_engine_that_failed_without_a_word_gives_way_to_one_that_says_why():
    silent = f"{start()}\n(APIServer pid=1) {INIT_FAILED.replace('{}', chr(123) + chr(125))}"
    found = diagnose(f"{DOWN}\n{silent}\n")
    assert found.source.attempts_failed == 2
    assert subtype(found) in ("kv.no_blocks", "host.oom_killed")


@pytest.mark.parametrize(
    ("choice", "number", "outcome"),
    [
        (1, 1, "kv.no_blocks"), (2, 2, "kv.max_len_exceeds"), (3, 3, None), ("first", 1, "kv.no_blocks"),
        ("last", 2, "kv.max_len_exceeds"),
    ],
)  # fmt: skip
def test_a_start_can_be_chosen(choice, number, outcome):
    found = diagnose(f"{DOWN}\n{TOO_LONG}\n{UP}\n", attempt=choice)
    assert (found.source.attempt, subtype(found)) == (number, outcome)
    assert found.source.attempts_same_failure == (1 if outcome else 0)


@pytest.mark.parametrize("choice", [0, 3, -1])
def test_a_start_that_is_not_there(choice):
    with pytest.raises(UsageError, match=f"no attempt {choice}") as caught:
        diagnose(f"{DOWN}\n{UP}\n", attempt=choice)
    assert "1 to 2" in caught.value.hint


def test_of_very_many_starts_the_last_are_looked_at(monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_JUDGED", 3)
    text = "\n".join([TOO_LONG, *[DOWN] * 5]) + "\n"
    found = diagnose(text)
    assert (found.source.attempts, found.source.attempt, found.source.attempts_failed) == (6, 6, 3)
    assert any("6 starts in this log; 3 of them" in note for note in found.source.notes)
    assert subtype(diagnose(text, attempt=1)) == "kv.max_len_exceeds"
    assert subtype(diagnose(text, attempt="first")) == "kv.max_len_exceeds"


BEGINS = "INFO 08-03 21:49:20 [core.py:58] Initializing a V1 LLM engine (v0.9.1) with config: model='m', seed=0"
ENGINE = f"""{BEGINS}
INFO 08-03 21:49:21 [gpu_model_runner.py:1273] Model loading took 0.7318 GiB and 1.412070 seconds
INFO 08-03 21:49:22 [kv_cache_utils.py:716] GPU KV cache size: 127,664 tokens
INFO 08-03 21:49:23 [core.py:171] init engine (profile, create kv cache, warmup model) took 13.87 seconds"""
REFUSED = (
    "ERROR 08-03 21:50:22 [core.py:396] ValueError: Free memory on device (2.86/23.52 GiB) on startup is less than "
    "desired GPU memory utilization (0.9, 21.17 GiB). Decrease GPU memory utilization or reduce GPU memory used by "
    "other processes."
)
SECOND = f"{BEGINS}\n{REFUSED}"


def test_an_earlier_engine_of_the_same_program_still_holds_its_memory():
    found = diagnose(f"{ENGINE}\n{SECOND}\n")
    assert found.source.attempts == 2
    assert found.diagnosis.family is Family.ALLOCATOR_TRANSIENT
    assert subtype(found) == "alloc.not_released"


def test_the_same_message_without_an_earlier_engine_is_the_start_up_check():
    assert subtype(diagnose(f"{SECOND}\n")) == "kv.free_below_target"


def test_a_server_that_is_started_again_is_another_process():
    found = diagnose(f"{UP}\n{start()}\n{REFUSED}\n")
    assert subtype(found) == "kv.free_below_target"


# --- what is known beside the log -------------------------------------------------------------------------------

FREE_BELOW = f"{SECOND}\n"


def test_the_release_is_the_printed_one_or_the_given_one():
    printed = diagnose(FREE_BELOW).environment
    assert (printed.vllm_version, printed.vllm_origin) == ("0.9.1", Origin.LOGGED)
    given = diagnose(FREE_BELOW, vllm_version="0.11.0").environment
    assert (given.vllm_version, given.vllm_origin) == ("0.11.0", Origin.ASSUMED)
    none = diagnose(core(NO_BLOCKS) + "\n").environment
    assert (none.vllm_version, none.vllm_origin) == (None, None)


def test_a_release_that_is_none_counts_as_unknown():
    """People write "main" or "nightly"; that must not cost them the answer."""
    found = diagnose(core(NO_BLOCKS) + "\n", vllm_version="banana")
    assert found.diagnosis is not None
    assert any("banana" in note for note in found.source.notes)


@pytest.mark.parametrize(
    ("gpu", "least", "most"),
    [
        ("L4", 21.5, 24.1),
        ("2x A100-80GB", 79, 80.1),
        ("80 GiB", 80, 80),
        ("23.6 GiB", 23.6, 23.6),
        ("H200", 138, 142),
    ],
)
def test_the_cards_size_by_name_or_number(gpu, least, most):
    found = diagnose(core(NO_BLOCKS) + "\n", gpu=gpu)
    (rank,) = found.ledger.ranks
    assert least - 1e-6 <= rank.total_bytes / GIB <= most + 1e-6
    assert found.environment.device == gpu


def test_a_printed_size_outranks_the_given_one():
    found = diagnose(FREE_BELOW, gpu="80 GiB")
    assert found.ledger.ranks[0].total_bytes == round(23.52 * GIB)


@pytest.mark.parametrize("gpu", ["potato", "", "nan", "GiB", "1e400 GiB"])
def test_a_card_that_nobody_knows(gpu):
    with pytest.raises(UsageError, match="is no GPU"):
        diagnose(core(NO_BLOCKS) + "\n", gpu=gpu)


@pytest.mark.parametrize("gpu", ["0", "0 GiB", "-5 GiB"])
def test_a_card_of_no_size(gpu):
    with pytest.raises(UsageError, match="is no GPU"):
        diagnose(core(NO_BLOCKS) + "\n", gpu=gpu)


def test_a_launch_command_is_taken_into_account():
    command = "vllm serve org/m --gpu-memory-utilization 0.7 --max-model-len 163840"
    found = diagnose(core(MAX_LEN) + "\n", launch=command)
    assert found.environment.model == "org/m"
    assert found.environment.command == command
    assert found.gmu.verdict is GmuVerdict.RAISE
    assert found.gmu.current == 0.7
    assert any(fix.command and fix.command.startswith("vllm serve org/m") for fix in found.fixes)


def test_the_number_of_cards_comes_from_the_configuration():
    text = UP.replace("tensor_parallel_size=1", "tensor_parallel_size=4")
    found = diagnose(f"{text}\n{core(OOM)}\n")
    assert found.environment.device.startswith("4x ")


# --- outcomes ---------------------------------------------------------------------------------------------------


def test_a_healthy_log():
    found = diagnose(UP + "\n")
    assert found.outcome is Outcome.HEALTHY
    assert found.diagnosis is found.gmu is None
    assert found.fixes == found.not_helpful == found.alternatives == found.next_steps == ()
    assert found.headline.startswith("Healthy start: serving since line 11.")


def test_a_healthy_server_that_turned_requests_away():
    request = "\n".join(
        f"(APIServer pid=1) ERROR 01-09 11:22:00 [serving_chat.py:237] {part}"
        for part in traceback(
            ("entrypoints/openai/serving_chat.py", "create_chat_completion"),
            error="ValueError: This model's maximum context length is 32768 tokens. You requested 40000 tokens.",
        )
    )
    found = diagnose(f"{UP}\n{request}\n{STATS.format(running=1, waiting=0, usage=2.0)}\n")
    assert found.outcome is Outcome.HEALTHY


def test_a_start_that_is_not_complete():
    found = diagnose(start() + "\n")
    assert (found.outcome, found.diagnosis) == (Outcome.UNKNOWN, None)
    assert (
        found.headline
        == "Cannot tell yet. The log ends in the profile run and shows no failure up to there."
    )
    assert found.next_steps


def test_a_failure_that_is_not_memory():
    found = diagnose(
        f"{start()}\n{core('TypeError: forward() got an unexpected argument')}\n(APIServer pid=1) {INIT_FAILED}\n"
    )
    assert found.outcome is Outcome.OTHER_FAILURE
    assert found.diagnosis.family is Family.LOOKALIKE
    assert found.headline.startswith("Not a memory failure (line 6): TypeError: forward()")


# --- what is a file, and what is text ---------------------------------------------------------------------------


def test_text_with_a_newline_or_one_pasted_line():
    assert subtype(diagnose(NO_BLOCKS + "\n")) == "kv.no_blocks"
    assert subtype(diagnose(NO_BLOCKS)) == "kv.no_blocks"
    assert diagnose(NO_BLOCKS).source.name == "<text>"
    assert diagnose(NO_BLOCKS, name="pasted").source.name == "pasted"


def test_a_path_a_name_and_a_stream_give_the_same_answer(tmp_path, monkeypatch):
    path = tmp_path / "vllm.log"
    path.write_text(DOWN + "\n")
    monkeypatch.chdir(tmp_path)
    for source in (path, str(path), "vllm.log", io.BytesIO(path.read_bytes())):
        found = diagnose(source)
        assert (subtype(found), found.source.lines, found.source.bytes) == (
            "kv.no_blocks",
            7,
            path.stat().st_size,
        )


def test_a_file_whose_name_reads_like_a_message(tmp_path, monkeypatch):
    (tmp_path / "ValueError: odd").write_text(DOWN + "\n")
    monkeypatch.chdir(tmp_path)
    assert diagnose("ValueError: odd").source.lines == 7


@pytest.mark.parametrize("name", ["missing.log", "no/such/folder/vllm.log", "word"])
def test_a_missing_file_is_no_text(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LogReadError, match="no such file"):
        diagnose(name)


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\0\0\0\0"])
def test_nothing_to_read(data):
    with pytest.raises(LogReadError, match="empty"):
        diagnose(io.BytesIO(data))


def test_a_folder_is_no_log(tmp_path):
    with pytest.raises(LogReadError, match="directory"):
        diagnose(tmp_path)


# --- numbers that can't be --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Available KV cache memory: " + "9" * 400 + " GiB",
        "GPU KV cache size: " + "9" * 400 + " tokens",
        "non-default args: {'max_model_len': 1e999, 'swap_space': inf, 'gpu_memory_utilization': nan}",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate " + "9" * 400 + ".00 GiB.",
        OOM.replace("44.39 GiB", "0 bytes"),
        OOM.replace("43.11 GiB", "17179869184.00 GiB"),
        MAX_LEN.replace("163840", "0").replace("15.00", "0.00"),
    ],
)
def test_impossible_numbers_end_nothing(text):
    for context in ({}, {"gpu": "L4", "vllm_version": "0.11.0"}):
        found = diagnose(f"{core(text)}\n{core(NO_BLOCKS)}\n", **context)
        assert found.diagnosis is not None


def test_a_batch_of_no_tokens():
    frames = traceback(("v1/worker/gpu_worker.py", "profile_run"), error=OOM)
    text = "\n".join(
        [core("non-default args: {'max_num_batched_tokens': 0}", "INFO"), *map(core, frames)]
    )
    assert subtype(diagnose(text + "\n")) == "act.profile_run"
