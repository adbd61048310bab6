"""How fast is the log reader on a large log, against `grep -cEf` with the same anchors?

    python scripts/bench/scan.py --mb 1000 [--rounds 3] [--rate 0.001]

Writes a log of that size into a temporary folder, then reads it by path and from a pipe, each in a
process of its own, in turn with grep. Prints the best time of each, the ratio and the peak memory
(RSS), and whether every planted error was kept at its line number.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A fixed set (--builtin), so that figures of different catalogues can be compared.
ANCHORS = (
    r"out of memory",
    r"OutOfMemoryError",
    r"Tried to allocate [\d.]+ [KMGT]iB",
    r"No available memory for the cache blocks",
    r"larger than the available KV cache memory",
    r"less than desired GPU memory utilization",
    r"max seq len \(\d+\) is larger",
    r"maximum model length is \d+",
    r"is preempted by",
    r"warming up sampler with \d+ dummy",
    r"reserved by PyTorch but unallocated",
    r"NCCL WARN",
    r"NCCL error",
    r"nccl(?:Unhandled|System|Internal|Remote)\w*Error",
    r"Cuda failure \d+",
    r"Killed process \d+",
    r"oom-kill",
    r"OOMKilled",
    r"exit(?:ed with)? code:? -?\d+",
    r"SIGKILL|SIGTERM|SIGSEGV",
    r"Bus error",
    r"No space left on device",
    r"out of resource: shared memory",
    r"illegal memory access",
    r"CU(?:BLAS|DNN)_STATUS_\w+",
    r"cudaError\w+",
    r"cumem_allocator",
    r"Error in memory profiling",
    r"Initial free memory",
    r"[Mm]emory profiling takes",
    r"Available KV cache memory: -?[\d.]+ GiB",
    r"GPU KV cache size: [\d,]+ tokens",
    r"# (?:GPU|CUDA|CPU) blocks: \d+",
    r"Maximum concurrency for",
    r"[Mm]odel (?:loading|weights) took [\d.]+ Gi?B",
    r"Graph capturing finished in \d+ secs",
    r"Capturing (?:CUDA|cudagraph)",
    r"HIP (?:error|out of memory)",
    r"XPU out of memory",
    r"swap space .* exceeds",
    r"non-default args:",
    r"Initializing a? ?V[01] LLM engine",
    r"vLLM API server version",
    r"total capacity of [\d.]+ GiB",
    r"memory in use",
    r"EngineCore (?:failed|encountered|died)",
    r"EngineDeadError",
    r"Engine core initialization failed",
    r"WorkerProc (?:hit|initialization)",
    r"Worker .* died",
    r"RayActorDiedError|RayTaskError",
    r"[Cc]ustom all-?reduce",
    r"MIG \d+g\.\d+gb",
    r"Xid .*: \d+",
    r"Cannot allocate memory",
    r"std::bad_alloc",
    r"MemoryError",
    r"mmap failed",
    r"Traceback \(most recent call last\)",
    r"(?:Error|Exception|Interrupt): ",
)
QUIET = (
    "INFO {day} {time} [gpu_worker.py:298] Available KV cache memory: {gib:.2f} GiB",
    "INFO {day} {time} [kv_cache_utils.py:864] GPU KV cache size: {count:,} tokens",
    "WARNING {day} {time} [scheduler.py:1057] Request cmpl-{count} is preempted by the scheduler",
)
CRASH = (
    "ERROR {day} {time} [core.py:708] EngineCore encountered a fatal error.",
    "ERROR {day} {time} [core.py:708] Traceback (most recent call last):",
    'ERROR {day} {time} [core.py:708]   File "/opt/vllm/v1/engine/core.py", line {count}, in step',
    (
        "ERROR {day} {time} [core.py:708] torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate {gib:.2f} GiB. GPU 0 has a total capacity of 79.10 GiB of which 12.00 MiB is free."
    ),
)


def ordinary(rng: random.Random) -> str:
    """A line of a healthy server: access, statistics or request."""
    clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"
    kind = rng.random()
    if kind < 0.7:
        host = ".".join(str(rng.randrange(1, 255)) for _ in range(4))
        path = rng.choice(("chat/completions", "completions", "embeddings"))
        return f'INFO:     {host}:{rng.randrange(1024, 65000)} - "POST /v1/{path} HTTP/1.1" 200 OK'
    if kind < 0.9:
        return (
            f"(APIServer pid=1) INFO 11-03 {clock} [loggers.py:248] Engine 000: Avg prompt "
            f"throughput: {rng.uniform(0, 9000):.1f} tokens/s, Avg generation throughput: "
            f"{rng.uniform(0, 4000):.1f} tokens/s, Running: {rng.randrange(256)} reqs, Waiting: "
            f"{rng.randrange(40)} reqs, GPU KV cache usage: {rng.uniform(0, 99):.1f}%"
        )
    return (
        f"(APIServer pid=1) INFO 11-03 {clock} [logger.py:41] Received request "
        f"chatcmpl-{rng.getrandbits(128):032x}: params: SamplingParams(n=1, temperature="
        f"{rng.random():.2f}, max_tokens={rng.randrange(16, 4096)}), lora_request: None."
    )


def generate(path: Path, size: int, rate: float, crashes: int = 10) -> list[int]:
    """Write about `size` bytes; returns the line numbers of the planted out-of-memory errors."""
    rng = random.Random(20261103)  # noqa: S311 - a fixed log, no secret
    pool = [ordinary(rng) for _ in range(20_000)]

    def fill(template: str) -> str:
        values = {"gib": rng.uniform(1, 70), "count": rng.randrange(1000, 90000)}
        return "(EngineCore_DP0 pid=240) " + template.format(day="11-03", time="09:12:44", **values)

    spots = sorted(rng.randrange(size // 20, size) for _ in range(crashes))
    planted: list[int] = []
    written = line = 0
    with path.open("wb", buffering=1 << 20) as out:
        while written < size:
            lines = rng.choices(pool, k=500)
            for index in range(500):
                if rng.random() < rate:
                    lines[index] = fill(rng.choice(QUIET))
            if spots and spots[0] <= written:
                spots.pop(0)
                lines += [fill(text) for text in CRASH]
                planted.append(line + len(lines))
            line += len(lines)
            written += out.write(("\n".join(lines) + "\n").encode())
    return planted


def anchors(*, builtin: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The catalogue's telling and plain scan patterns, or the list above."""
    if not builtin:
        with contextlib.suppress(ImportError):
            from diag.facts.catalogue import plain_scan_patterns, scan_patterns

            return scan_patterns(), plain_scan_patterns()
    return ANCHORS, ()


