"""The account that one PyTorch out-of-memory text gives of a device.

In: the `oom.*` facts of one log line. Out: an `OomReading` with the shares PyTorch does not print:
memory of this process outside PyTorch, other processes, and whether the card was full or its free
memory was in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diag.terms import Origin
from diag.units import MIB

if TYPE_CHECKING:
    from diag.facts.model import Fact, Facts

_PARTS = (
    "oom.tried",
    "oom.gpu",
    "oom.total",
    "oom.free",
    "oom.process_in_use",
    "oom.other_processes",
    "oom.allocated",
    "oom.private_pools",
    "oom.reserved",
    "oom.reserved_unallocated",
    "oom.allowed",
)
_ROUNDING = 32 * MIB  # sizes are printed to a hundredth of a GiB; several of them are added here
_IDLE_IS_NORMAL = 1024 * MIB  # some hundred MiB reserved and idle are found in every process
_NEAR = 0.85  # idle memory of at least this share of the request counts as "about its size"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReading:
    """One out-of-memory text. Sizes in bytes, None when not printed or not believable.

    `impossible` names the printed parts that can't be true (more than the card, or this process
    using less than PyTorch allocated in it); they are None here. WSL2 and virtual GPUs print such
    numbers.
    """

    line: int
    rank: int | None = None
    gpu: int | None = None
    tried: int | None = None
    total: int | None = None
    free: int | None = None
    process_in_use: int | None = None
    listed: tuple[int, ...] = ()  # other processes as listed, this one left out
    allocated: int | None = None
    private_pools: int | None = None
    reserved_unallocated: int | None = None
    allowed: int | None = None
    impossible: tuple[str, ...] = ()

    @property
    def non_torch(self) -> int | None:
        """This process's memory outside PyTorch: context, NCCL, graphs' driver part, libraries."""
        if self.process_in_use is None or self.allocated is None:
            return None
        rest = self.process_in_use - self.allocated - (self.reserved_unallocated or 0)
        return rest if rest >= 0 and self.reserved_unallocated is not None else None

    @property
    def others(self) -> int | None:
        """Memory of other processes: as listed, or what total, free and this process leave."""
        if self.listed:
            return sum(self.listed)
        if self.total is None or self.free is None or self.process_in_use is None:
            return None
        rest = self.total - self.free - self.process_in_use
        return rest if rest > _ROUNDING else 0

    @property
    def outside_torch(self) -> int | None:
        """Non-PyTorch memory and other processes together, when they are not told apart."""
        if None in (self.total, self.free, self.allocated):
            return None
        total, free, allocated = (self.total or 0, self.free or 0, self.allocated or 0)
        rest = total - free - allocated - (self.reserved_unallocated or 0)
        return rest if rest >= 0 else None

    @property
    def fragmented(self) -> bool | None:
        """PyTorch holds enough idle memory for the request, but not in one piece.

        True when the idle part is about the size of the request or more, free and idle together
        would serve it, and the idle part is more than any process keeps.
        """
        if self.tried is None or self.reserved_unallocated is None:
            return None
        idle = self.reserved_unallocated
        return (
            idle >= _IDLE_IS_NORMAL
            and idle >= _NEAR * self.tried
            and idle + (self.free or 0) >= self.tried
            and not self.free_exceeds_tried
        )

    @property
    def free_exceeds_tried(self) -> bool | None:
        """The device had the memory: a limit, a race with another process, or a driver fault."""
        if self.tried is None or self.free is None:
            return None
        return self.free >= self.tried


def oom_lines(facts: Facts, *, rank: int | None = None) -> tuple[int, ...]:
    """Lines with an out-of-memory text, in log order; with `rank` only those of that rank."""
    names = ("oom.tried", "oom.total", "oom.allocated")
    found = {fact.line for name in names for fact in facts.all(name, rank=rank)}
    return tuple(sorted(line for line in found if line is not None))


def read_oom(facts: Facts, line: int) -> OomReading | None:
    """The out-of-memory text on `line`, or None when no `oom.*` fact was found there."""
    found = {name: [fact for fact in facts.all(name) if fact.line == line] for name in _PARTS}
    return _reading(line, found) if any(found.values()) else None


def read_ooms(facts: Facts) -> tuple[OomReading, ...]:
    """Every out-of-memory text, in log order; one pass over the facts."""
    by_line: dict[int, dict[str, list[Fact]]] = {}
    for name in _PARTS:
        for fact in facts.all(name):
            if fact.line is not None:
                by_line.setdefault(fact.line, {part: [] for part in _PARTS})[name].append(fact)
    return tuple(_reading(line, by_line[line]) for line in sorted(by_line))


def _reading(line: int, found: dict[str, list[Fact]]) -> OomReading:
    # A share that an earlier reading derived is derived anew: this process is in the list by then.
    found = {
        name: [fact for fact in group if fact.origin is not Origin.DERIVED]
        for name, group in found.items()
    }
    sizes = {name: _first(group) for name, group in found.items() if name != "oom.other_processes"}
    idle = sizes["oom.reserved_unallocated"]
    if idle is None and sizes["oom.reserved"] is not None and sizes["oom.allocated"] is not None:
        idle = max(0, sizes["oom.reserved"] - sizes["oom.allocated"])
    sizes["oom.reserved_unallocated"] = idle
    doubtful = _drop_impossible(sizes)
    ceiling = sizes["oom.total"]
    entries = [_size(fact) for fact in found["oom.other_processes"]]
    listed = [
        size
        for size in entries
        if size is not None and (ceiling is None or size <= ceiling + _ROUNDING)
    ]
    if len(listed) < len(entries):
        doubtful.append("oom.other_processes")
    own, others = _own_process(sizes, listed, named=bool(found["oom.process_in_use"]))
    present = next(fact for group in found.values() for fact in group)
    return OomReading(
        line=line,
        rank=present.rank,
        gpu=sizes["oom.gpu"],
        tried=sizes["oom.tried"],
        total=ceiling,
        free=sizes["oom.free"],
        process_in_use=own,
        listed=tuple(others),
        allocated=sizes["oom.allocated"],
        private_pools=sizes["oom.private_pools"],
        reserved_unallocated=sizes["oom.reserved_unallocated"],
        allowed=sizes["oom.allowed"],
        impossible=tuple(doubtful),
    )


def _drop_impossible(sizes: dict[str, int | None]) -> list[str]:
    """Set to None what exceeds the card, or is less than what lies inside it; returns the names."""
    total, dropped = sizes["oom.total"], []
    if total is not None and total <= 0:
        dropped.append("oom.total")
        total = sizes["oom.total"] = None
    for name in (
        "oom.free",
        "oom.process_in_use",
        "oom.allocated",
        "oom.reserved_unallocated",
        "oom.private_pools",
    ):
        size = sizes[name]
        if size is not None and (size < 0 or (total is not None and size > total + _ROUNDING)):
            dropped.append(name)
            sizes[name] = None
    own, allocated = sizes["oom.process_in_use"], sizes["oom.allocated"]
    if own is not None and allocated is not None and own + _ROUNDING < allocated:
        dropped.append("oom.process_in_use")
        sizes["oom.process_in_use"] = None
    return dropped


def _own_process(
    sizes: dict[str, int | None], listed: list[int], *, named: bool
) -> tuple[int | None, list[int]]:
    """This process's memory and the other processes'.

    Torch lists this process too, by a number of another PID namespace or in older releases, when it
    prints no "this process": it is then the smallest entry that can hold what PyTorch allocated.
    """
    own = sizes["oom.process_in_use"]
    if own is not None or named:
        return own, listed
    inside = (sizes["oom.allocated"] or 0) + (sizes["oom.reserved_unallocated"] or 0)
    if sizes["oom.allocated"] is None:
        return (listed[0], []) if len(listed) == 1 else (None, listed)
    total, free = sizes["oom.total"], sizes["oom.free"]
    if total is not None and free is not None and listed:
        unlisted = total - free - sum(listed)
        if unlisted + _ROUNDING >= inside > _ROUNDING:
            return max(unlisted, inside), listed
    able = sorted(size for size in listed if size + _ROUNDING >= inside)
    if not able:
        return None, listed
    rest = list(listed)
    rest.remove(able[0])
    return able[0], rest


def _first(group: list[Fact]) -> int | None:
    return next((size for fact in group if (size := _size(fact)) is not None), None)


def _size(fact: Fact) -> int | None:
    return None if isinstance(fact.value, (str, bool)) else round(fact.value)
