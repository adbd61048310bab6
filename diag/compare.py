"""Two starts side by side: which memory term, flag, release or line of the environment differs, and what explains it.

In: the Diagnosis of a start that works and of one that does not. Out: a Comparison. A term explains the failure when
its change is at least as large as what is missing there; several do when their changes together are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from diag.facts.args import flags
from diag.facts.model import Fact, Facts, Value
from diag.facts.torch_oom import OomReading, read_ooms
from diag.memory.defaults import batch_limits, default_of
from diag.memory.eras import Era
from diag.memory.model import Sized
from diag.memory.release_changes import changes_between
from diag.memory.sizes import Setting, total_bytes
from diag.memory.start_terms import LABELS, start_terms
from diag.release import parse_release
from diag.report.compare_words import verdict
from diag.report.comparison import (
    Amount,
    Comparison,
    Explained,
    ReleaseDifference,
    SettingChange,
    Side,
    TermChange,
)
from diag.report.model import Diagnosis
from diag.terms import Family, Origin, Outcome
from diag.units import MIB

# By which sign a term's growth adds to what is missing: a budget is a sum of terms, or the pool that came of them.
_BUDGET = {
    "requested": -1,
    "weights": 1,
    "activation": 1,
    "non_torch": 1,
    "activation_and_non_torch": 1,
    "graphs": 1,
}
_POOL = {"pool": -1}
_FREE_CHECK = {"requested": 1, "before": 1}
_ROOM = {
    "total": -1,
    "before": 1,
    "weights": 1,
    "non_torch": 1,
    "captured": 1,
    "pool": 1,
    "others": 1,
}
_NEED = {"need": 1}
_ENOUGH = (Explained.BY_ONE, Explained.TOGETHER)
_LEAST = 32 * MIB  # a smaller change is no cause
_SURE = 0.98  # of what is missing: sizes are printed with two decimals

# The flags of config facts, and the terms that each has a part in.
_SETTINGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "model": ("model", ("weights", "activation", "need", "graphs")),
    "dtype": ("--dtype", ("weights", "activation", "need")),
    "quantization": ("--quantization", ("weights",)),
    "max_model_len": ("--max-model-len", ("need", "activation")),
    "kv_cache_dtype": ("--kv-cache-dtype", ("need",)),
    "block_size": ("--block-size", ("need",)),
    "gpu_memory_utilization": ("--gpu-memory-utilization", ("requested", "pool")),
    "kv_cache_memory_bytes": ("--kv-cache-memory-bytes", ("pool",)),
    "num_gpu_blocks_override": ("--num-gpu-blocks-override", ("pool",)),
    "max_num_batched_tokens": ("--max-num-batched-tokens", ("activation", "tried")),
    "max_num_seqs": ("--max-num-seqs", ("activation", "graphs", "captured", "tried")),
    "enable_chunked_prefill": ("--enable-chunked-prefill", ("activation",)),
    "limit_mm_per_prompt": ("--limit-mm-per-prompt", ("activation", "tried")),
    "enforce_eager": ("--enforce-eager", ("graphs", "captured")),
    "enable_lora": ("--enable-lora", ("weights", "activation", "graphs")),
    "speculative": ("--speculative-config", ("weights", "need", "activation", "graphs")),
    "enable_prefix_caching": ("--enable-prefix-caching", ("need",)),
    "enable_sleep_mode": ("--enable-sleep-mode", ()),
    "enable_expert_parallel": ("--enable-expert-parallel", ("weights", "activation")),
    "cpu_offload": ("--cpu-offload-gb", ("weights",)),
    "swap_space": ("--swap-space", ()),
    "kv_offloading_size": ("--kv-offloading-size", ()),
    "tensor_parallel_size": (
        "--tensor-parallel-size",
        ("weights", "need", "non_torch", "activation"),
    ),
    "pipeline_parallel_size": ("--pipeline-parallel-size", ("weights", "need", "non_torch")),
    "data_parallel_size": ("--data-parallel-size", ("non_torch", "activation")),
}
_ENVIRONMENT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "config.backend": ("platform", ()),
    "device.name": ("device", ("total", "requested")),
    "vllm.engine": ("engine", ("activation", "graphs")),
    "vllm.model_runner": ("model runner", ()),
    "config.allocator": ("PYTORCH_ALLOC_CONF", ("free",)),
    "log.ranks": ("ranks in the log", ()),
    "host.ram_total": ("host RAM", ()),
    "host.ram_available": ("free host RAM", ()),
    "host.cgroup_limit": ("memory limit of the container", ()),
}
# Settings whose growth makes their terms larger, or smaller.
_RISING = frozenset(
    "--gpu-memory-utilization --kv-cache-memory-bytes --num-gpu-blocks-override --max-model-len "
    "--max-num-batched-tokens --max-num-seqs".split()
)
_FALLING = frozenset(("--tensor-parallel-size", "--pipeline-parallel-size", "--cpu-offload-gb"))
_LISTED = 3  # config facts that show that a log lists its settings at all


def compare(good: Diagnosis, bad: Diagnosis) -> Comparison:
    """What differs between two starts, and what of it explains the failure of the second. Works on any two."""
    rank = bad.diagnosis.rank if bad.diagnosis else None
    before, after = _terms_of(good, bad, rank), _terms_of(bad, good, rank)
    missing, words, sums = _missing(bad, after)
    results = [_explain(_side_by_side(before, after, signs), missing) for signs in sums]
    terms, explained = next((item for item in results if item[1] in _ENOUGH), results[0])
    if bad.diagnosis is None:
        explained = Explained.NOT_NEEDED
    moved = {term.term: term.change or 0 for term in terms if term.explains}
    if (both := moved.get("activation_and_non_torch")) is not None:
        moved |= {"activation": both, "non_torch": both}
    settings = _marked(_settings(good, bad), moved)
    environment = _marked(_environment(good, bad), moved)
    releases = _releases(good, bad, frozenset(moved))
    return Comparison(
        good=_side(good),
        bad=_side(bad),
        explained=explained,
        verdict=verdict(
            explained,
            terms,
            missing=missing,
            words=words,
            changed=(*settings, *environment),
            releases=releases,
            other_memory=bad.diagnosis is not None
            and bad.diagnosis.family in (Family.LOOKALIKE, Family.HOST_MEMORY),
        ),
        missing_bytes=missing,
        missing=words,
        terms=terms,
        settings=settings,
        environment=environment,
        releases=releases,
        notes=_notes(good, bad),
    )


# --- terms ------------------------------------------------------------------------------------------------------


def _facts(diagnosis: Diagnosis) -> Facts:
    """The facts of a report as the arithmetic takes them."""
    table: dict[str, list[Fact]] = {}
    for item in diagnosis.facts:
        fact = Fact(
            name=item.name,
            value=item.value,
            unit=item.unit,
            line=item.line,
            rank=item.rank,
            origin=item.origin,
        )
        table.setdefault(item.name, []).append(fact)
    return Facts(table={name: tuple(found) for name, found in table.items()})


def _terms_of(diagnosis: Diagnosis, other: Diagnosis, rank: int | None) -> Mapping[str, Sized]:
    facts = _facts(diagnosis)
    letter = diagnosis.ledger.era
    setting = Setting(
        version=parse_release(diagnosis.environment.vllm_version),
        engine=diagnosis.environment.engine,
        era=Era(letter) if letter in {era.value for era in Era} else None,
        assumed_total=_card(diagnosis, other),
        assumed_gmu=diagnosis.gmu.current if diagnosis.gmu else None,
    )
    return start_terms(facts, setting, rank, _reading(diagnosis, facts))


def _card(diagnosis: Diagnosis, other: Diagnosis) -> int | None:
    """Bytes of the card for a log that does not print them: those of the other log, unless it names another card."""
    names = _facts(diagnosis).text("device.name"), _facts(other).text("device.name")
    if None in names or names[0] == names[1]:
        printed = total_bytes(_facts(other))
        if printed.value is not None and printed.origin is not Origin.ASSUMED:
            return printed.value
    return next((item.total_bytes for item in diagnosis.ledger.ranks if item.total_bytes), None)


def _reading(diagnosis: Diagnosis, facts: Facts) -> OomReading | None:
    """The out-of-memory text that the finding is about."""
    found = diagnosis.diagnosis
    if found is None or found.line is None:
        return None
    return next((item for item in read_ooms(facts) if item.line == found.line), None)


def _missing(
    bad: Diagnosis, terms: Mapping[str, Sized]
) -> tuple[int | None, str, tuple[Mapping[str, int], ...]]:
    """(bytes, in words, sums by which it may come about) of what the second start lacks."""
    found = bad.diagnosis
    subtype = "" if found is None else found.subtype

    def lack(wanted: str, there: str) -> int | None:
        one, other = terms.get(wanted), terms.get(there)
        if one is None or other is None or one.value is None or other.value is None:
            return None
        return max(0, one.value - other.value)

    if subtype == "kv.max_len_exceeds":
        sums = ({**_BUDGET, **_NEED}, {**_POOL, **_NEED})
        pinned = any(item.name == "config.kv_cache_memory_bytes" for item in bad.facts)
        return lack("need", "pool"), "for one full-length request", sums[1:] if pinned else sums
    if "tried" in terms:
        # Nothing missing means that what was free could not be used: no term's size explains that.
        return lack("tried", "free") or None, "for the request that failed", (_ROOM,)
    if subtype in ("kv.no_blocks", "weights.too_big"):
        pool = terms.get("pool")
        below = None if pool is None or pool.value is None else max(0, -pool.value)
        return below, "before the KV pool gets its first block", (_BUDGET, _POOL)
    if subtype == "kv.free_below_target":
        return lack("requested", "free_at_start"), "at the start-up check", (_FREE_CHECK,)
    return None, "", ({},)


def _side_by_side(
    before: Mapping[str, Sized], after: Mapping[str, Sized], signs: Mapping[str, int]
) -> tuple[TermChange, ...]:
    split = all("activation" in side and "non_torch" in side for side in (before, after))
    left_out = {"activation_and_non_torch"} if split else {"activation", "non_torch"}
    rows = []
    for term in (*LABELS,):
        one, other = before.get(term), after.get(term)
        if (one is None and other is None) or (
            term in left_out and (split or None in (one, other))
        ):
            continue
        change = None
        if one is not None and other is not None and None not in (one.value, other.value):
            change = (other.value or 0) - (one.value or 0)
        sign = signs.get(term)
        worse = None if sign is None or change is None else sign * change
        if (
            not split
            and term in ("activation", "non_torch")
            and "activation_and_non_torch" in signs
        ):
            worse = None  # the sum of both counts
        rows.append(
            TermChange(
                term=term,
                label=LABELS[term],
                good=_amount(one),
                bad=_amount(other),
                change=change,
                worse=worse,
            )
        )
    return tuple(rows)


def _amount(size: Sized | None) -> Amount | None:
    if size is None or size.value is None:
        return None
    return Amount(bytes=size.value, origin=size.origin, lines=size.lines)


def _explain(
    terms: tuple[TermChange, ...], missing: int | None
) -> tuple[tuple[TermChange, ...], Explained]:
    """Mark the term that covers what is missing, else the largest ones until they do together."""
    worse = [item for item in terms if item.worse is not None and item.worse >= _LEAST]
    worse.sort(key=lambda item: -(item.worse or 0))
    if missing is None or not worse:
        return terms, Explained.NO_NUMBERS
    chosen: list[TermChange] = []
    covered = 0
    for item in worse:
        chosen.append(item)
        covered += item.worse or 0
        if covered >= _SURE * missing:
            break
    names = {item.term for item in chosen}
    marked = tuple(replace(item, explains=item.term in names) for item in terms)
    if covered < _SURE * missing:
        return marked, Explained.PARTLY
    return marked, Explained.BY_ONE if len(chosen) == 1 else Explained.TOGETHER


# --- settings and environment -----------------------------------------------------------------------------------


def _settings(good: Diagnosis, bad: Diagnosis) -> tuple[SettingChange, ...]:
    """Settings that differ: printed in both, or printed in one and known by the release's default in the other."""
    one, other = _config(good), _config(bad)
    rows = []
    for name, (flag, moves) in _SETTINGS.items():
        row = _differing(
            flag, one.get(name), other.get(name), _default(good, name), _default(bad, name)
        )
        if (
            row is not None
            and (len(one) >= _LISTED or name in one)
            and (len(other) >= _LISTED or name in other)
        ):
            rows.append(replace(row, moves=moves))
    known = {flag for flag, _ in _SETTINGS.values()}
    return (*rows, *_other_words(good, bad, known))


