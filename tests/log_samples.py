"""Log text for the tests of the core, and short ways through its first steps."""

from __future__ import annotations

from collections.abc import Mapping

from diag.facts.catalogue import Catalogue, row_from
from diag.facts.collect import collect
from diag.facts.model import Facts
from diag.log.attempts import split_attempts
from diag.log.model import Attempt, LogLine
from diag.log.reader import read_lines
from diag.log.source import read_text
from diag.rules.schema import Condition, Rule, When
from diag.schema import validated

GIB, MIB = 1 << 30, 1 << 20

# A torch out-of-memory text of torch 2.5 and later. Numbers: 44.39 - 0.21381 = 44.176 GiB in use by this process.
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of "
    "44.39 GiB of which 218.94 MiB is free. Including non-PyTorch memory, this process has 44.17 GiB memory in use. "
    "Of the allocated memory 43.11 GiB is allocated by PyTorch, and 305.03 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
NO_BLOCKS = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
    "the engine."
)
MAX_LEN = (
    "ValueError: To serve at least one request with the models's max seq len (163840), (15.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (13.62 GiB). Based on the available memory, the estimated "
    "maximum model length is 148752. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
    "initializing the engine."
)
INIT_FAILED = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
STATS = (
    "(APIServer pid=1) INFO 01-09 11:20:59 [loggers.py:248] Engine 000: Avg prompt throughput: 412.7 tokens/s, "
    "Avg generation throughput: 96.3 tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
    "GPU KV cache usage: {usage}%, Prefix cache hit rate: 0.0%"
)


def core(text: str, level: str = "ERROR", source: str = "core.py:708", pid: int = 97) -> str:
    """A line of a V1 engine process."""
    return f"(EngineCore_DP0 pid={pid}) {level} 01-09 11:21:34 [{source}] {text}"


def traceback(*frames: tuple[str, str], error: str) -> list[str]:
    """The lines of a Python traceback; frames are (file below vllm/, function)."""
    lines = ["Traceback (most recent call last):"]
    for number, (file, function) in enumerate(frames, 10):
        lines += [
            f'  File "/opt/venv/lib/python3.12/site-packages/vllm/{file}", line {number}, in {function}',
            "    return call()",
        ]
    return [*lines, error]


def start(version: str = "0.13.0", args: str = "{'model': 'Qwen/Qwen3-8B'}", pid: int = 97) -> str:
    """The first lines of a V1 server, up to the loaded weights."""
    return "\n".join(
        (
            f"(APIServer pid=1) INFO 01-09 11:20:03 [api_server.py:1351] vLLM API server version {version}",
            f"(APIServer pid=1) INFO 01-09 11:20:03 [utils.py:253] non-default args: {args}",
            core(
                f"Initializing a V1 LLM engine (v{version}) with config: model='Qwen/Qwen3-8B', "
                "speculative_config=None, dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1, "
                "pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto",
                "INFO",
                "core.py:93",
                pid,
            ),
            core(
                "Starting to load model Qwen/Qwen3-8B...", "INFO", "gpu_model_runner.py:3562", pid
            ),
            core(
                "Model loading took 15.2683 GiB memory and 10.84 seconds",
                "INFO",
                "gpu_model_runner.py:3659",
                pid,
            ),
        )
    )


def planned(pid: int = 97) -> str:
    """The lines after `start` up to the captured graphs."""
    return "\n".join(
        core(text, "INFO", source, pid)
        for source, text in (
            ("gpu_worker.py:375", "Available KV cache memory: 21.77 GiB"),
            ("kv_cache_utils.py:1291", "GPU KV cache size: 158,512 tokens"),
            ("kv_cache_utils.py:1296", "Maximum concurrency for 32,768 tokens per request: 4.84x"),
            ("gpu_model_runner.py:4587", "Graph capturing finished in 3 secs, took 0.57 GiB"),
            ("core.py:259", "init engine (profile, create kv cache, warmup model) took 19.87 seconds"),
        )
    )  # fmt: skip


SERVING = "(APIServer pid=1) INFO:     Application startup complete."


def attempts_of(text: str) -> tuple[Attempt, ...]:
    """The starts in a text, as the pipeline reads it."""
    raw = read_text(text)
    log = read_lines(raw.lines, name=raw.name, total_lines=raw.total_lines, total_bytes=0)
    return split_attempts(log)


def facts_of(text: str, *, launch: str | None = None, known: Catalogue | None = None) -> Facts:
    """The facts of the only start in a text."""
    (attempt,) = attempts_of(text)
    return collect(attempt, launch=launch, known=known)


def small_catalogue(
    *rows: Mapping[str, object], facts: Mapping[str, str] | None = None
) -> Catalogue:
    """A catalogue of the given rows (`id` and `pattern` suffice); `facts` maps a fact's name to its unit."""
    made = tuple(
        row_from({"role": "info", "means": "a test", **row}, "test", "test.yaml") for row in rows
    )
    return Catalogue(made, {name: {"unit": unit} for name, unit in (facts or {}).items()})


def line(
    text: str, number: int = 1, level: str | None = None, source: str | None = None
) -> LogLine:
    """A cleaned line."""
    return LogLine(number=number, text=text, level=level, source=source)


def made_condition(**body: object) -> Condition:
    """One condition of a rule file."""
    return validated(Condition, body, "a condition")


def made_when(**body: object) -> When:
    """The three lists of a rule file."""
    return validated(When, body, "when")


def made_rule(name: str = "kv.a", **changes: object) -> Rule:
    """A rule that holds for every problem, changed."""
    body = {
        "schema": 1,
        "id": name,
        "title": f"The rule {name}",
        "family": "kv_reservation",
        "priority": 50,
        "when": {"all": [{"text": "."}]},
        "summary": ["It failed."],
        "examples": [],
    }
    return validated(Rule, {**body, **changes}, f"{name}.yaml")
