"""Makes the change that a fix names: a new command line where it has one, else the action, where this run controls it.

In: a fix of oomdoc and the case it is for. Out: the command and limits of the next start, with a sentence on what was
done; None when the fix is an action on something that this run did not set up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from diag.report.model import Fix
from proving.cases import GIB, MODELS, Case, Limits, Request

_MORE_MEMORY = 10 * GIB  # "the checkpoint plus 10 to 20 GiB"
_LARGE_SHM = 16 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start: the command, its limits and what is asked of it. `how` says what changed, for the report."""

    command: str
    limits: Limits
    model: str
    request: Request | None = None
    how: str = ""


def first_attempt(case: Case, port: int) -> Attempt:
    """The start that is to fail."""
    return Attempt(
        command=case.command(port), limits=case.limits, model=case.model, request=case.request
    )


def apply(fix: Fix, failed: Attempt) -> Attempt | None:
    """The next start with the fix made; None when it can't be made here."""
    if fix.command is not None:
        return replace(failed, command=fix.command, how="oomdoc's changed command")
    act = _ACTIONS.get(fix.id)
    return act(failed) if act else None


def _free_memory(failed: Attempt) -> Attempt | None:
    if failed.limits.held is None:
        return None
    done = f"ended the other process, which held {_gib(failed.limits.held)}"
    return replace(failed, limits=replace(failed.limits, held=None), how=done)


def _more_memory(failed: Attempt) -> Attempt | None:
    limits = failed.limits
    size = MODELS[failed.model].weight_bytes + _MORE_MEMORY
    if limits.resident is not None:
        done = f"raised the memory limit from {_gib(limits.resident)} to {_gib(size)}"
        return replace(failed, limits=replace(limits, resident=size), how=done)
    if limits.address_space is not None:
        done = f"raised ulimit -v from {_gib(limits.address_space)} to {_gib(size)}"
        return replace(failed, limits=replace(limits, address_space=size), how=done)
    return None


def _more_shared_memory(failed: Attempt) -> Attempt | None:
    if failed.limits.shared_memory is None:
        return None
    done = f"made /dev/shm {_gib(_LARGE_SHM)} large"
    return replace(failed, limits=replace(failed.limits, shared_memory=_LARGE_SHM), how=done)


def _own_processes(failed: Attempt) -> Attempt | None:
    if "engines.py" not in failed.command:
        return None
    command = "sh -c 'python engines.py 1 && python engines.py 2'"
    return replace(failed, command=command, how="each engine in a process of its own, in turn")


def _fewer_logprobs(failed: Attempt) -> Attempt | None:
    if failed.request is None or not failed.request.prompt_logprobs:
        return None
    tokens = failed.request.prompt_tokens // 4
    done = f"asked for prompt_logprobs of {tokens:,} tokens, not {failed.request.prompt_tokens:,}"
    return replace(failed, request=replace(failed.request, prompt_tokens=tokens), how=done)


def _smaller_checkpoint(failed: Attempt) -> Attempt | None:
    if failed.model != "heavy":
        return None
    command = failed.command.replace("models/heavy", "models/light")
    done = "a model with a quarter of the bytes, as a 4-bit checkpoint has"
    return replace(failed, command=command, model="light", how=done)


_ACTIONS: Mapping[str, Callable[[Attempt], Attempt | None]] = {
    "free_card": _free_memory,
    "more_host_memory": _more_memory,
    "shm_docker": _more_shared_memory,
    "shm_kubernetes": _more_shared_memory,
    "one_process_per_engine": _own_processes,
    "stage_batches": _fewer_logprobs,
    "smaller_weights": _smaller_checkpoint,
    "lighter_weights": _smaller_checkpoint,
}


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
