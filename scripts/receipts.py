#!/usr/bin/env python3
"""Predicted against logged, term by term: how good `oomdoc plan` is.

    python scripts/receipts.py FOLDER... [--json OUT] [--verbose]

FOLDER holds logs (*.log, or *.json with a "log"). Every CUDA log whose model is in the built-in table gives one
receipt: its settings are read from the log, the plan is computed without the logged sizes, each term is compared.
Estimated terms are also scaled: the factor is fitted on one half of the logs (by name) and tested on the other. With
`hf-mem` installed its offline KV formula is compared too. Exit code 0, or 2 when no log can be used.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diag.errors import OomdocError
from diag.memory import estimates
from diag.memory.defaults import batch_limits
from diag.memory.eras import Era, default_engine, era_of
from diag.memory.find_shape import from_table
from diag.memory.kv_layout import kv_layout
from diag.memory.plan_model import Deployment, Plan
from diag.memory.predict import KEPT_BESIDE_WEIGHTS, predict
from diag.memory.quantization import named
from diag.memory.shapes import ModelShape
from diag.pipeline import diagnose
from diag.release import parse_release
from diag.units import GIB

ESTIMATED = ("weights", "peak_activation", "non_torch", "cuda_graphs", "kv_pool")
NOTES = (
    (
        "kv_tokens and max_concurrency are computed from the logged budget, printed to 0.01 GiB: "
        "0 percent means that the logged number lies within that rounding."
    ),
    (
        "The shipped constants were chosen by looking at these logs; only the factors of held_out "
        "are fitted on one half and tested on the other."
    ),
)
_ASSUMED_TOTAL = 80 * GIB  # where no total is logged: it does not enter the terms compared then
_NOT_CUDA = re.compile(rb"platform (?:rocm|npu|tpu|cpu)|\[rocm\.py|AMD[_ ]Instinct|on ROCm")
_ROUNDING = 0.005 * GIB  # sizes are printed to a hundredth of a GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One log: term -> (predicted, logged) in the term's own unit."""

    name: str
    model: str
    version: str
    tp: int = 1
    terms: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def fits_half(self) -> bool:
        """Which half of the logs it belongs to: stable, and blind to what is in it."""
        return zlib.crc32(self.name.encode()) % 2 == 0


@dataclass(slots=True)
class Logged:
    """What a log says of itself: settings and sizes."""

    facts: dict[str, list[Any]]

    def first(self, name: str) -> Any:
        """The value printed first, or None."""
        found = self.facts.get(name)
        return found[0] if found else None

    def least(self, name: str) -> float | None:
        """The smallest of all ranks, or None."""
        found = [value for value in self.facts.get(name, []) if isinstance(value, (int, float))]
        return min(found) if found else None

    def most(self, name: str) -> float | None:
        """The largest of all ranks, or None."""
        found = [value for value in self.facts.get(name, []) if isinstance(value, (int, float))]
        return max(found) if found else None


def logs_in(folders: Sequence[Path]) -> Iterator[tuple[str, str | Path]]:
    """Names and logs below the folders, those of other accelerators left out."""
    for folder in folders:
        for path in sorted(folder.rglob("*.log")):
            if not _NOT_CUDA.search(path.read_bytes()):
                yield path.name, path
        for path in sorted(folder.rglob("*.json")):
            try:
                body = json.loads(path.read_text("utf-8"))
            except ValueError:
                continue
            text = body.get("log") if isinstance(body, dict) else None
            if isinstance(text, str) and not _NOT_CUDA.search(text.encode()):
                yield path.name, text + "\n"


def read_log(source: str | Path) -> Logged:
    """The facts of one log's last attempt."""
    diagnosis = diagnose(source, name="log")
    facts: dict[str, list[Any]] = defaultdict(list)
    for fact in diagnosis.facts:
        facts[fact.name].append(fact.value)
    facts["engine"].append(diagnosis.environment.engine)
    facts["version"].append(diagnosis.environment.vllm_version)
    return Logged(facts)


