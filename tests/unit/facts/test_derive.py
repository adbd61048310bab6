"""Values that follow from printed ones by subtraction, each at the line of the text it was read from."""

from __future__ import annotations

import pytest
from log_samples import GIB, MAX_LEN, MIB, NO_BLOCKS, OOM, STATS, core, facts_of, planned, start

from diag.terms import Origin

FREE_BELOW = (
    "ValueError: Free memory on device cuda:0 (17.86/23.52 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 21.17 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


def gib(number: float) -> int:
    return round(number * GIB)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (MAX_LEN, "kv.shortfall", gib(15.00) - gib(13.62)),
        (FREE_BELOW, "device.shortfall", gib(21.17) - gib(17.86)),
        (FREE_BELOW, "device.taken_at_start", gib(23.52) - gib(17.86)),
        (OOM, "oom.short", gib(0) + 432 * MIB - round(218.94 * MIB)),
        (OOM, "oom.non_torch", gib(44.17) - gib(43.11) - round(305.03 * MIB)),
    ],
)
def test_a_difference(text, name, value):
    (fact,) = facts_of(core(text) + "\n").all(name)
    assert fact.value == value
    assert (fact.origin, fact.line, fact.unit) == (Origin.DERIVED, 1, "bytes")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (OOM, "oom.fragmented", False),  # 305 MiB idle, 432 MiB asked for
        (OOM.replace("305.03 MiB", "2.50 GiB"), "oom.fragmented", True),
        (OOM, "oom.free_exceeds_tried", False),
        (OOM.replace("432.00", "32.00"), "oom.free_exceeds_tried", True),
    ],
)
def test_a_truth_value(text, name, value):
    assert facts_of(core(text) + "\n").flag(name) is value


def test_shares_of_the_device():
    facts = facts_of(core(OOM) + "\n")
    assert facts.number("oom.tried_share") == pytest.approx(432 / 1024 / 44.39)
    assert facts.number("oom.allocated_share") == pytest.approx(43.11 / 44.39)
    assert facts.number("oom.idle_share") == pytest.approx(305.03 / 432)


def test_a_missing_part_gives_no_fact():
    bare = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 432.00 MiB."
    facts = facts_of(core(bare) + "\n")
    assert facts.size("oom.tried") == 432 * MIB
    for name in ("oom.short", "oom.non_torch", "oom.fragmented", "oom.tried_share", "oom.others"):
        assert facts.all(name) == (), name
    assert facts_of(core(NO_BLOCKS) + "\n").all("kv.shortfall") == ()


def test_a_device_of_no_size_gives_no_share():
    facts = facts_of(core(OOM.replace("44.39 GiB", "0 GiB")) + "\n")
    assert facts.number("oom.tried_share") is None


def test_two_texts_stay_apart():
    facts = facts_of(f"{core(OOM)}\n{core(OOM.replace('432.00 MiB', '2.00 GiB'))}\n")
    short = facts.all("oom.short")
    assert [(fact.line, fact.value) for fact in short] == [
        (1, 432 * MIB - round(218.94 * MIB)),
        (2, 2 * GIB - round(218.94 * MIB)),
    ]


def test_growth_is_counted_from_the_first_text_of_a_rank():
    later = OOM.replace("43.11 GiB is allocated", "43.61 GiB is allocated")
    facts = facts_of(f"{core(OOM)}\n{core(later)}\n")
    (growth,) = facts.all("oom.growth")
    assert (growth.value, growth.line) == (gib(43.61) - gib(43.11), 2)


def test_texts_of_two_ranks_are_no_growth():
    text = "".join(
        f"(Worker_TP{rank} pid={rank + 9}) ERROR 01-09 11:21:34 [x.py:1] {oom}\n"
        for rank, oom in ((0, OOM), (1, OOM.replace("43.11", "43.61").replace("GPU 0", "GPU 1")))
    )
    assert facts_of(text).all("oom.growth") == ()


def test_weights_above_the_requested_memory():
    """No KV budget can be left: 15.2683 GiB of weights, 0.5 of 23.52 GiB requested."""
    text = (
        core("ValueError: Free memory on device cuda:0 (17.86/23.52 GiB) on startup is less than desired GPU memory "
             "utilization (0.5, 11.76 GiB).")
        + "\n" + core("Model loading took 15.2683 GiB memory and 10.84 seconds", "INFO", "gpu_model_runner.py:3659")
    )  # fmt: skip
    (over,) = facts_of(text + "\n").all("weights.over_budget")
    assert over.value == gib(15.2683) - gib(11.76)


@pytest.mark.parametrize(
    ("running", "waiting", "usage", "bound"),
    [
        (4, 9, 96.0, True),  # 4.84 fit at full length
        (5, 9, 96.0, True),
        (12, 40, 96.0, False),  # more run than fit at full length: requests are short
        (4, 1, 96.0, False),  # hardly anybody waits
        (4, 9, 30.0, False),  # the pool is empty; something else limits
        (0, 9, 96.0, False),
    ],
)
def test_a_pool_that_limits_the_server(running, waiting, usage, bound):
    stats = STATS.format(running=running, waiting=waiting, usage=usage)
    facts = facts_of(f"{start()}\n{planned()}\n{stats}\n")
    assert facts.flag("serving.pool_bound") is (True if bound else None)
