"""One line at a time: what stands around a message is taken off, who said it is kept."""

from __future__ import annotations

import json

import pytest

from diag.log.model import LogLine, RawLine
from diag.log.reader import read_lines

KV = "Available KV cache memory: 8.72 GiB"
VLLM = f"(Worker_TP1 pid=83) INFO 08-03 21:49:23 [gpu_worker.py:538] {KV}"
FRAME = '  File "/vllm/v1/worker/gpu_worker.py", line 538, in init_device'


def read(text: str) -> tuple[LogLine, ...]:
    raw = [RawLine(number, line) for number, line in enumerate(text.split("\n"), 1)]
    return read_lines(raw, name="t", total_lines=len(raw), total_bytes=len(text)).lines


def one(text: str) -> LogLine:
    (line,) = read(text)
    return line


@pytest.mark.parametrize(
    ("text", "process", "pid", "rank", "level", "source"),
    [
        (f"INFO 05-04 14:43:23 gpu_executor.py:119] {KV}", None, None, None, "INFO", "gpu_executor.py:119"),
        (f"INFO 04-12 18:36:25 [v1/engine/core.py:12] {KV}", None, None, None, "INFO", "v1/engine/core.py:12"),
        (f"INFO  [gpu_worker.py:642]  {KV}", None, None, None, "INFO", "gpu_worker.py:642"),
        (f"INFO  [kv_cache_utils.py]  {KV}", None, None, None, "INFO", "kv_cache_utils.py"),
        (f"INFO 2025-12-08 00:00:39.768 on.py:62] {KV}", None, None, None, "INFO", "on.py:62"),
        (f"INFO core.py:517: {KV}", None, None, None, "INFO", "core.py:517"),
        (f"(RayWorkerVllm pid=62111) INFO 04-28 20:50:12 a.py:1] {KV}", "RayWorkerVllm", 62111, None, "INFO", "a.py:1"),
        (
            f"(VllmWorkerProcess pid=67) ERROR 11-05 03:21:52 a.py:2] {KV}",
            "VllmWorkerProcess", 67, None, "ERROR", "a.py:2",
        ),
        (f"(VllmWorker rank=2 pid=52) INFO 04-14 14:23:05 [a.py:3] {KV}", "VllmWorker", 52, 2, "INFO", "a.py:3"),
        (f"(VllmWorker-1 pid=52) INFO 04-14 14:23:05 [a.py:3] {KV}", "VllmWorker-1", 52, 1, "INFO", "a.py:3"),
        (
            f"(EngineCore_DP0 pid=14) WARNING 03-10 07:38:43 [a.py:4] {KV}",
            "EngineCore_DP0", 14, None, "WARNING", "a.py:4",
        ),
        (f"(EngineCore pid=14) {KV}", "EngineCore", 14, None, None, None),
        (f"EngineCore pid=383) {KV}", "EngineCore", 383, None, None, None),
        (VLLM, "Worker_TP1", 83, 1, "INFO", "gpu_worker.py:538"),
        (f"(Worker_TP7_DCP1_EP7 pid=8) {KV}", "Worker_TP7_DCP1_EP7", 8, 7, None, None),
        (f"(Worker_PP1_TP3 pid=8) {KV}", "Worker_PP1_TP3", 8, None, None, None),
        (f"(Worker_DP0_TP0_EP0 pid=8) {KV}", "Worker_DP0_TP0_EP0", 8, None, None, None),
        (f"(Worker_PP1 pid=8) {KV}", "Worker_PP1", 8, 1, None, None),
        (f"(Worker pid=60651) ERROR 07-01 09:41:21 [a.py:8] {KV}", "Worker", 60651, None, "ERROR", "a.py:8"),
        (f"(LLMRayActor pid=7) {KV}", "LLMRayActor", 7, None, None, None),
        (f"[rank0]: {KV}", None, None, 0, None, None),
        (
            f"[rank4]:[W827 22:16:08.19 CUDACachingAllocator.cpp:508] {KV}",
            None, None, 4, "WARNING", "CUDACachingAllocator.cpp:508",
        ),
        (f"[rank2]:[E ProcessGroupNCCL.cpp:563] {KV}", None, None, 2, "ERROR", "ProcessGroupNCCL.cpp:563"),
        (
            f"(EngineCore pid=4) [rank0]:W0802 11:07:48.638000 4 torch/_inductor/utils.py:1731] {KV}",
            "EngineCore", 4, 0, "WARNING", "torch/_inductor/utils.py:1731",
        ),
        (f"INFO:     {KV}", None, None, None, "INFO", None),
        (f"WARNING:root:{KV}", None, None, None, "WARNING", None),
        (f"2026-07-06 18:33:06,987 - INFO - autotuner.py:622 - {KV}", None, None, None, "INFO", "autotuner.py:622"),
        (f"2025-05-09 02:41:55,864\tINFO worker.py:1660 -- {KV}", None, None, None, "INFO", "worker.py:1660"),
        (
            f"(raylet) [2023-09-23 16:35:32,117 E 12 12] (raylet) node_manager.cc:3007: {KV}",
            "raylet", 12, None, "ERROR", "node_manager.cc:3007",
        ),
        (f"[WARNING|logging.py:329] 2025-03-10 16:59:25,326 >> {KV}", None, None, None, "WARNING", "logging.py:329"),
        (
            f"2025-10-14 19:22:02.853794: E external/xla/cuda_fft.cc:467] {KV}",
            None, None, None, "ERROR", "external/xla/cuda_fft.cc:467",
        ),
        (f"[1234567.890123] {KV}", "kernel", None, None, None, None),
    ],
)  # fmt: skip
def test_logger_prefix(text, process, pid, rank, level, source):
    line = one(text)

    assert line.text == KV
    assert (line.speaker.process, line.speaker.pid, line.rank) == (process, pid, rank)
    assert (line.level, line.source) == (level, source)


