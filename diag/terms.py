"""The vocabulary of oomdoc as enums: what a failure is called, where it happens, how sure a number is.

Nothing here depends on anything else; every other module may import it.
"""

from __future__ import annotations

from enum import Enum


class Family(str, Enum):
    """The cause of a failure. The place where it shows is `Phase`."""

    KV_RESERVATION = "kv_reservation"
    TP_BUFFER = "tp_buffer"
    ACTIVATION_SPIKE = "activation_spike"
    ALLOCATOR_TRANSIENT = "allocator_transient"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"
    DEVICE_BASELINE = "device_baseline"
    HOST_MEMORY = "host_memory"
    COMPILE = "compile"
    LOOKALIKE = "lookalike"
    UNKNOWN = "unknown"

    @property
    def label(self) -> str:
        """The family in words, for headings."""
        return _FAMILY_TITLES[self]


_FAMILY_TITLES = {
    Family.KV_RESERVATION: "KV reservation",
    Family.TP_BUFFER: "Tensor-parallel buffer",
    Family.ACTIVATION_SPIKE: "Activation spike",
    Family.ALLOCATOR_TRANSIENT: "Allocator transient",
    Family.WEIGHTS: "Weights",
    Family.CUDA_GRAPH: "CUDA graphs",
    Family.DEVICE_BASELINE: "Device baseline",
    Family.HOST_MEMORY: "Host memory",
    Family.COMPILE: "Compile and autotune",
    Family.LOOKALIKE: "Not a memory failure",
    Family.UNKNOWN: "Unknown",
}


class Phase(str, Enum):
    """The step of vLLM's life in which something happens, in start-up order."""

    INIT_DEVICE = "init_device"
    WEIGHT_LOAD = "weight_load"
    PROFILE = "profile"
    KV_ALLOC = "kv_alloc"
    GRAPH_CAPTURE = "graph_capture"
    SAMPLER_WARMUP = "sampler_warmup"
    SERVING = "serving"
    SLEEP_WAKE = "sleep_wake"
    SHUTDOWN = "shutdown"
    HOST = "host"

    @property
    def label(self) -> str:
        """The phase in words: "while ..."."""
        return _PHASE_TITLES[self]


_PHASE_TITLES = {
    Phase.INIT_DEVICE: "while setting up the device",
    Phase.WEIGHT_LOAD: "while loading the weights",
    Phase.PROFILE: "in the profile run",
    Phase.KV_ALLOC: "while planning the KV cache",
    Phase.GRAPH_CAPTURE: "while capturing CUDA graphs",
    Phase.SAMPLER_WARMUP: "while warming up the sampler",
    Phase.SERVING: "while serving",
    Phase.SLEEP_WAKE: "while sleeping or waking up",
    Phase.SHUTDOWN: "while shutting down",
    Phase.HOST: "on the host",
}


class Outcome(str, Enum):
    """What a log is about, as a whole."""

    MEMORY_FAILURE = "memory_failure"
    OTHER_FAILURE = "other_failure"
    HEALTHY = "healthy"
    UNKNOWN = "unknown"


class Origin(str, Enum):
    """Where a number comes from."""

    LOGGED = "logged"  # printed in the log
    DERIVED = "derived"  # computed from logged numbers by a known formula
    ASSUMED = "assumed"  # a default or an estimate


class EvidenceRole(str, Enum):
    """What a quoted log line does for the diagnosis."""

    CAUSE = "cause"
    CONFIRMATION = "confirmation"
    ECHO = "echo"


class RowRole(str, Enum):
    """What a catalogue line means for the health of the server."""

    INFO = "info"  # ordinary progress; may carry facts
    STAT = "stat"  # periodic statistics; sampled, never part of the scan set
    WARNING = "warning"  # a sign that can matter; never fatal by itself
    CAUSE = "cause"  # states a failure; may be the root
    DETAIL = "detail"  # further lines of a cause (numbers, hints); never a root alone
    ECHO = "echo"  # reports that something else failed
    NOISE = "noise"  # reads like trouble and is none


class GmuVerdict(str, Enum):
    """Which way `gpu_memory_utilization` helps."""

    RAISE = "raise"
    LOWER = "lower"
    LEAVE = "leave"
    CANNOT_HELP = "cannot_help"
    NOT_ENOUGH_FACTS = "not_enough_facts"


class Safety(str, Enum):
    """What a fix does to the user's service."""

    SAFE = "safe"  # memory only
    TRADEOFF = "tradeoff"  # less context, concurrency or speed
    CHANGES_RESULTS = "changes_results"  # the model's output may differ