_TOKEN = re.compile(
    r"(?P<group>\(\?(?:P?<\w+>|:))|\(\?[imsU]+\)|(?P<lazy>[*+?}])\?|"
    r"(?P<cls>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<esc>\\.)"
)
_SETS = {"d": "0-9", "w": "A-Za-z0-9_", "s": " \\t", "S": "!-~", "n": "", "t": " "}


def to_ere(pattern: str) -> str:
    """The RE2 pattern in grep's extended syntax, near enough for timing."""

    def token(found: re.Match[str]) -> str:
        if found["group"]:
            return "("
        if found["lazy"]:
            return found["lazy"]
        if found["cls"]:
            negated, body = "", found["cls"][1:-1]
            if body.startswith("^"):
                negated, body = "^", body[1:]
            first = "]" if "\\]" in body else ""
            body = re.sub(r"\\(.)", lambda e: _SETS.get(e[1], "" if e[1] == "]" else e[1]), body)
            last = "-" if "\\-" in found["cls"] else ""
            return f"[{negated}{first}{body.replace('-', '', 1) if last else body}{last}]"
        if found["esc"]:
            return "[0-9]" if found["esc"] == r"\d" else found["esc"]
        return ""

    return _TOKEN.sub(token, pattern)


def grep_patterns(patterns: tuple[str, ...], path: Path) -> int:
    """Write those patterns that grep takes; returns how many."""
    fit = []
    for pattern in patterns:
        ere = to_ere(pattern)
        command = ["grep", "-cE", "-e", ere, os.devnull]
        if subprocess.run(command, capture_output=True, check=False).returncode < 2:
            fit.append(ere)
    path.write_text("".join(f"{ere}\n" for ere in fit), encoding="utf-8")
    return len(fit)


def read_child(source: str, *, builtin: bool) -> None:
    """In a process of its own: read, then print time, peak memory and the numbers of kept lines."""
    sys.path.insert(0, str(ROOT))
    from diag.log.source import Anchors, read_source

    patterns = anchors(builtin=builtin)
    start, cpu = time.perf_counter(), time.process_time()
    text = read_source(source, anchors=Anchors.compile(*patterns))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ooms = [line.number for line in text.lines if "torch.OutOfMemoryError" in line.text]
    report = {"wall": wall, "cpu": cpu, "peak_mib": peak, "kept": len(text.lines)}
    report |= {"total": text.total_lines, "notes": text.notes, "ooms": ooms}
    print(json.dumps(report))


def measure_child(
    log: Path, *, pipe: bool, builtin: bool = False, whole: bool = False
) -> dict[str, object]:
    """One run of `read_child` or `explain_child`, by path or from a pipe."""
    command = [sys.executable, __file__, "--child", "-" if pipe else str(log)]
    command += ["--builtin"] if builtin else []
    command += ["--whole"] if whole else []
    if not pipe:
        done = subprocess.run(command, capture_output=True, check=True)
        return dict(json.loads(done.stdout))
    with subprocess.Popen(["cat", str(log)], stdout=subprocess.PIPE) as cat:  # noqa: S607
        done = subprocess.run(command, stdin=cat.stdout, capture_output=True, check=True)
    return dict(json.loads(done.stdout))