def test_inner_process_speaks_when_two_are_printed():
    line = one(
        "(EngineCore_0 pid=1257) (RayWorkerWrapper pid=374, ip=10.0.0.2) INFO 09-03 04:42:46"
        f" [gpu_worker.py:276] {KV}"
    )

    assert line.speaker.process == "RayWorkerWrapper"
    assert (line.speaker.pid, line.speaker.host) == (374, "10.0.0.2")
    assert line.time == "09-03 04:42:46"


@pytest.mark.parametrize(
    ("text", "service"),
    [
        (f"vllm-1  | {VLLM}", "vllm-1"),
        (f"vllm-1  | 2025-11-19T20:16:36.1234567Z {VLLM}", "vllm-1"),
        (f"[pod/vllm-7f/server] 2025-11-19T20:16:36.09Z {VLLM}", "vllm-7f/server"),
        (f"2025-11-19T20:16:36.09Z {VLLM}", None),
        (f"[2026-02-24T20:21:58Z] {VLLM}", None),
        (f"2025-11-19T20:16:36.09Z stdout F {VLLM}", None),
        (f"Dec 07 19:00:36 host1 bash[10337]: {VLLM}", "host1 bash[10337]"),
        (f"2025-12-07T19:00:36.12+00:00 host1 vllm[7]: {VLLM}", "host1 vllm[7]"),
        (f"INFO 2025-11-19T20:16:36.09Z [resource.labels.containerName: vllm] {VLLM}", "vllm"),
        (f"2024-04-27 15:37:40 | ERROR | stderr | {VLLM}", None),
        (f"| ERROR | stderr | {VLLM}", None),
        (f"[vllm]: {VLLM}", "vllm"),
        (f"2026-06-09 11:33:21.982 [Error] (Process) {VLLM}", None),
        (f"k3v9qa7zt41bwx[info]{VLLM}", "k3v9qa7zt41bwx"),
        (f"2025-11-19T20:16:36.09Z  INFO dynamo_engine_vllm::worker: VLLM: {VLLM}", None),
        (f"> {VLLM}", None),
        (f"> > {VLLM}", None),
        (f"**{VLLM}**", None),
        (f"- {VLLM}", None),
        (f"│ {VLLM}               │", None),
        (json.dumps({"log": VLLM + "\n", "stream": "stderr", "time": "2025-11-19T20:16:36Z"}), None),
        (json.dumps({"textPayload": VLLM, "insertId": "1", "severity": "ERROR"}), None),
        (json.dumps({"jsonPayload": {"message": VLLM}, "timestamp": "2025-11-19T20:16:36Z"}), None),
        (json.dumps({"message": VLLM, "level": "info", "container": "vllm"}), "vllm"),
        (json.dumps({"stream": {"pod": "p-0"}, "values": [["1763583396000000000", VLLM]]}), "p-0"),
    ],
)  # fmt: skip
def test_wrapper_is_peeled(text, service):
    line = one(text)

    assert line.text == KV
    assert line.speaker.process == "Worker_TP1"
    assert line.speaker.service == service


