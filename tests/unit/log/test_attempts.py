"""Where one start of vLLM ends and the next begins."""

from __future__ import annotations

from diag.log.attempts import split_attempts
from diag.log.model import RawLine
from diag.log.reader import read_lines


def attempts(*lines: str):
    raw = [RawLine(number, text) for number, text in enumerate(lines, 1)]
    return split_attempts(read_lines(raw, name="t", total_lines=len(raw), total_bytes=0))


def spans(*lines: str) -> list[tuple[int, int]]:
    return [(attempt.first_line, attempt.lines[-1].number) for attempt in attempts(*lines)]


def server(pid: int, version: str = "0.10.2") -> str:
    return f"(APIServer pid={pid}) INFO 09-30 18:28:54 [api_server.py:1] vLLM API server version {version}"


def args(pid: int, text: str = "{'model': 'm'}") -> str:
    return f"(APIServer pid={pid}) INFO 09-30 18:28:54 [utils.py:328] non-default args: {text}"


def engine(pid: int, name: str = "EngineCore_DP0", version: str = "0.10.2") -> str:
    return (
        f"({name} pid={pid}) INFO 09-30 18:29:03 [core.py:76] Initializing a V1 LLM engine"
        f" (v{version}) with config: model='m'"
    )


PLATFORM = "INFO 09-30 18:36:41 [__init__.py:216] Automatically detected platform cuda."
ERROR = "(APIServer pid=1) RuntimeError: Engine core initialization failed."


def test_log_without_a_marker_is_one_attempt():
    assert spans("a", "b") == [(1, 2)]


def test_empty_log_is_one_empty_attempt():
    (attempt,) = attempts()
    assert (attempt.index, attempt.lines, attempt.first_line) == (1, (), 0)


def test_one_start_prints_several_markers():
    assert spans(PLATFORM, server(1), args(1), engine(2), "x") == [(1, 5)]


def test_banner_of_block_characters_is_a_marker():
    banner = "(APIServer pid=1) INFO 05-21 21:02:50 [utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.19.1"
    assert spans(banner, args(1), engine(2), ERROR, banner, args(1), engine(3)) == [(1, 4), (5, 7)]


def test_restart_takes_the_lines_that_only_a_start_prints():
    found = spans(
        PLATFORM, server(1), args(1), engine(2), ERROR, "vLLM server exited with status 1",
        "python -m vllm.entrypoints.openai.api_server --model m", PLATFORM, server(9), args(9), engine(10), "up",
    )  # fmt: skip
    assert found == [(1, 6), (7, 12)]


def test_containers_reuse_their_pids():
    run = [PLATFORM, server(13), args(13), engine(216), ERROR]
    assert spans(*run, *run, *run) == [(1, 5), (6, 10), (11, 15)]


def test_data_parallel_engines_are_one_attempt():
    assert spans(server(1), args(1), engine(2), engine(3, "EngineCore_DP1"), "x") == [(1, 5)]


def test_server_that_starts_itself_again_before_any_engine_is_one_attempt():
    first, second = (f"KV(engine_id='{one}244e466-9edd-462b-8493-8b2e6c1f5eb9')" for one in "ab")
    assert spans(server(1), args(1, first), PLATFORM, server(5), args(5, second), engine(6)) == [
        (1, 6)
    ]


def test_start_that_failed_before_its_engine_is_an_attempt():
    lines = [server(1), args(1), "ValueError: bad flag", server(5), args(5), engine(6)]
    assert spans(*lines) == [(1, 3), (4, 6)]


def test_second_engine_of_a_script_is_an_attempt():
    first = "INFO 05-04 14:43:16 llm_engine.py:72] Initializing an LLM engine (v0.6.3) with config: model='m'"
    assert spans(first, "# GPU blocks: 3", "done", first, "# GPU blocks: 0") == [(1, 3), (4, 5)]


def test_config_dumped_by_a_crash_is_no_start():
    dump = (
        "(EngineCore_DP0 pid=2) ERROR 09-30 18:30:00 [dump_input.py:69] Dumping input data for V1 LLM engine"
        " (v0.10.2) with config: model='m'"
    )
    assert spans(server(1), args(1), engine(2), dump, ERROR) == [(1, 5)]


def test_services_are_kept_apart():
    lines = [
        f"{name}-1  | {text}"
        for text in (server(1), args(1), engine(2), "tail")
        for name in ("small", "large")
    ]
    found = attempts(*lines)

    assert [(one.index, one.service, len(one.lines)) for one in found] == [
        (1, "small-1", 4),
        (2, "large-1", 4),
    ]


def test_lines_of_other_services_stay_with_the_only_vllm():
    found = attempts(
        f"vllm-1   | {server(1)}", f"vllm-1   | {engine(2)}", "proxy-1  | GET /health 502", f"vllm-1   | {ERROR}",
        "Dec 07 19:00:36 host1 kernel: Out of memory: Killed process 2 (VLLM::EngineCore)",
    )  # fmt: skip

    assert [(one.service, len(one.lines)) for one in found] == [("vllm-1", 5)]


def test_kernel_lines_go_to_the_run_around_them():
    lines = [
        "a-1  | " + server(1), "a-1  | " + engine(2), "b-1  | " + server(1), "b-1  | " + engine(2),
        "Dec 07 19:00:36 host1 kernel: Out of memory: Killed process 2 (VLLM::EngineCore)",
    ]  # fmt: skip
    found = attempts(*lines)

    assert [len(one.lines) for one in found] == [2, 3]