def shape_of(logged: Logged) -> ModelShape | None:
    """The shape of the log's model, with the quantisation it was loaded with."""
    shape = from_table(str(logged.first("config.model") or ""))
    if shape is None:
        return None
    asked = logged.first("config.quantization")
    if shape.quantization is None and asked not in (None, "None", ""):
        shape = replace(shape, quantization=named(str(asked)))
        if shape.quantization is None:
            return None
    return shape


def deployment_of(logged: Logged, shape: ModelShape) -> Deployment | None:
    """The deployment by the log's settings, defaults by its release; None when they are not known."""
    version = parse_release(logged.first("version"))
    engine = logged.first("engine") or default_engine(version) or "V1"
    era = era_of(version, engine)
    total = logged.most("device.total") or logged.most("oom.total")
    limits = batch_limits(version, engine, total=total and round(total))
    length = logged.first("config.max_model_len")
    step = logged.first("config.max_num_batched_tokens") or (limits.tokens if limits else None)
    seqs = logged.first("config.max_num_seqs") or (limits.seqs if limits else None)
    if seqs is None and engine == "V1" and step:
        seqs = 1024 if step >= 8192 else 256  # the two defaults go together
    if engine == "V0" and step is None and length:
        step = max(length, 2048)
    if seqs is None and engine == "V0":
        seqs = 256
    return Deployment(
        version=version,
        engine=engine,
        era=era or Era.I,
        total=round(total) if total else _ASSUMED_TOTAL,
        gpu_name="log",
        tp=logged.first("config.tensor_parallel_size") or 1,
        pp=logged.first("config.pipeline_parallel_size") or 1,
        gmu=logged.first("config.gpu_memory_utilization") or 0.9,
        length=length or shape.context,
        step=step or 2048,
        seqs=min(seqs or 256, step or 2048),
        dtype=logged.first("config.dtype"),
        kv_dtype=logged.first("config.kv_cache_dtype"),
        quantization=shape.quantization,
        block_size=logged.first("config.block_size"),
        eager=bool(logged.first("config.enforce_eager")),
        language_only=_no_images(logged),
    )


def _no_images(logged: Logged) -> bool:
    """Whether no image or video is allowed: the vision tower is then not loaded."""
    limits = re.findall(r"(?:image|video)\W+(\d+)", str(logged.first("config.limit_mm_per_prompt")))
    return bool(limits) and not any(map(int, limits))


def receipt(name: str, logged: Logged) -> Receipt | None:
    """Every term that both sides know; None when the model or the settings are not known."""
    shape = shape_of(logged)
    if shape is None or logged.first("config.backend") not in (None, "cuda"):
        return None
    deployment = deployment_of(logged, shape)
    if deployment is None:
        return None
    try:
        plan = predict(shape, deployment)
    except OomdocError:
        return None
    terms = {**_sizes(logged, plan, deployment.era), **_cache(logged, shape, deployment)}
    if not terms:
        return None
    return Receipt(
        name=name,
        model=shape.name,
        version=str(logged.first("version")),
        tp=deployment.tp,
        terms=terms,
    )


def _sizes(logged: Logged, plan: Plan, era: Era) -> dict[str, tuple[float, float]]:
    pairs = {
        "weights": ("weights", logged.most("weights.memory")),
        "peak_activation": ("peak_activation", logged.most("profile.peak_activation")),
        "non_torch": ("non_torch", logged.most("profile.non_torch")),
        "cuda_graphs": ("cuda_graphs", logged.most("graph.memory")),
    }
    found: dict[str, tuple[float, float]] = {}
    for name, (term, size) in pairs.items():
        predicted = plan.term(term)
        if predicted is not None and size is not None and size > 0:
            found[name] = (predicted.bytes / GIB, size / GIB)
    pool = logged.least("profile.available_kv_cache")
    total = logged.most("device.total")
    if pool and total and plan.pool and plan.pool.bytes > 0:
        found["kv_pool"] = (plan.pool.bytes / GIB, pool / GIB)
    summed = _sum_of_logged(logged, era)
    if pool and summed:
        found["kv_pool_of_logged_terms"] = (summed / GIB, pool / GIB)
    return found