def explain_child(source: str) -> None:
    """In a process of its own: the whole `oomdoc explain`, then time and peak memory."""
    sys.path.insert(0, str(ROOT))
    from diag.pipeline import diagnose
    from diag.report.jsonout import to_json

    start, cpu = time.perf_counter(), time.process_time()
    diagnosis = diagnose(source)
    to_json(diagnosis)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report = {"wall": wall, "cpu": cpu, "peak_mib": peak, "notes": diagnosis.source.notes}
    print(json.dumps(report | {"total": diagnosis.source.lines}))


def measure_grep(log: Path, patterns: Path) -> dict[str, float]:
    """One run of grep: wall and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = ["grep", "-cEf", str(patterns), str(log)]
    subprocess.run(command, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": used}


def parse() -> argparse.Namespace:
    """The options; `--child` and `--whole` are for the script's own processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000, help="size of the log in MB")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the best counts")
    parser.add_argument("--rate", type=float, default=0.001, help="share of quiet lines with hits")
    parser.add_argument("--log", type=Path, help="measure this log instead of a generated one")
    parser.add_argument("--builtin", action="store_true", help="use the script's own 60 anchors")
    parser.add_argument("--json", type=Path, help="write the figures for scripts/update_readme.py")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def show(best: dict[str, dict[str, object]], size: float) -> None:
    """One line for each way of reading, beside grep."""
    for name, run in best.items():
        wall, cpu = float(str(run["wall"])), float(str(run["cpu"]))
        ratio = wall / float(str(best["grep"]["wall"]))
        line = (
            f"{name:13} {wall:7.2f} s wall {cpu:7.2f} s CPU {size / wall:7.0f} MB/s  x{ratio:.2f}"
        )
        if name != "grep":
            line += f"  {run['peak_mib']:.0f} MiB peak"
        if "kept" in run:
            line += f", {run['kept']:,} of {run['total']:,} lines kept"
        print(line)


def main() -> None:
    """Generate, measure, print."""
    options = parse()
    if options.child and options.whole:
        explain_child(options.child)
        return
    if options.child:
        read_child(options.child, builtin=options.builtin)
        return
    if shutil.which("grep") is None:
        sys.exit("grep is not installed")
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory(prefix="oomdoc-bench-") as folder:
        log, planted = options.log, None
        if log is None:
            log = Path(folder) / "big.log"
            planted = generate(log, options.mb * 1_000_000, options.rate)
        telling, plain = anchors(builtin=options.builtin)
        patterns = (*telling, *plain)
        taken = grep_patterns(patterns, Path(folder) / "anchors")
        size = log.stat().st_size / 1e6
        print(f"{size:,.0f} MB, {len(patterns)} anchors ({taken} of them given to grep)")
        names = ("grep", "file", "pipe", "explain", "explain, pipe")
        runs: dict[str, list[dict[str, object]]] = {name: [] for name in names}
        for _ in range(options.rounds):
            runs["grep"].append(dict(measure_grep(log, Path(folder) / "anchors")))
            runs["file"].append(measure_child(log, pipe=False, builtin=options.builtin))
            runs["pipe"].append(measure_child(log, pipe=True, builtin=options.builtin))
            runs["explain"].append(measure_child(log, pipe=False, whole=True))
            runs["explain, pipe"].append(measure_child(log, pipe=True, whole=True))
    best = {
        name: min(found, key=lambda run: float(str(run["wall"]))) for name, found in runs.items()
    }
    show(best, size)
    for name in ("file", "pipe"):
        for note in best[name]["notes"]:  # type: ignore[attr-defined]  # a list of our own child
            print(f"{name}: note: {note}")
        if planted is not None:
            found = "all" if best[name]["ooms"] == planted else "NOT all"
            print(f"{name}: {found} {len(planted)} planted errors kept at their line numbers")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows(best, size)}, indent=2) + "\n", "utf-8")


def rows(best: dict[str, dict[str, object]], size_mb: float) -> list[dict[str, str]]:
    """What `scripts/update_readme.py` puts into the speed table."""
    grep = float(str(best["grep"]["wall"]))
    return [
        {
            "what": f"`oomdoc explain`, {size_mb / 1000:.1f} GB generated log, {how}",
            "measured": f"{float(str(best[name]['wall'])):.1f} s, {best[name]['peak_mib']:.0f} MiB",
            "beside": f"`grep -cEf` with the same anchors: {grep:.1f} s "
            f"(ratio {float(str(best[name]['wall'])) / grep:.1f})",
        }
        for name, how in (("explain", "a file"), ("explain, pipe", "from a pipe"))
    ]


if __name__ == "__main__":
    main()