@pytest.mark.parametrize(
    "wrap",
    [
        "vllm-1  | {}",
        "2025-11-19T20:16:36.09Z {}",
        "Dec 07 19:00:36 host1 bash[10337]: {}",
        "(EngineCore pid=4) {}",
        "(EngineCore pid=4) ERROR 08-03 21:49:23 [core.py:1] {}",
        "[rank0]: {}",
        "> {}",
        "│ {}      │",
        "  | {}",
    ],
)
def test_indentation_of_a_frame_survives(wrap):
    assert one(wrap.format(FRAME)).text == FRAME


@pytest.mark.parametrize(
    "text",
    [
        f"\x1b[0;36m(Worker_TP1 pid=83)\x1b[0;0m INFO 08-03 21:49:23 [gpu_worker.py:538] {KV}",
        f"[36m(Worker_TP1 pid=83)[0m INFO 08-03 21:49:23 [gpu_worker.py:538] {KV}",
        f"^[[0;36m(Worker_TP1 pid=83)^[[0;0m INFO 08-03 21:49:23 [gpu_worker.py:538] {KV}",
        f"#033[2m#033[36m(Worker_TP1 pid=83)#033[0m INFO 08-03 21:49:23 [gpu_worker.py:538] {KV}",
        f"\u2190[1;36m(Worker_TP1 pid=83)\u2190[0m INFO 08-03 21:49:23 [gpu_worker.py:538] {KV}",
        f'<font color="#06989A">(Worker_TP1 pid=83)</font> INFO 08-03 21:49:23 [a.py:1] {KV}',
        f"\\x1b[36m(Worker_TP1 pid=83)\\x1b[0m INFO 08-03 21:49:23 [gpu_worker.py:538] {KV}",
    ],
)
def test_colours_are_removed(text):
    line = one(text)

    assert (line.text, line.rank) == (KV, 1)


@pytest.mark.parametrize(
    "text",
    [
        "args: Namespace(model='m', hf_overrides={}, sizes=[512, 504], f=<function f at 0x15>)",
        "| N/A   56C    P0             30W /   72W |   21916MiB /  23034MiB |      0%      Default |",
        "shm              64M   21M   44M  32% /dev/shm",
        "[aiter] start build [module_aiter_enum]",
        "[preflight] ERROR: GPU 0 has 7.1 GiB free, but this config needs ~21.7 GiB/card",
        'compilation_config={"level":3,"custom_ops":[],"message":"x"}',
        '{"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}',
        "----> 1 predictions = generator(...)",
        "prompt: 'rate(x[5m])' tokens[1m] 1,048,576",
        "This process (pid=1747030) is multi-threaded, use of fork() may lead to deadlocks",
        "Model | Params | Loss",
    ],
)
def test_messages_pass_unchanged(text):
    assert one(text).text == text


def test_nccl_text_stays_whole():
    line = one(
        "[2025-09-23 12:37:58] decode-0:1288:7172 [0] include/alloc.h:228 NCCL WARN Cuda failure 2"
    )

    assert line.text == "decode-0:1288:7172 [0] include/alloc.h:228 NCCL WARN Cuda failure 2"
    assert (line.level, line.rank, line.speaker.process) == ("WARNING", None, "nccl")