def _config(diagnosis: Diagnosis) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    for item in _facts(diagnosis):
        name = item.name.removeprefix("config.")
        if item.name.startswith("config.") and name in _SETTINGS:
            found.setdefault(name, item)
    return found


def _default(diagnosis: Diagnosis, name: str) -> Value | None:
    """The release's default of a setting; None when that is unknown or depends on something unknown."""
    environment = diagnosis.environment
    version = parse_release(environment.vllm_version)
    if version is None:
        return None
    if name in ("max_num_batched_tokens", "max_num_seqs"):
        totals = [item.total_bytes for item in diagnosis.ledger.ranks if item.total_bytes]
        limits = batch_limits(
            version,
            environment.engine,
            total=next(iter(totals), None),
            device_name=environment.device,
        )
        if limits is None:
            return None
        return limits.tokens if name == "max_num_batched_tokens" else limits.seqs
    return _PLAIN_DEFAULTS.get(name, default_of(name, version, environment.engine))


_PLAIN_DEFAULTS: Mapping[str, Value] = {
    "enforce_eager": False,
    "enable_lora": False,
    "enable_sleep_mode": False,
    "enable_expert_parallel": False,
    "kv_cache_dtype": "auto",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "cpu_offload": 0,
}


def _differing(
    name: str,
    one: Fact | None,
    other: Fact | None,
    one_default: Value | None,
    other_default: Value | None,
) -> SettingChange | None:
    left = one.value if one is not None else one_default
    right = other.value if other is not None else other_default
    if left is None and right is None:
        return None
    if (
        left == right
        or (str(left) == "None" and right is None)
        or (left is None and str(right) == "None")
    ):
        return None
    shown = one or other
    return SettingChange(
        name=name,
        good=left,
        bad=right,
        unit=shown.unit if shown is not None else _unit(left if left is not None else right),
        good_default=one is None and left is not None,
        bad_default=other is None and right is not None,
    )