def _sum_of_logged(logged: Logged, era: Era) -> float | None:
    """What the budget formula leaves for the pool when every other term is the log's own; None without them."""
    terms = ("weights.memory", "profile.peak_activation", "profile.non_torch")
    requested, parts = logged.most("device.requested"), [logged.most(name) for name in terms]
    if requested is None and (total := logged.most("device.total")):
        requested = total * (logged.first("config.gpu_memory_utilization") or 0) or None
    if requested is None or None in parts:
        return None
    charged = logged.most("profile.graph_estimate") if era.graphs_charged else None
    return requested - sum(part or 0 for part in parts) - (charged or 0)


def _cache(
    logged: Logged, shape: ModelShape, deployment: Deployment
) -> dict[str, tuple[float, float]]:
    """Tokens and concurrency of the logged budget: exact but for the rounding of the budget's print."""
    budget, tokens = logged.least("profile.available_kv_cache"), logged.least("kv.pool_tokens")
    if tokens is None and (blocks := logged.least("kv.gpu_blocks")):
        tokens = blocks * (deployment.block_size or 16)
    layout = kv_layout(
        shape,
        version=deployment.version,
        engine=deployment.engine,
        kv_dtype=deployment.kv_dtype,
        dtype=deployment.dtype,
        tp=deployment.tp,
        pp=deployment.pp,
        block_size=deployment.block_size,
        step=deployment.step,
    )
    found: dict[str, tuple[float, float]] = {}
    if layout is None or not deployment.length:
        return found
    needed, asked = logged.most("kv.needed"), logged.most("kv.asked_len")
    if needed and asked:
        found["kv_needed"] = (layout.request_bytes(round(asked)) / GIB, needed / GIB)
    if not budget or budget <= 0:
        return found
    if tokens:
        found["kv_tokens"] = _nearest(layout, budget, deployment.length, tokens)
        found["kv_bytes_per_token"] = (
            layout.block_bytes * max(1, len(layout.groups)) / layout.block_size,
            budget / tokens,
        )
    concurrency = logged.least("kv.max_concurrency")
    if concurrency:
        low = layout.concurrency(round(budget - _ROUNDING), deployment.length)
        high = layout.concurrency(round(budget + _ROUNDING), deployment.length)
        found["max_concurrency"] = (min(max(concurrency, low), high), concurrency)
    return found


def _nearest(layout: Any, budget: float, length: int, tokens: float) -> tuple[float, float]:
    """The predicted count nearest to the logged one that the budget's rounding allows."""
    low = layout.tokens(round(budget - _ROUNDING), length)
    high = layout.tokens(round(budget + _ROUNDING), length)
    return min(max(tokens, low), high), tokens


# --- the table ---------------------------------------------------------------------------------------------------


def summary(receipts: Sequence[Receipt]) -> dict[str, dict[str, Any]]:
    """By term: count, mean and worst absolute error in percent, mean signed error."""
    errors: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for item in receipts:
        for term, (predicted, logged) in item.terms.items():
            errors[term].append((100 * (predicted / logged - 1), item.name))
    return {term: _row(found) for term, found in sorted(errors.items())}


def _row(found: Sequence[tuple[float, str]]) -> dict[str, Any]:
    worst = max(found, key=lambda pair: abs(pair[0]))
    return {
        "logs": len(found),
        "mean_abs_pct": round(statistics.fmean(abs(error) for error, _ in found), 2),
        "median_abs_pct": round(statistics.median(abs(error) for error, _ in found), 2),
        "mean_pct": round(statistics.fmean(error for error, _ in found), 2),
        "worst_pct": round(worst[0], 2),
        "worst_log": worst[1],
    }


