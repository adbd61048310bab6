"""Healthy logs that read like failures, failures that hide, and failures that are not about GPU memory.

One or more small logs an item, written in the formats of real ones. The file names say nothing; the expectation is
in the tables here. Each false alarm that was ever seen gets a log of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.pipeline import diagnose
from diag.terms import EvidenceRole, Family, GmuVerdict, Outcome, Phase

HERE = Path(__file__).resolve().parent
GIB = 1 << 30

HEALTHY = {
    "01": "the memory summary of a good start begins like the failure",
    "02": "advice about running out of memory, given in advance",
    "03": "EngineDeadError and a forced kill after SIGTERM: a normal stop",
    "04": "requests that were turned away, with tracebacks",
    "05": "lines at ERROR level that nobody needs to mind",
    "05b": "the search for the model's files is refused by the hub's client and goes on without it",
    "06": "leaked shared memory, process group not destroyed, waiting for a broadcast block",
    "07": "a small pool, negative graph memory, a slow capture",
    "07b": "room for exactly one request of full length",
    "08": "sleeping and waking up by the dozen",
    "09": "a pool at 99 %, preemptions counted, no harm done",
}


@pytest.mark.parametrize("name", HEALTHY, ids=lambda name: f"{name}: {HEALTHY[name]}")
def test_a_healthy_log_is_called_healthy(name):
    found = diagnose(HERE / f"{name}.log")
    assert found.diagnosis is None
    assert found.outcome is Outcome.HEALTHY
    assert found.headline.startswith("Healthy start: serving since line ")
    assert found.alternatives == found.fixes == found.not_helpful == ()


FAILED = [
    # what it is about, file, outcome, acceptable (family, subtypes; none = any), phase
    ("a wake-up fails after many good ones; the server lives on", "08b", Outcome.MEMORY_FAILURE,
     Family.ALLOCATOR_TRANSIENT, {"alloc.wake_up"}, Phase.SLEEP_WAKE),
    ("the cause first, then the clean-up's own error", "11", Outcome.MEMORY_FAILURE,
     Family.KV_RESERVATION, {"kv.max_len_exceeds"}, Phase.KV_ALLOC),
    ("one incident said four times", "12", Outcome.MEMORY_FAILURE,
     Family.KV_RESERVATION, {"kv.no_blocks"}, Phase.KV_ALLOC),
    ("the driver's words, during capture", "13", Outcome.MEMORY_FAILURE,
     Family.CUDA_GRAPH, {"graph.capture_oom"}, Phase.GRAPH_CAPTURE),
    ("Neuron's words", "13b", Outcome.MEMORY_FAILURE, Family.WEIGHTS, set(), Phase.WEIGHT_LOAD),
    ("a notebook's words, without `torch.`", "13c", Outcome.MEMORY_FAILURE,
     Family.ACTIVATION_SPIKE, {"act.prefill"}, Phase.SERVING),
    ("ROCm's words", "13d", Outcome.MEMORY_FAILURE, Family.WEIGHTS, {"weights.too_big"}, Phase.WEIGHT_LOAD),
    ("the RAM of a Ray node", "14", Outcome.MEMORY_FAILURE, Family.HOST_MEMORY, {"host.oom_killed"}, Phase.HOST),
    ("pinned host memory, in the driver's words", "14b", Outcome.MEMORY_FAILURE,
     Family.HOST_MEMORY, {"host.pinned_offload"}, None),
    ("on-chip memory of a TPU", "14c", Outcome.OTHER_FAILURE,
     Family.LOOKALIKE, {"look.triton_smem", "look.other"}, None),
    ("an address out of bounds", "14d", Outcome.OTHER_FAILURE,
     Family.LOOKALIKE, {"look.other", "look.illegal_access"}, None),
    ("Ray's list of possible causes proves none of them", "14e", Outcome.UNKNOWN, Family.UNKNOWN, {"unknown"}, None),
    ("killed by vLLM itself after a fatal signal", "15", Outcome.OTHER_FAILURE, Family.LOOKALIKE, {"look.other"}, None),
    ("exit code -15 is a consequence", "15b", Outcome.OTHER_FAILURE, Family.LOOKALIKE, {"look.other"}, None),
    ("Ctrl-C during the profile run", "16", Outcome.OTHER_FAILURE, Family.LOOKALIKE, {"look.other"}, None),
    ("a shape error as KV tensors are made", "17", Outcome.OTHER_FAILURE, Family.LOOKALIKE, {"look.other"}, None),
    ("an assertion during capture", "17b", Outcome.OTHER_FAILURE, Family.LOOKALIKE, {"look.other"}, None),
    ("numbers that can't be", "18", Outcome.MEMORY_FAILURE, Family.WEIGHTS, {"weights.too_big"}, Phase.WEIGHT_LOAD),
    ("short by 0.01 GiB", "19", Outcome.MEMORY_FAILURE,
     Family.KV_RESERVATION, {"kv.free_below_target"}, Phase.INIT_DEVICE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "outcome", "family", "subtypes", "phase"),
    [pytest.param(*row, id=f"{row[0]}: {about}") for about, *row in FAILED],
)
def test_a_failure_is_what_it_is(name, outcome, family, subtypes, phase):
    found = diagnose(HERE / f"{name}.log")
    assert found.outcome is outcome
    assert found.diagnosis.family is family
    assert found.diagnosis.subtype in (subtypes or {found.diagnosis.subtype})
    assert phase is None or found.diagnosis.phase is phase


@pytest.mark.parametrize("name", ["10", "10b"])
def test_a_log_that_just_ends_is_not_called_healthy_and_nothing_is_claimed(name):
    found = diagnose(HERE / f"{name}.log")
    assert found.outcome is not Outcome.HEALTHY
    assert found.outcome is not Outcome.OTHER_FAILURE
    assert found.diagnosis is None or found.diagnosis.confidence < 0.6
    assert found.next_steps


def test_the_quoted_cause_is_the_first_error_and_the_later_one_an_echo():
    found = diagnose(HERE / "11.log").diagnosis
    roles = {item.role: item.text for item in found.evidence}
    assert "max seq len (65536)" in roles[EvidenceRole.CAUSE]
    texts = [item.text for item in found.evidence if item.role is EvidenceRole.ECHO]
    assert any("Engine core initialization failed" in text for text in texts)
    assert not any(
        "ensure_kv_transfer_shutdown" in item.text and item.role is EvidenceRole.CAUSE
        for item in found.evidence
    )


def test_an_incident_is_counted_once():
    found = diagnose(HERE / "12.log")
    causes = [item for item in found.diagnosis.evidence if item.role is EvidenceRole.CAUSE]
    assert len(causes) == 1
    assert (found.source.attempts, found.source.attempts_failed) == (1, 1)


@pytest.mark.parametrize("name", ["14", "14b", "14c", "14d", "15", "16", "17"])
def test_where_the_gpu_is_not_short_no_share_of_it_is_advised(name):
    found = diagnose(HERE / f"{name}.log")
    assert found.gmu.verdict in {
        GmuVerdict.LEAVE,
        GmuVerdict.CANNOT_HELP,
        GmuVerdict.NOT_ENOUGH_FACTS,
    }


def test_the_word_that_ended_it_is_the_interrupt():
    assert "KeyboardInterrupt" in diagnose(HERE / "16.log").headline


def test_an_impossible_number_is_in_no_sum():
    """The card has 6 GiB; "17179869184.00 GiB in use" is a negative count, and 12.43 GiB allocated is WSL's paging."""
    found = diagnose(HERE / "18.log")
    for rank in found.ledger.ranks:
        for entry in rank.entries:
            assert entry.bytes is None or abs(entry.bytes) < 64 * GIB, entry
    assert "17,179,869,184" not in found.diagnosis.summary


def test_a_hundredth_of_a_gib_is_named():
    found = diagnose(HERE / "19.log")
    assert found.gmu.verdict is GmuVerdict.LOWER
    shortfall = next(fact for fact in found.facts if fact.name == "device.shortfall")
    assert shortfall.value == round(13.59 * GIB) - round(13.58 * GIB)


def test_every_log_has_its_expectation():
    named = {*HEALTHY, *(row[1] for row in FAILED), "10", "10b"}
    assert named == {path.stem for path in HERE.glob("*.log")}