def _unit(value: Value | None) -> str:
    if isinstance(value, bool):
        return "bool"
    return "count" if isinstance(value, int) else "ratio" if isinstance(value, float) else "text"


def _other_words(good: Diagnosis, bad: Diagnosis, known: Iterable[str]) -> Iterable[SettingChange]:
    """Flags and variables of the two command lines that no fact stands for."""
    one, other = good.environment.command, bad.environment.command
    if not one or not other:
        return
    skipped = {*known, "--host", "--port", "--api-key", "--served-model-name"}
    left, right = _words(one), _words(other)
    for name in sorted({*left, *right} - skipped):
        if left.get(name) != right.get(name):
            yield SettingChange(name=name, good=left.get(name), bad=right.get(name))


def _words(command: str) -> dict[str, str]:
    """Flags and leading variables of a command line by name; secrets are not among them."""
    found = {}
    for word in command.split():
        name, equals, value = word.partition("=")
        if word.startswith("-") or not equals or not name.replace("_", "").isalnum():
            continue
        if name.isupper() and not any(part in name for part in ("KEY", "TOKEN", "SECRET", "PASSW")):
            found[name] = value
    short = {
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
    }
    for setting in flags(command):
        if setting.key != "model":
            name = short.get(setting.key, setting.key.replace("_", "-"))
            found[f"--{name}"] = setting.value
    return found


