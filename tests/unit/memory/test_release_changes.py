from __future__ import annotations

import pytest
from packaging.version import Version

from diag.memory.eras import default_gpu_memory_utilization, era_of
from diag.memory.release_changes import FILE, ReleaseChanges, all_changes, changes_between
from diag.memory.start_terms import LABELS
from diag.resources import read_data
from diag.schema import validated


def test_the_file_is_right_and_names_known_terms():
    found = validated(ReleaseChanges, read_data(FILE), FILE)
    assert len({change.id for change in found.changes}) == len(found.changes)
    for change in found.changes:
        assert set(change.terms) <= set(LABELS)
        assert change.says.endswith(".")
        assert change.evidence


def test_nothing_lies_between_a_release_and_itself_or_an_unknown_one():
    assert changes_between(Version("0.21.0"), Version("0.21.0")) == ()
    assert changes_between(None, Version("0.21.0")) == ()


def test_order_does_not_matter():
    one, other = Version("0.9.0"), Version("0.20.1")
    assert changes_between(one, other) == changes_between(other, one)


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ("graphs-charged", lambda release: era_of(release, "V1").graphs_charged),
        ("default-share", lambda release: default_gpu_memory_utilization(release) == 0.92),
        ("own-budget", lambda release: not era_of(release, "V1").counts_others),
        ("nccl-before-snapshot", lambda release: not era_of(release, "V1").counts_nccl),
        ("reserved-charged", lambda release: era_of(release, "V1").value == "I"),
    ],
)
def test_changes_begin_where_the_eras_do(change, holds):
    since = Version(next(item.since for item in all_changes() if item.id == change))
    before = {"0.9.1": "0.9.0", "0.11.0": "0.10.2", "0.20.0": "0.19.1", "0.26.1": "0.26.0"}[
        str(since)
    ]
    assert holds(since)
    assert not holds(Version(before))
