"""What PyTorch's out-of-memory text says, and what follows from it; numbers of public logs."""

from __future__ import annotations

import pytest

from diag.facts.model import Fact, Facts
from diag.facts.torch_oom import oom_lines, read_oom, read_ooms
from diag.terms import Origin
from diag.units import GIB, MIB


def oom(line=10, rank=None, others=(), **parts):
    """Facts of one text; sizes in GiB."""
    found = {
        f"oom.{name}": (
            Fact(name=f"oom.{name}", value=round(size * GIB), unit="bytes", line=line, rank=rank),
        )
        for name, size in parts.items()
    }
    if others:
        found["oom.other_processes"] = tuple(
            Fact(name="oom.other_processes", value=round(size * GIB), unit="bytes", line=line)
            for size in others
        )
    return Facts(table=found)


def near(gib):
    return pytest.approx(gib * GIB, abs=0.012 * GIB)


def test_this_process_and_one_other():
    # graph capture on a shared 80 GB card
    reading = read_oom(
        oom(
            tried=0.1094,
            total=79.19,
            free=0.0756,
            process_in_use=71.81,
            allocated=71.01,
            reserved_unallocated=0.0722,
            others=[7.29],
        ),
        10,
    )
    assert reading is not None
    assert reading.non_torch == near(0.73)
    assert reading.others == near(7.29)
    assert reading.fragmented is False
    assert reading.free_exceeds_tried is False
    assert reading.impossible == ()


def test_others_follow_from_the_total_when_none_is_listed():
    reading = read_oom(
        oom(tried=3.74, total=80, free=3.59, process_in_use=11.44, allocated=7.08), 10
    )
    assert reading is not None
    assert reading.others == near(80 - 3.59 - 11.44)
    assert reading.non_torch is None  # what PyTorch keeps idle was not printed


def test_process_line_alone_is_this_process():
    reading = read_oom(
        oom(
            tried=1.86,
            total=21.99,
            free=0.3295,
            allocated=18.2,
            reserved_unallocated=2.26,
            others=[21.64],
        ),
        10,
    )
    assert reading is not None
    assert reading.process_in_use == near(21.64)
    assert reading.listed == ()
    assert reading.others == 0
    assert reading.non_torch == near(1.18)
    assert reading.fragmented


def test_of_two_process_lines_the_one_that_holds_the_allocation_is_ours():
    reading = read_oom(
        oom(
            tried=0.375,
            total=79.25,
            free=0.154,
            allocated=69.53,
            reserved_unallocated=0.098,
            others=[8.96, 70.13],
        ),
        10,
    )
    assert reading is not None
    assert reading.process_in_use == near(70.13)
    assert reading.others == near(8.96)


def test_a_listed_neighbour_when_this_process_is_hidden():
    reading = read_oom(
        oom(tried=1, total=80, free=0.5, allocated=50, reserved_unallocated=0.5, others=[28]), 10
    )
    assert reading is not None
    assert reading.others == near(28)
    assert reading.process_in_use == near(51.5)


def test_neither_line():
    # ROCm prints no process at all
    reading = read_oom(
        oom(tried=12.95, total=127, free=18.55, allocated=99.37, reserved_unallocated=0.119), 10
    )
    assert reading is not None
    assert reading.others is None
    assert reading.non_torch is None
    assert reading.outside_torch == near(127 - 18.55 - 99.37 - 0.119)
    assert reading.free_exceeds_tried


def test_wsl_overflow_is_unknown():
    reading = read_oom(
        oom(
            tried=0.2539,
            total=6.0,
            free=0.0,
            process_in_use=17179869184.0,
            allocated=12.43,
            reserved_unallocated=0.0524,
        ),
        10,
    )
    assert reading is not None
    assert reading.process_in_use is None
    assert set(reading.impossible) == {"oom.process_in_use", "oom.allocated"}
    assert reading.non_torch is None
    assert reading.others is None


def test_zero_bytes_in_use_is_unknown():
    reading = read_oom(
        oom(tried=3.91, total=21.98, free=0.3305, process_in_use=0, allocated=21.18), 10
    )
    assert reading is not None
    assert reading.process_in_use is None
    assert reading.impossible == ("oom.process_in_use",)


def test_old_text_prints_all_reserved():
    reading = read_oom(
        oom(tried=0.2188, total=10.73, free=0.045, allocated=9.85, reserved=9.86), 10
    )
    assert reading is not None
    assert reading.reserved_unallocated == near(0.01)


@pytest.mark.parametrize(
    ("tried", "free", "idle", "fragmented"),
    [
        (5.84, 4.54, 7.43, True),
        (1.96, 1.14, 1.76, True),  # together they would do
        (1.96, 0.10, 1.76, False),
        (1.02, 0.84, 0.02, False),
        (0.07, 0.003, 0.37, False),  # some hundred MiB idle are normal
        (2.00, 3.00, 4.00, False),  # the device had it: something else
    ],
)
def test_in_pieces_or_full(tried, free, idle, fragmented):
    reading = read_oom(
        oom(tried=tried, total=80, free=free, allocated=60, reserved_unallocated=idle), 10
    )
    assert reading is not None
    assert reading.fragmented is fragmented


def test_unknown_parts_leave_the_verdict_open():
    reading = read_oom(oom(tried=1.0), 10)
    assert reading is not None
    assert reading.fragmented is None
    assert reading.free_exceeds_tried is None


def test_texts_are_kept_apart_by_line():
    first, second = oom(line=5, tried=1, total=80), oom(line=9, tried=2, total=40)
    both = Facts(table={name: first.table[name] + second.table[name] for name in first.table})
    assert oom_lines(both) == (5, 9)
    assert [round((reading.total or 0) / GIB) for reading in read_ooms(both)] == [80, 40]
    assert read_oom(both, 9) == read_ooms(both)[1]
    assert read_oom(both, 7) is None


def test_values_that_are_no_sizes_are_ignored():
    table = {
        "oom.tried": (Fact(name="oom.tried", value="much", unit="bytes", line=3),),
        "oom.free": (Fact(name="oom.free", value=5 * MIB, unit="bytes", line=3),),
    }
    reading = read_oom(Facts(table=table), 3)
    assert reading is not None
    assert reading.tried is None
    assert reading.free == 5 * MIB


def test_a_share_that_was_derived_before_does_not_make_this_process_another_one():
    """21.99 GiB card, 0.33 free, one process of 21.64 GiB: nothing is left for others."""
    parts = {"tried": 1.86, "total": 21.99, "free": 0.33, "allocated": 18.20}
    text = oom(reserved_unallocated=2.26, others=[21.64], **parts)
    derived = Fact(
        name="oom.process_in_use",
        value=round(21.64 * GIB),
        unit="bytes",
        line=10,
        origin=Origin.DERIVED,
    )
    reading = read_oom(Facts(table={**text.table, "oom.process_in_use": (derived,)}), 10)
    assert reading is not None
    assert reading.process_in_use == near(21.64)
    assert reading.others == 0