def _environment(good: Diagnosis, bad: Diagnosis) -> tuple[SettingChange, ...]:
    """Lines about machine and platform that both logs have and that differ."""
    one, other = _facts(good), _facts(bad)
    rows = []
    for fact, (name, moves) in _ENVIRONMENT.items():
        left, right = one.get(fact), other.get(fact)
        if left is None or right is None:
            continue
        row = _differing(name, left, right, None, None)
        if row is not None:
            rows.append(replace(row, moves=moves))
    versions = good.environment.vllm_version, bad.environment.vllm_version
    if versions[0] != versions[1] and None not in versions:
        rows.insert(0, SettingChange(name="vLLM", good=versions[0], bad=versions[1]))
    return tuple(rows)


def _marked(rows: Iterable[SettingChange], moved: Mapping[str, int]) -> tuple[SettingChange, ...]:
    """Rows that move a term that explains the failure, and in its direction.

    Two defaults differ by the release, not by a hand.
    """
    return tuple(
        replace(
            row,
            explains=not (row.good_default and row.bad_default)
            and any(_pushes(row, moved[term]) for term in row.moves if term in moved),
        )
        for row in rows
    )


def _pushes(row: SettingChange, change: int) -> bool:
    """Whether a setting's change can have moved a term that way; a setting without a known direction can."""
    numbers = [value for value in (row.good, row.bad) if isinstance(value, (int, float))]
    sign = -1 if row.name in _FALLING else 1 if row.name in _RISING else 0
    if sign == 0 or len(numbers) < 2:
        return True
    return sign * (numbers[1] - numbers[0]) * change > 0


