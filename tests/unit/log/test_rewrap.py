"""Hard-wrapped pastes are put together again; other logs are left alone."""

from __future__ import annotations

import textwrap

import pytest

from diag.log.model import RawLine
from diag.log.reader import read_lines
from diag.log.rewrap import find_wrap

CORE = "(EngineCore_0 pid=1257)"
MESSAGES = """\
INFO 09-03 04:36:47 [core.py:74] Initializing a V1 LLM engine (v0.10.1.1) with config: model='Qwen2-7B',
 speculative_config=None, tokenizer='Qwen2-7B-Instruct', skip_tokenizer_init=False, tokenizer_mode=auto,
 revision=None, dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size=2, seed=0
INFO 09-03 04:36:48 [ray_distributed_executor.py:169] use_ray_spmd_worker: True
WARNING 09-03 04:36:48 [ray_utils.py:200] tensor_parallel_size=2 is bigger than a reserved number of GPUs
 (1 GPUs) in a node ad95619665703793074b79b0281a3e862204f6009bd050b8feea7495.
INFO 09-03 04:42:46 [gpu_worker.py:276] Some further words here, Available KV cache memory: 11.03 GiB
INFO 09-03 04:42:46 [kv_cache_utils.py:849] GPU KV cache size: 412,944 tokens
ERROR 09-03 04:42:46 [core.py:1] Traceback (most recent call last):
ERROR 09-03 04:42:46 [core.py:1]   File "/usr/lib/python3.12/vllm/v1/engine/core.py", line 7, in run
ERROR 09-03 04:42:46 [core.py:1] ValueError: To serve at least one request with the models's max seq len
 (262144), 24.0 GiB KV cache is needed, which is larger than the available KV cache memory (17.39 GiB).
ValueError: a second line of its own""".replace("\n ", " ").split("\n")
MESSAGES = [text if text.startswith("Value") else f"{CORE} {text}" for text in MESSAGES]


def read(lines):
    raw = [RawLine(number, text) for number, text in enumerate(lines, 1)]
    return read_lines(raw, name="t", total_lines=len(raw), total_bytes=0)


def hard(text: str, width: int) -> list[str]:
    return [text[start : start + width] for start in range(0, len(text), width)]


def plain(log):
    return [(line.level, line.source, line.text) for line in log.lines]


@pytest.mark.parametrize("width", [72, 97, 120])
def test_terminal_wrap_is_undone(width):
    wrapped = [piece for message in MESSAGES for piece in hard(message, width)]
    log = read(wrapped)

    assert plain(log) == plain(read(MESSAGES))
    assert f"hard_wrapped:{width}" in log.formats
    assert log.lines[0].number == 1
    assert log.lines[0].last_number == len(hard(MESSAGES[0], width))


@pytest.mark.parametrize("wrap", ["│ {:<100} │", "> {}", "2025-11-19T20:16:36.09Z {}"])
def test_terminal_wrap_inside_a_repeated_wrapper(wrap):
    wrapped = [wrap.format(piece) for message in MESSAGES for piece in hard(message, 90)]

    assert [line.text for line in read(wrapped).lines] == [
        line.text for line in read(MESSAGES).lines
    ]


def test_wrap_of_a_line_behind_a_service_name():
    wrapped = [piece for message in MESSAGES for piece in hard(f"vllm-1  | {message}", 90)]

    assert [line.text for line in read(wrapped).lines][:-1] == [
        line.text for line in read(MESSAGES).lines
    ][:-1]


def test_words_wrapped_at_blanks_are_joined_with_a_blank():
    wrapped = [
        piece
        for message in MESSAGES * 2
        for piece in textwrap.wrap(message, 78, drop_whitespace=True, break_on_hyphens=False)
    ]
    texts = [line.text for line in read(wrapped).lines]

    assert "which is larger than the available KV cache memory (17.39 GiB)." in texts[-2]
    assert any(text.endswith("words here, Available KV cache memory: 11.03 GiB") for text in texts)


def test_narrower_lines_with_lost_colour_codes():
    # The screen was 97 wide, but the codes around the process name took 11 columns of its lines.
    wrapped = []
    for message in [*MESSAGES, *(",".join(str(n * k) for n in range(90)) for k in (3, 7))]:
        if message.startswith("("):
            wrapped += [message[:86], *hard(message[86:], 97)] if len(message) > 86 else [message]
        else:
            wrapped += hard(message, 97)

    assert [line.text for line in read(wrapped).lines][:9] == [
        line.text for line in read(MESSAGES).lines
    ]


def test_unwrapped_log_stays():
    frame = '  File "/usr/local/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1747, in _call_impl'
    code = "    return forward_call(*args, **kwargs)"
    lines = [frame, code] * 20 + [
        "|   0  NVIDIA L4          Off |   00000000:38:00.0 Off |       0 |       x   x |"
    ] * 9

    assert find_wrap(lines) is None
    assert [line.text for line in read(lines).lines] == lines


def test_message_broken_by_hand_is_left_to_the_facts():
    lines = [
        "ValueError: To serve at least one request with the models's max seq len (1048576),",
        "22.5 GiB KV cache is needed, which is larger than the available KV cache memory (17.39 GiB).",
        "Based on the available memory, the estimated maximum model length is 810208.",
    ]

    assert [line.text for line in read(lines).lines] == lines