def held_out(receipts: Sequence[Receipt]) -> dict[str, dict[str, Any]]:
    """Estimated terms with a factor fitted on one half of the logs, tested on the other."""
    result: dict[str, dict[str, Any]] = {}
    for term in ESTIMATED:
        pairs = [(item.fits_half, *item.terms[term]) for item in receipts if term in item.terms]
        fit = [logged / predicted for half, predicted, logged in pairs if half and predicted > 0]
        test = [(predicted, logged) for half, predicted, logged in pairs if not half]
        if not fit or not test:
            continue
        factor = statistics.median(fit)
        errors = [abs(100 * (predicted * factor / logged - 1)) for predicted, logged in test]
        plain = [abs(100 * (predicted / logged - 1)) for predicted, logged in test]
        result[term] = {
            "fitted_on": len(fit),
            "tested_on": len(test),
            "factor": round(factor, 4),
            "mean_abs_pct": round(statistics.fmean(errors), 2),
            "worst_abs_pct": round(max(errors), 2),
            "mean_abs_pct_shipped": round(statistics.fmean(plain), 2),
        }
    return result


def hf_mem(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """hf-mem's offline KV formula on the same logs; its weights need the hub and are not compared."""
    try:
        from hf_mem import __version__
        from hf_mem.safetensors import compute_safetensors_kv_cache_size
    except ImportError:
        return {"compared": False, "why": "hf-mem is not installed"}
    from diag.memory.find_shape import known_model

    rows: dict[str, tuple[float, float]] = {}
    for item in receipts:
        if "kv_bytes_per_token" not in item.terms or item.tp > 1:
            continue
        known = known_model(item.model)
        if known is None or not known.config.get("num_key_value_heads"):
            continue
        try:
            size = compute_safetensors_kv_cache_size(dict(known.config), "BF16", 4096, 1)
        except Exception as error:  # noqa: BLE001 - another project on configs it may not know
            print(f"hf-mem: {item.model}: {error!r}", file=sys.stderr)
            continue
        rows[item.name] = (size / 4096, item.terms["kv_bytes_per_token"][1])
    errors = [(100 * (mine / logged - 1), name) for name, (mine, logged) in rows.items()]
    return {
        "compared": bool(errors),
        "version": __version__,
        "weights": "not compared: hf-mem reads them from the hub only",
        "note": "logs of one rank with a plain 16-bit cache: it has no tensor parallelism",
        **({"kv_bytes_per_token": _row(errors)} if errors else {}),
    }


def show(name: str, table: dict[str, dict[str, Any]]) -> None:
    """Print one table."""
    print(f"\n{name}")
    for term, row in table.items():
        cells = "  ".join(f"{key} {value}" for key, value in row.items())
        print(f"  {term:20s} {cells}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run over the folders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(argv)
    receipts: list[Receipt] = []
    seen = 0
    for name, source in logs_in(options.folders):
        seen += 1
        try:
            found = receipt(name, read_log(source))
        except OomdocError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if found is not None:
            receipts.append(found)
    if not receipts:
        print("no log with a known model", file=sys.stderr)
        return 2
    document = {
        "schema_version": 1,
        "logs_read": seen,
        "logs_used": len(receipts),
        "constants": {
            "kept_beside_weights": KEPT_BESIDE_WEIGHTS,
            "native_sampler_bytes": estimates.NATIVE_SAMPLER_BYTES,
            "graph_bytes": estimates.GRAPH_BYTES,
        },
        "notes": NOTES,
        "terms": summary(receipts),
        "held_out": held_out(receipts),
        "hf_mem": hf_mem(receipts),
    }
    print(f"{len(receipts)} of {seen} logs used")
    show("predicted against logged, percent", document["terms"])
    show("factor fitted on one half, tested on the other", document["held_out"])
    print(f"\nhf-mem: {json.dumps(document['hf_mem'])}")
    if options.verbose:
        for item in receipts:
            for term, (predicted, logged) in item.terms.items():
                error = 100 * (predicted / logged - 1)
                sizes = f"{predicted:14.3f} {logged:14.3f} {error:+8.2f} %"
                print(
                    f"{item.name:18s} {item.version:16.16s} {item.model[-36:]:36s} {term:20s} {sizes}"
                )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
