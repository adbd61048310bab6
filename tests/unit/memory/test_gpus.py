"""Cards by name and by the total they report; the totals are those of public logs."""

from __future__ import annotations

import pytest

from diag.memory.gpus import all_gpus, by_capacity, by_name, candidates, describe_capacity
from diag.units import GIB


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("A100-80GB", "A100 80GB"),
        ("A100 PCIe 80 GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG 1g.5gb of A100 40GB"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG 3g.40gb of an 80 GB card"),
        ("L4", "L4 24GB"),
        ("NVIDIA L40S", "L40S 48GB"),
        ("4090", "RTX 4090 24GB"),
        ("RTX3090", "RTX 3090 24GB"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti 24GB"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "RTX 5090 Laptop 24GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 96GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("AMD Instinct MI300X OAM", "MI300X 192GB"),
        ("NVIDIA GB10", "GB10 128GB"),
        ("Ascend910B3", "Ascend 910B 64GB"),
    ],
)
def test_names(text, name):
    found = by_name(text)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("text", ["A100", "V100", "RTX 4060 Ti", "", "nothing", "x" * 5000])
def test_names_that_do_not_decide(text):
    assert by_name(text) is None


def test_open_size_gives_both():
    assert [gpu.nominal_gb for gpu in candidates("A100")] == [80, 40]


def test_a_laptop_part_is_not_the_desktop_card():
    assert by_name("NVIDIA GeForce RTX 3060 Laptop GPU") is None


@pytest.mark.parametrize(
    ("total", "words"),
    [
        (79.11, "80 GB card"),
        (79.18, "80 GB card"),
        (79.25, "80 GB card"),
        (93.09, "94 GB card"),
        (94.97, "96 GB card"),
        (139.72, "141 GB card"),
        (139.81, "141 GB card"),
        (178.35, "180 GB card"),
        (191.98, "192 GB card"),
        (39.56, "40 GB card"),
        (44.52, "48 GB card"),
        (44.56, "48 GB card"),
        (31.35, "32 GB card"),
        (21.95, "24 GB card"),
        (22.09, "24 GB card"),
        (22.36, "24 GB card"),
        (23.57, "24 GB card"),
        (23.69, "24 GB card"),
        (15.47, "16 GB card"),
        (14.62, "16 GB card"),
        (15.99, "16 GB card"),
        (10.73, "11 GB card"),
        (8.00, "8 GB card"),
        (6.00, "6 GB card"),
        (60.96, "64 GB card"),
        (119.56, "128 GB unified memory"),
        (121.69, "128 GB unified memory"),
        (55.0, "55.0 GiB device"),
    ],
)
def test_capacity_in_words(total, words):
    assert describe_capacity(round(total * GIB)) == words


def test_candidates_by_capacity():
    names = [gpu.name for gpu in by_capacity(round(79.19 * GIB))]
    assert "H100 80GB" in names
    assert "A100 80GB" in names
    assert by_capacity(round(39.5 * GIB))[-1].kind == "mig"


def test_the_table_is_sound():
    gpus = all_gpus()
    assert len(gpus) >= 60
    assert len({gpu.name for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert 0.85 * gpu.nominal_gb * GIB < gpu.low <= gpu.high <= 1.01 * gpu.nominal_gb * GIB
        assert gpu in by_capacity(gpu.typical_bytes), gpu.name


def test_every_card_is_found_by_its_own_name():
    for gpu in all_gpus():
        if gpu.kind != "mig":
            assert gpu in candidates(gpu.name), gpu.name
