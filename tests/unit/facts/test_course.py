"""How an attempt went: where it ends, whether it was stopped first, whether it went on after a problem."""

from __future__ import annotations

import pytest
from log_samples import NO_BLOCKS, OOM, SERVING, STATS, core, facts_of, planned, start, traceback

STOP = "(APIServer pid=1) INFO:     Shutting down"
SIGNAL = "(EngineCore pid=97) INFO 07-29 17:37:15 [core.py:1371] [shutdown] EngineCore: trigger received signal=SIGTERM"
DEAD = (
    "(APIServer pid=1) ERROR 07-29 17:37:16 [async_llm.py:708] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause."
)
STATS_LINE = STATS.format(running=1, waiting=0, usage=3.0)
UP = f"{start()}\n{planned()}\n{SERVING}"


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (start().rsplit("\n", 2)[0], "init_device"),
        (start().rsplit("\n", 1)[0], "weight_load"),
        (start(), "profile"),
        (f"{start()}\n{planned()}".rsplit("\n", 4)[0], "kv_alloc"),
        (f"{start()}\n{planned()}".rsplit("\n", 2)[0], "graph_capture"),
        (UP, "serving"),
    ],
)
def test_where_a_log_ends(text, ends):
    assert facts_of(text + "\n").text("attempt.ends_in") == ends


def test_a_log_without_a_known_step_ends_nowhere():
    assert facts_of("hello\n").text("attempt.ends_in") is None


@pytest.mark.parametrize(
    ("text", "stopped"),
    [
        (f"{UP}\n{STOP}\n{DEAD}", True),
        (f"{UP}\n{DEAD}\n{STOP}", False),
        (f"{UP}\n{STOP}", True),
        (f"{UP}\n{SIGNAL}\n{DEAD}", True),
        (UP, False),
    ],
)
def test_a_stop_that_was_asked_for_before_anything_went_wrong(text, stopped):
    assert facts_of(text + "\n").flag("attempt.stopped_first") is stopped


REQUEST = "\n".join(
    f"(APIServer pid=1) ERROR 01-09 11:22:00 [serving_chat.py:1] {part}"
    for part in traceback(
        ("entrypoints/openai/serving_chat.py", "create"), error="TypeError: bad request"
    )
)


@pytest.mark.parametrize(
    ("text", "survived"),
    [
        (f"{UP}\n{REQUEST}\n{STATS_LINE}", True),
        (f"{UP}\n{STATS_LINE}\n{REQUEST}", False),
        (
            f"{UP}\n{REQUEST}\n{DEAD}\n{STATS_LINE}",
            False,
        ),  # the engine died; the front end still counts
        (f"{UP}\n{STATS_LINE}", False),  # nothing to survive
    ],
)
def test_a_server_that_went_on_after_a_problem(text, survived):
    assert facts_of(text + "\n").flag("attempt.survived") is survived


GONE = (
    "ERROR 08-03 21:49:24 [core_client.py:606] Engine core proc EngineCore_DP0 died unexpectedly, "
    "shutting down client."
)


def test_an_offline_program_that_ends_by_losing_its_engine_ended_well():
    engine = f"{core('Initializing a V1 LLM engine (v0.11.0) with config: model=m', 'INFO')}\n{planned()}"
    assert facts_of(f"{engine}\n{GONE}\n").flag("attempt.ended_well") is True
    assert facts_of(f"{engine}\n{core(OOM)}\n{GONE}\n").flag("attempt.ended_well") is False
    assert (
        facts_of(f"{UP}\n{GONE}\n").flag("attempt.ended_well") is False
    )  # a server must not lose it
    assert (
        facts_of(f"{engine}\n{GONE}\n{core('going on', 'INFO')}\n").flag("attempt.ended_well")
        is False
    )


def test_ranks_are_counted():
    text = "".join(
        f"(Worker_TP{rank} pid={rank}) ERROR 01-09 11:21:34 [x.py:1] {NO_BLOCKS}\n"
        for rank in (0, 1, 3, 3)
    )
    assert facts_of(text).number("log.ranks") == 3


CUT = (
    "(EngineCore pid=97) Traceback (most recent call last):\n"
    '(EngineCore pid=97)   File "/opt/venv/lib/python3.12/site-packages/vllm/{file}", line 74, in step'
)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (f"{UP}\n{CUT.format(file='v1/engine/core.py')}", True),
        (f"{UP}\n{CUT.format(file='v1/engine/core.py')}\n{STATS_LINE}", False),
        (f"{UP}\n{CUT.format(file='entrypoints/openai/serving_chat.py')}", False),
        (f"{UP}\n{STOP}\n{CUT.format(file='v1/worker/gpu_worker.py')}", False),
        (f"{UP}\n{CUT.format(file='v1/engine/core.py')}\n(EngineCore pid=97) KeyError: 'x'", False),
        (UP, False),
    ],
)
def test_whether_the_last_error_is_cut_off(text, cut):
    assert facts_of(text + "\n").flag("attempt.error_cut") is cut
