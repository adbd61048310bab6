"""One start of vLLM under limits: command in; log, exit code, readiness and answers out. Linux only.

Every start has a session of its own and is ended by its own process ids.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from proving.cases import Limits, Request

READY_S = 400  # the slowest machine's start
STOP_S = 45
ANSWER_S = 400  # a long prompt in small steps on a busy machine
_QUIET = {
    # No network, no usage report, loopback only.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}
# Touches every page of so many bytes, says so and waits for the end of its input.
_HOLDER = """import sys
block = bytearray(int(sys.argv[1]))
block[::4096] = b"x" * len(block[::4096])
print("held", flush=True)
sys.stdin.read()
"""
_DROPPED = ("VLLM_", "PYTORCH_", "TORCH_")  # settings of the caller's own shell


def split_command(command: str) -> tuple[dict[str, str | None], list[str]]:
    """Variables in front of a command (None: taken away) and its words. Raises ValueError for an open quote.

    >>> split_command("env -u B A=1 vllm serve m")
    ({'B': None, 'A': '1'}, ['vllm', 'serve', 'm'])
    """
    variables: dict[str, str | None] = {}
    words = shlex.split(command)
    while words:
        name, equals, value = words[0].partition("=")
        if words[0] == "env":
            words = words[1:]
        elif words[0] == "-u" and len(words) > 1:
            variables[words[1]] = None
            words = words[2:]
        elif equals and name.isidentifier():
            variables[name] = value
            words = words[1:]
        else:
            break
    return variables, words


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Start:
    """A running command; a context manager that leaves no process behind."""

    def __init__(
        self, command: str, *, folder: Path, log: Path, programs: Path, limits: Limits
    ) -> None:
        """`folder` is where it runs, `programs` the folder of its `vllm` and `python`."""
        variables, words = split_command(command)
        self.log = log
        self.began = time.monotonic()
        self.killed: list[str] = []
        self._ended = threading.Event()
        self._seen: set[int] = set()
        found = shutil.which(words[0], path=str(programs))
        words[0] = found or words[0]
        if limits.shared_memory is not None:
            words = _with_own_shm(words, limits.shared_memory)
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=_environment(variables, programs, folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if limits.address_space is not None:
            # Set before vLLM's first import is through; children inherit it.
            size = limits.address_space
            resource.prlimit(self.process.pid, resource.RLIMIT_AS, (size, size))
        self._watch = threading.Thread(target=self._watching, args=(limits.resident,), daemon=True)
        self._watch.start()

    def __enter__(self) -> Start:  # noqa: PYI034
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.began

    def wait_ready(self, port: int, patience_s: float = READY_S) -> bool:
        """Whether /health answers before the process ends or patience does."""
        while self.seconds < patience_s and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    return True
            except OSError:
                time.sleep(0.5)
        return False

    def wait_end(self, patience_s: float = READY_S) -> int | None:
        """The exit code; None when it still runs."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return None

    def squeeze(self, spare: int) -> None:
        """Leave the worker `spare` bytes of address space above what it has. Raises LookupError without a worker."""
        for pid in _family(self.process.pid):
            if "Worker" in _title(pid):
                size = int(_read(pid, "statm").split()[0]) * resource.getpagesize() + spare
                resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
                return
        raise LookupError("no worker process")

    def stop(self) -> int | None:
        """Ends it as Ctrl-C does, then whatever is left of its session; its exit code."""
        if self.process.poll() is None:
            self._seen.update(_family(self.process.pid))
            self.process.send_signal(signal.SIGINT)
            self.wait_end(STOP_S)
        self._ended.set()
        self._watch.join()
        for pid in self._seen | set(_family(self.process.pid)):
            try:
                if os.getsid(pid) == self.process.pid:
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        return self.wait_end(STOP_S)

    def _watching(self, limit: int | None) -> None:
        while not self._ended.wait(0.1 if limit else 0.5):
            sizes = {pid: _resident(pid) for pid in _family(self.process.pid)}
            self._seen.update(sizes)
            if limit and sizes and sum(sizes.values()) > limit:
                fattest = max(sizes, key=lambda pid: sizes[pid])
                self.killed.append(_title(fattest)[:60])
                os.kill(fattest, signal.SIGKILL)
                self._ended.wait(2)


def complete(port: int, model: str, request: Request | None = None) -> tuple[bool, str]:
    """Whether a completion was answered, and what came back in short. `request` None: a few words."""
    tokens = request.prompt_tokens if request else 5
    body: dict[str, Any] = {"model": model, "prompt": [10] * tokens, "max_tokens": 8}
    body["temperature"] = 0
    if request and request.prompt_logprobs:
        body["prompt_logprobs"] = 1
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(call, timeout=ANSWER_S) as answer:  # noqa: S310
            found = json.loads(answer.read())
            return True, f"{found['usage']['completion_tokens']} tokens"
    except urllib.error.HTTPError as error:
        return False, f"HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
    except (OSError, ValueError, LookupError) as error:
        return False, repr(error)[:300]


@contextmanager
def memory_held(size: int | None) -> Iterator[None]:
    """Another process that holds `size` bytes."""
    if not size:
        yield
        return
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
    finally:
        holder.kill()
        holder.wait()


def may_mount(programs: Sequence[str] = ("unshare", "mount")) -> bool:
    """Whether a /dev/shm of one's own can be made here."""
    return os.geteuid() == 0 and all(shutil.which(name) for name in programs)


def _with_own_shm(words: Sequence[str], size: int) -> list[str]:
    script = f'mount -t tmpfs -o size={size // 1024}k tmpfs /dev/shm && exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, "sh", *words]


def _environment(
    variables: Mapping[str, str | None], programs: Path, folder: Path
) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_DROPPED)}
    kept |= _QUIET
    kept |= {
        "PATH": f"{programs}{os.pathsep}{kept.get('PATH', os.defpath)}",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    for name, text in variables.items():
        if text is None:
            kept.pop(name, None)
        else:
            kept[name] = text
    return kept


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def _title(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ").strip()


def _resident(pid: int) -> int:
    fields = _read(pid, "statm").split()
    return int(fields[1]) * resource.getpagesize() if len(fields) > 1 else 0


def _family(pid: int) -> list[int]:
    """The process and what it started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _read(int(entry.name), "stat").rpartition(")")[2].split()
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found
