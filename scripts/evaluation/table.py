"""Scores as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from evaluation.score import Miss, Score, Share

_SHORT = {
    "kv_reservation": "kv",
    "tp_buffer": "tp",
    "activation_spike": "act",
    "allocator_transient": "alloc",
    "cuda_graph": "graph",
    "device_baseline": "base",
    "host_memory": "host",
    "lookalike": "look",
}


def share(value: Share) -> str:
    """`90.6 % (115/127)`."""
    return "-" if value.rate is None else f"{100 * value.rate:5.1f} % ({value.right}/{value.total})"


def summary(scores: Mapping[str, Score]) -> str:
    """One row a run: the headline figures."""
    rows = [
        (
            "run", "cases", "family", "subtype", "macro-F1", "direction", "wrong", "needless",
            "false alarms", "crashes", "s",
        )
    ]  # fmt: skip
    for name, found in scores.items():
        rows.append(
            (
                name,
                str(found.cases),
                share(found.family),
                share(found.subtype),
                "-" if found.macro_f1 is None else f"{found.macro_f1:.3f}",
                share(found.direction),
                str(found.wrong_direction) if found.direction.total else "-",
                str(found.needless_direction) if found.direction.total else "-",
                f"{found.false_alarms}/{found.healthy}" if found.healthy else "-",
                str(found.crashes),
                f"{found.seconds:.1f}",
            )
        )
    return grid(rows)


def details(name: str, found: Score) -> Iterator[str]:
    """Families, subtypes, confusions, directions and facts of one run."""
    yield f"\n{name}: by family"
    yield grid([(family, share(value)) for family, value in sorted(found.by_family.items())])
    yield f"\n{name}: subtypes with a miss"
    missed = [(s, share(v)) for s, v in sorted(found.by_subtype.items()) if v.right < v.total]
    yield grid(missed) if missed else "  none"
    yield f"\n{name}: undisputed cases, truth (rows) and answer (columns)"
    yield confusion(found.confusion)
    if found.directions:
        yield f"\n{name}: gpu_memory_utilization, truth (rows) and answer (columns)"
        yield confusion(found.directions)
    if found.healthy:
        yield (
            f"\n{name}: {found.called_healthy} of {found.healthy} healthy logs called healthy, "
            f"{found.false_alarms} false alarms; {found.missed_failures} failures called healthy"
        )
    if sum(found.facts.values()):
        counts = ", ".join(f"{count} {verdict}" for verdict, count in found.facts.items())
        yield f"{name}: facts {counts}"


def confusion(table: Mapping[str, Mapping[str, int]]) -> str:
    """Counts as a grid; zeros as dots."""
    columns = sorted({said for row in table.values() for said in row})
    rows = [("", *(_SHORT.get(name, name) for name in columns))]
    rows += [
        (truth, *(str(row.get(said, ".")) for said in columns))
        for truth, row in sorted(table.items())
    ]
    return grid(rows)


def failures(name: str, misses: Sequence[Miss]) -> Iterator[str]:
    """One line a case that is off in class or direction."""
    yield f"\n{name}: cases that are off"
    for miss in misses:
        said, case = miss.prediction, miss.case
        if not (miss.wrong_family or miss.wrong_subtype or miss.wrong_gmu):
            continue
        mark = "F" if miss.wrong_family else "s" if miss.wrong_subtype else "-"
        gmu = f"gmu {case.gmu} -> {said.gmu}" if miss.wrong_gmu else ""
        disputed = "" if case.agreed else " (disputed)"
        yield f"  {mark} {case.id:42} {case.label[1]:24} -> {said.reading[1]:24} {gmu}{disputed}"
        if said.error:
            yield "      " + said.error.strip().replace("\n", "\n      ")


def fact_misses(name: str, misses: Sequence[Miss]) -> Iterator[str]:
    """One line a fact that is wrong or missing."""
    yield f"\n{name}: facts that are off"
    for miss in misses:
        for check in miss.facts:
            yield (
                f"  {check.verdict:8} {miss.case.id:42} {check.name:30} "
                f"label {check.expected[:60]}; printed {check.got[:80] or '-'}"
            )


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