def test_kernel_line_of_the_journal():
    line = one("Dec 07 19:00:36 host1 kernel: [1234.567890] Out of memory: Killed process 7 (VLLM)")

    assert line.text == "Out of memory: Killed process 7 (VLLM)"
    assert (line.speaker.process, line.speaker.service) == ("kernel", None)


def test_ray_repeats_are_counted():
    line = one(
        "(RayWorkerWrapper pid=860) INFO 04-16 10:28:44 [a.py:1] Model loading took 40.3174 GiB"
        " and 36.27 seconds [repeated 8x across cluster] (Ray deduplicates logs by default. Set"
        " RAY_DEDUP_LOGS=0 to disable log deduplication, or see https://x for more options.)"
    )

    assert line.text == "Model loading took 40.3174 GiB and 36.27 seconds"
    assert line.repeated == 8


def test_html_entities():
    assert (
        one("raise ValueError(&quot;a &lt; b &amp;&amp; c&quot;)").text
        == 'raise ValueError("a < b && c")'
    )


def test_log_line_glued_behind_a_progress_bar():
    states = [f"Capturing:  {n}%|x| {n}/67 [00:33<00:00, 2.50it/s]" for n in (1, 2, 66)]
    lines = read(
        "\r".join(states) + f"(VllmWorker rank=3 pid=3252) INFO 04-14 14:23:05 [a.py:3] {KV}\r"
    )

    assert [line.text for line in lines] == [states[-1], KV]
    assert [line.number for line in lines] == [1, 1]
    assert lines[1].rank == 3


def test_two_log_lines_glued():
    lines = read(
        "(APIServer pid=3164) INFO 07-29 17:37:15 [a.py:1] one(EngineCore pid=43) ERROR 07-29"
        " 17:37:15 [core.py:1371] two"
    )

    assert [(line.text, line.speaker.process) for line in lines] == [
        ("one", "APIServer"),
        ("two", "EngineCore"),
    ]


def test_traceback_on_one_line_is_split():
    lines = read(
        'Traceback (most recent call last): File "/a/core.py", line 712, in run self.go() File'
        ' "/a/worker.py", line 180, in init_device raise ValueError( ValueError: Free memory on'
        " device (7.34/139.72 GiB)"
    )

    assert [line.text for line in lines] == [
        "Traceback (most recent call last):",
        '  File "/a/core.py", line 712, in run',
        "    self.go()",
        '  File "/a/worker.py", line 180, in init_device',
        "    raise ValueError(",
        "ValueError: Free memory on device (7.34/139.72 GiB)",
    ]
    assert {line.number for line in lines} == {1}


def test_json_logging_of_vllm_gives_the_traceback_too():
    record = {
        "asctime": "2026-12-01 15:48:40,172",
        "levelname": "ERROR",
        "filename": "core.py",
        "lineno": 843,
        "process": 15291,
        "message": "EngineCore failed to start.",
        "exc_info": f"Traceback (most recent call last):\n{FRAME}\nValueError: No available memory",
    }
    lines = read(f"(EngineCore_DP0 pid=15291) {json.dumps(record)}")

    assert [line.text for line in lines] == [
        "EngineCore failed to start.",
        "Traceback (most recent call last):",
        FRAME,
        "ValueError: No available memory",
    ]
    assert {(line.level, line.source, line.speaker.pid) for line in lines} == {
        ("ERROR", "core.py:843", 15291)
    }


def test_unknown_wrapper_is_learned_from_lines_that_have_a_vllm_prefix():
    texts = [f"<7> app/web.{n} -- {VLLM}" for n in range(5)] + [f"<7> app/web.9 -- {FRAME}"]
    lines = read("\n".join(texts))

    assert [line.text for line in lines] == [KV] * 5 + [FRAME]


def test_grep_numbers_are_learned():
    lines = read(
        "\n".join(f"{number}:{VLLM}" for number in (17, 203, 1999)) + "\n2007:ValueError: x"
    )

    assert [line.text for line in lines] == [KV] * 3 + ["ValueError: x"]