def _releases(
    good: Diagnosis, bad: Diagnosis, moved: frozenset[str]
) -> tuple[ReleaseDifference, ...]:
    one, other = (parse_release(item.environment.vllm_version) for item in (good, bad))
    if one is None or other is None or one == other:
        return ()
    newer = bad if other > one else good
    aliases = moved | ({"pool"} if moved & {"requested"} else frozenset())
    return tuple(
        ReleaseDifference(
            id=change.id,
            since=change.since,
            says=change.says,
            pool=change.pool.value,
            gone=other < one,
            moves=change.terms,
            explains=bool(aliases & set(change.terms)),
        )
        for change in changes_between(one, other, newer.environment.engine)
    )


# --- words ------------------------------------------------------------------------------------------------------


def _side(diagnosis: Diagnosis) -> Side:
    source, environment, found = diagnosis.source, diagnosis.environment, diagnosis.diagnosis
    title = found.title if found is not None else diagnosis.headline
    return Side(
        name=source.name,
        attempt=source.attempt,
        attempts=source.attempts,
        outcome=diagnosis.outcome,
        vllm_version=environment.vllm_version,
        engine=environment.engine,
        model=environment.model,
        device=environment.device,
        subtype=found.subtype if found else None,
        title=f"{found.family.label}: {title}" if found else title,
    )


def _notes(good: Diagnosis, bad: Diagnosis) -> tuple[str, ...]:
    notes = []
    if good.diagnosis is not None:
        notes.append(f"The first start failed too ({good.diagnosis.subtype}).")
    elif good.outcome is not Outcome.HEALTHY:
        notes.append("The first log does not show that the start went through.")
    models = good.environment.model, bad.environment.model
    if None not in models and models[0] != models[1]:
        notes.append("The two starts load different models.")
    devices = _facts(good).text("device.name"), _facts(bad).text("device.name")
    if None not in devices and devices[0] != devices[1]:
        notes.append("The two starts run on different devices.")
    return tuple(notes)
