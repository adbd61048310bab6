"""Diagnosis objects for the renderers' tests: one of each kind, numbers as a real log would give them."""

from __future__ import annotations

from dataclasses import replace

from diag.report.model import (
    Alternative,
    Change,
    Diagnosis,
    Environment,
    Evidence,
    FactOut,
    Finding,
    Fix,
    GmuAdvice,
    KnownBug,
    Ledger,
    LedgerEntry,
    NotHelpful,
    RankLedger,
    Related,
    SourceInfo,
)
from diag.terms import EvidenceRole, Family, GmuVerdict, Origin, Outcome, Phase, Safety

GIB = 2**30


def gib(number: float) -> int:
    """GiB as whole bytes."""
    return round(number * GIB)


def kv_max_len() -> Diagnosis:
    """One request of 40,960 tokens does not fit; ledger, three computed fixes and more behind --all."""
    evidence = (
        Evidence(
            line=201,
            text="INFO 05-02 10:11:12 [gpu_worker.py:298] Available KV cache memory: 6.10 GiB",
            role=EvidenceRole.CONFIRMATION,
        ),
        Evidence(
            line=214,
            text="ValueError: To serve at least one request with the models's max seq len (40960), "
            "(10.00 GiB KV cache is needed, which is larger than the available KV cache memory (6.10 GiB). "
            "Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
            role=EvidenceRole.CAUSE,
        ),
        Evidence(
            line=260,
            text="RuntimeError: Engine core initialization failed. See root cause above.",
            role=EvidenceRole.ECHO,
        ),
    )
    finding = Finding(
        family=Family.KV_RESERVATION,
        subtype="kv.max_len_exceeds",
        phase=Phase.KV_ALLOC,
        rank=0,
        confidence=0.98,
        title="one request does not fit the KV pool",
        summary="One request of 40,960 tokens needs 10.00 GiB of KV cache; 6.10 GiB are left after weights and "
        "peak activation. Missing: 3.90 GiB.",
        line=214,
        evidence=evidence,
    )
    return Diagnosis(
        source=SourceInfo(
            name="vllm.log",
            lines=272,
            bytes=38_112,
            attempts=5,
            attempt=5,
            attempts_failed=5,
            attempts_same_failure=5,
            formats=("docker_compose", "ansi"),
        ),
        environment=Environment(
            vllm_version="0.8.5",
            vllm_origin=Origin.LOGGED,
            engine="V1",
            model="Qwen/Qwen3-32B",
            device="1x 80 GB",
            backend="cuda",
            command="vllm serve Qwen/Qwen3-32B --port 8000",
        ),
        outcome=Outcome.MEMORY_FAILURE,
        diagnosis=finding,
        headline="",
        alternatives=(
            Alternative(
                family=Family.WEIGHTS,
                subtype="weights.too_big",
                confidence=0.1,
                why="the weights take 77 % of the card",
            ),
        ),
        facts=_kv_facts(),
        ledger=Ledger(
            era="C",
            formula="requested - weights - peak activation - non-torch",
            ranks=(_kv_rank(),),
        ),
        gmu=GmuAdvice(
            verdict=GmuVerdict.RAISE,
            current=0.90,
            lower_bound=0.95,
            upper_bound=0.97,
            suggested=0.95,
            why="3.90 GiB are missing and each 0.01 gives 0.79 GiB.",
            popular=("Lowering it to 0.80 would leave no KV cache at all (-1.81 GiB).",),
        ),
        fixes=_kv_fixes(),
        not_helpful=(
            NotHelpful(
                change="lower --gpu-memory-utilization",
                why="each 0.01 takes 0.79 GiB more from the pool",
            ),
            NotHelpful(change="lower --max-num-seqs", why="changes the pool by under 0.1 GiB here"),
        ),
        related=(
            Related(
                id="vllm#10517",
                kind="issue",
                title="29k refused, 35k started: chunked prefill switched on",
                url="https://github.com/vllm-project/vllm/issues/10517",
                score=0.71,
                why="same error, V0",
                versions="0.6",
            ),
            Related(
                id="vllm#16118",
                kind="issue",
                title="asks for the fitting length; printed since 0.8.5",
                url="https://github.com/vllm-project/vllm/issues/16118",
                score=0.64,
                why="same class",
            ),
        ),
    )


def _kv_facts() -> tuple[FactOut, ...]:
    def fact(
        name: str,
        value: float | str | bool,
        unit: str,
        line: int | None,
        origin: Origin = Origin.LOGGED,
    ) -> FactOut:
        return FactOut(name=name, value=value, unit=unit, rank=0, line=line, origin=origin)

    return (
        fact("kv.available", gib(6.10), "bytes", 201),
        fact("kv.needed", gib(10.00), "bytes", 214),
        fact("kv.bytes_per_token", 262_144, "bytes", None, Origin.DERIVED),
        fact("args.max_model_len", 40_960, "tokens", 12),
        fact("args.gpu_memory_utilization", 0.9, "ratio", None, Origin.ASSUMED),
        fact("args.enforce_eager", False, "bool", 12),
        fact("model.name", "Qwen/Qwen3-32B", "text", 12),
    )


def _kv_rank(rank: int = 0) -> RankLedger:
    return RankLedger(
        rank=rank,
        device=None,
        total_bytes=gib(79.15),
        entries=(
            LedgerEntry(
                term="weights",
                label="weights",
                bytes=gib(61.03),
                origin=Origin.LOGGED,
                lines=(187,),
            ),
            LedgerEntry(
                term="peak_activation",
                label="peak activation",
                bytes=gib(2.90),
                origin=Origin.ASSUMED,
                error_pct=25.0,
            ),
            LedgerEntry(term="other", label="other", bytes=gib(1.21), origin=Origin.DERIVED),
            LedgerEntry(
                term="kv_pool",
                label="KV pool",
                bytes=gib(6.10),
                origin=Origin.LOGGED,
                lines=(201, 214),
                wanted=gib(10.00),
                failed=True,
            ),
            LedgerEntry(
                term="outside", label="outside 0.90", bytes=gib(7.91), origin=Origin.DERIVED
            ),
        ),
        unexplained_bytes=0,
    )


def _kv_fixes() -> tuple[Fix, ...]:
    base = "vllm serve Qwen/Qwen3-32B --port 8000"
    return (
        Fix(
            id="raise_gpu_memory_utilization",
            title="Give vLLM more of the card",
            changes=(Change(flag="--gpu-memory-utilization", from_=0.9, to=0.95),),
            fits=True,
            proof="10.06 of 10.00 GiB needed; window 0.95-0.97",
            predicted={"kv_pool_bytes": gib(10.06), "max_concurrency": 1.0},
            cost="headroom falls from 7.91 to 3.96 GiB",
            verify='after the change look for "GPU KV cache size" >= 40,960 tokens',
            command=f"{base} --gpu-memory-utilization 0.95",
            lines_used=(201, 214),
        ),
        Fix(
            id="kv_cache_dtype_fp8",
            title="Store the KV cache in 8 bits",
            changes=(Change(flag="--kv-cache-dtype", from_="auto", to="fp8"),),
            fits=True,
            proof="needs 5.00 of 6.10 GiB, 1.2 requests",
            cost="a little accuracy",
            safety=Safety.CHANGES_RESULTS,
            when_not="the card is older than Ada and the attention backend has no fp8 kernel",
            command=f"{base} --kv-cache-dtype fp8",
        ),
        Fix(
            id="lower_max_model_len",
            title="Shorten the context",
            changes=(Change(flag="--max-model-len", from_=40_960, to=24_976),),
            fits=True,
            proof="needs 6.10 of 6.10 GiB, 1 request at full length",
            cost="context -39 %",
            safety=Safety.TRADEOFF,
            command=f"{base} --max-model-len 24976",
        ),
        Fix(
            id="tensor_parallel",
            title="Split over two cards",
            changes=(Change(flag="--tensor-parallel-size", from_=1, to=2),),
            fits=True,
            proof="about 36 GiB a card for KV cache",
            cost="a second card",
            safety=Safety.TRADEOFF,
            command=f"{base} --tensor-parallel-size 2",
        ),
        Fix(
            id="enforce_eager",
            title="No CUDA graphs",
            changes=(Change(flag="--enforce-eager", from_=False, to=True),),
            fits=False,
            proof="gives 0.4 GiB back, 3.90 are missing",
            cost="slower decoding",
            safety=Safety.TRADEOFF,
        ),
    )


def free_below_target() -> Diagnosis:
    """Another process holds the card; two ranks, one fix is an action in words; release assumed."""

    def rank(number: int, others: float) -> RankLedger:
        return RankLedger(
            rank=number,
            device="NVIDIA GeForce RTX 3090",
            total_bytes=gib(23.65),
            entries=(
                LedgerEntry(
                    term="other_processes",
                    label="other processes",
                    bytes=gib(others),
                    origin=Origin.DERIVED,
                    lines=(31,),
                    failed=number == 0,
                ),
                LedgerEntry(
                    term="free",
                    label="free",
                    bytes=gib(23.65 - others),
                    origin=Origin.LOGGED,
                    lines=(31,),
                    wanted=gib(21.76),
                ),
            ),
            unexplained_bytes=None,
        )

    return Diagnosis(
        source=SourceInfo(name="worker.log.gz", lines=64, bytes=9_120, formats=("gzip",)),
        environment=Environment(
            vllm_version="0.22.1",
            vllm_origin=Origin.ASSUMED,
            engine="V1",
            model="/models/llama-3-8b-instruct",
            device="2x NVIDIA GeForce RTX 3090",
        ),
        outcome=Outcome.MEMORY_FAILURE,
        diagnosis=Finding(
            family=Family.DEVICE_BASELINE,
            subtype="kv.free_below_target",
            phase=Phase.INIT_DEVICE,
            rank=0,
            confidence=0.8,
            title="the card is not free enough at start",
            summary="vLLM wants 0.92 x 23.65 = 21.76 GiB free; 19.40 GiB are free. 4.25 GiB belong to others.",
            line=31,
            evidence=(
                Evidence(
                    line=31,
                    text="ValueError: Free memory on device cuda:0 (19.4/23.65 GiB) on startup is less than "
                    "desired GPU memory utilization (0.92, 21.76 GiB).",
                    role=EvidenceRole.CAUSE,
                ),
            ),
            missing=(
                "who holds the 4.25 GiB (nvidia-smi)",
                "the release, which decides what counts as free",
            ),
        ),
        headline="",
        alternatives=(
            Alternative(
                family=Family.KV_RESERVATION,
                subtype="kv.profile_interference",
                confidence=0.2,
                why="two engines may be starting on the same card at once",
            ),
        ),
        ledger=Ledger(era="H", formula="total x utilization", ranks=(rank(0, 4.25), rank(1, 0.41))),
        gmu=GmuAdvice(
            verdict=GmuVerdict.LOWER,
            current=0.92,
            lower_bound=0.70,
            upper_bound=0.82,
            suggested=0.81,
            why="19.40 of 23.65 GiB are free, so more than 0.82 can't be had until the card is freed.",
        ),
        fixes=(
            Fix(
                id="free_the_card",
                title="Free the card",
                changes=(
                    Change(
                        action="free the card: nvidia-smi lists who holds it; an old EngineCore is the usual one"
                    ),
                ),
                fits=True,
                proof="23.65 of 21.76 GiB once it is free",
                verify="nvidia-smi shows no other process on card 0",
            ),
            Fix(
                id="lower_gpu_memory_utilization",
                title="Take less of the card",
                changes=(Change(flag="--gpu-memory-utilization", from_=0.92, to=0.81),),
                fits=None,
                proof="passes this check (19.16 of 19.40 GiB); weights and peak are not in the log",
                cost="the KV pool shrinks by 2.60 GiB",
                safety=Safety.TRADEOFF,
            ),
        ),
        known_bugs=(
            KnownBug(
                id="vllm#55827",
                affected=">=0.9,<0.23",
                fixed_in="0.23.0",
                url="https://github.com/vllm-project/vllm/issues/55827",
                why="two engines starting at once are charged for each other's memory",
                cure="use 0.23.0, or start them one after another",
            ),
        ),
    )


def port_in_use() -> Diagnosis:
    """A look-alike: nothing ran out of memory."""
    return Diagnosis(
        source=SourceInfo(name="<stdin>", lines=14, bytes=1_410),
        environment=Environment(
            vllm_version="0.11.0", vllm_origin=Origin.LOGGED, engine="V1", model="facebook/opt-125m"
        ),
        outcome=Outcome.OTHER_FAILURE,
        diagnosis=Finding(
            family=Family.LOOKALIKE,
            subtype="look.other",
            phase=Phase.INIT_DEVICE,
            rank=None,
            confidence=0.97,
            title="the port is in use",
            summary="Another program listens on port 8000. GPU memory was fine up to there.",
            line=12,
            evidence=(
                Evidence(
                    line=12,
                    text="OSError: [Errno 98] Address already in use",
                    role=EvidenceRole.CAUSE,
                ),
            ),
        ),
        headline="",
        fixes=(
            Fix(
                id="free_port",
                title="Take another port",
                changes=(Change(flag="--port", from_=8000, to=8001),),
                fits=True,
                proof="no memory involved",
            ),
        ),
    )


def healthy() -> Diagnosis:
    """A server that serves."""
    return Diagnosis(
        source=SourceInfo(name="ok.log", lines=402, bytes=60_000),
        environment=Environment(
            vllm_version="0.10.2",
            vllm_origin=Origin.LOGGED,
            engine="V1",
            model="Qwen/Qwen2.5-7B-Instruct",
            device="1x NVIDIA L40S",
        ),
        outcome=Outcome.HEALTHY,
        diagnosis=None,
        headline="Healthy start: serving since line 388. KV pool 21.1 GiB, 138,272 tokens, 4.2 requests of "
        "32,768 tokens. Headroom outside the pool: 1.9 GiB. Nothing to do.",
        ledger=Ledger(
            era="E",
            formula="requested - weights - peak activation - non-torch",
            ranks=(
                RankLedger(
                    rank=0,
                    device="NVIDIA L40S",
                    total_bytes=gib(44.4),
                    entries=(
                        LedgerEntry(
                            term="weights",
                            label="weights",
                            bytes=gib(14.27),
                            origin=Origin.LOGGED,
                            lines=(120,),
                        ),
                        LedgerEntry(
                            term="context",
                            label="context",
                            bytes=None,
                            origin=Origin.ASSUMED,
                        ),
                        LedgerEntry(
                            term="kv_pool",
                            label="KV pool",
                            bytes=gib(21.1),
                            origin=Origin.LOGGED,
                            lines=(300,),
                        ),
                    ),
                    unexplained_bytes=gib(9.03),
                ),
            ),
        ),
    )


def unknown() -> Diagnosis:
    """The log stops too early; the answer is what to get."""
    return Diagnosis(
        source=SourceInfo(
            name="vllm.log",
            lines=90,
            bytes=11_000,
            truncated=True,
            notes=("The file ends in the middle of a line.",),
        ),
        environment=Environment(),
        outcome=Outcome.UNKNOWN,
        diagnosis=None,
        headline="Cannot tell yet. The engine died while weights were loading, and the log ends there. Either the "
        "host ran out of memory or the process was killed.",
        alternatives=(
            Alternative(
                family=Family.HOST_MEMORY,
                subtype="host.oom_killed",
                confidence=0.4,
                why="the log stops without a traceback",
            ),
        ),
        next_steps=(
            'dmesg -T | grep -i -E "killed process|oom"       (host)',
            'kubectl describe pod POD | grep -A3 "Last State"  (Kubernetes)',
            "the log again with VLLM_LOGGING_LEVEL=DEBUG",
        ),
    )


def runtime_oom() -> Diagnosis:
    """Torch OOM while serving on rank 1 of two; one fix sets an environment variable, one two settings."""

    def rank(number: int, activation: float, failed: bool) -> RankLedger:
        return RankLedger(
            rank=number,
            device="NVIDIA H100 80GB HBM3",
            total_bytes=gib(79.11),
            entries=(
                LedgerEntry(
                    term="weights",
                    label="weights",
                    bytes=gib(33.88),
                    origin=Origin.LOGGED,
                    lines=(140,),
                ),
                LedgerEntry(
                    term="kv_pool",
                    label="KV pool",
                    bytes=gib(35.2),
                    origin=Origin.LOGGED,
                    lines=(233,),
                ),
                LedgerEntry(
                    term="cuda_graphs",
                    label="CUDA graphs",
                    bytes=gib(0.61),
                    origin=Origin.LOGGED,
                    lines=(260,),
                ),
                LedgerEntry(
                    term="peak_activation",
                    label="activation",
                    bytes=gib(activation),
                    origin=Origin.DERIVED,
                    wanted=gib(11.7) if failed else None,
                    failed=failed,
                ),
            ),
            unexplained_bytes=gib(79.11 - 33.88 - 35.2 - 0.61 - activation),
        )

    return Diagnosis(
        source=SourceInfo(name="serve.log", lines=120_331, bytes=22_000_000),
        environment=Environment(
            vllm_version="0.9.1",
            vllm_origin=Origin.LOGGED,
            engine="V1",
            model="meta-llama/Llama-3.3-70B-Instruct",
            device="2x NVIDIA H100 80GB HBM3",
        ),
        outcome=Outcome.MEMORY_FAILURE,
        diagnosis=Finding(
            family=Family.ACTIVATION_SPIKE,
            subtype="act.logits_logprobs",
            phase=Phase.SERVING,
            rank=1,
            confidence=0.93,
            title="log-probabilities over a long prompt",
            summary="A request asked for prompt log-probabilities: 16,384 tokens x 128,256 words x 4 bytes = 7.83 GiB "
            "in one piece; 3.54 GiB were free on rank 1.",
            line=119_870,
        ),
        headline="",
        ledger=Ledger(
            era="D", formula=None, ranks=(rank(0, 3.9, failed=False), rank(1, 5.87, failed=True))
        ),
        gmu=GmuAdvice(
            verdict=GmuVerdict.LOWER,
            current=0.92,
            lower_bound=0.55,
            upper_bound=0.86,
            suggested=0.86,
            why="The spike lies outside the KV pool, so a smaller pool leaves room for it.",
            popular=(
                "0.75 works as well, but gives away 8.70 GiB of KV cache that nothing else needs.",
            ),
        ),
        fixes=(
            Fix(
                id="prefill_chunk",
                title="Smaller prefill chunks",
                changes=(
                    Change(flag="--max-num-batched-tokens", from_=16_384, to=4_096),
                    Change(flag="--enable-chunked-prefill", from_=None, to=True),
                ),
                fits=True,
                proof="1.96 of 3.54 GiB",
                cost="prefill a little slower",
                safety=Safety.TRADEOFF,
                command="docker compose up\n\tcommand: --max-num-batched-tokens 4096 --enable-chunked-prefill",
                verify="repeat the long request; peak stays under 77 GiB in nvidia-smi",
            ),
            Fix(
                id="expandable_segments",
                title="Less fragmentation",
                changes=(
                    Change(
                        env="PYTORCH_CUDA_ALLOC_CONF", from_=None, to="expandable_segments:True"
                    ),
                ),
                fits=None,
                proof="the log does not show how much is reserved and idle",
            ),
            Fix(
                id="drop_eager",
                title="Graphs on",
                changes=(Change(flag="--max-logprobs", from_=20, to=None),),
                fits=True,
                proof="no request can ask for it",
                cost="clients that use it get an error",
                safety=Safety.CHANGES_RESULTS,
            ),
        ),
    )


def hostile() -> Diagnosis:
    """Every text a log, a file name or a thread could have planted something in."""
    bad = (
        "\x1b[31mred\x1b[0m\x1b]0;owned\x07 [red]x[/red] \u202etxt.exe\u2066 a\u200bb \x9b2J "
        "<img src=x> @root #123 `tick`` a\\| | pipe"
    )
    base = kv_max_len()
    assert base.diagnosis is not None
    finding = replace(
        base.diagnosis,
        title=bad,
        summary=f"{bad}\n\n# heading\n```\nnot code\n```\n" + "long " * 2_000,
        evidence=(
            Evidence(line=1, text="~~~~ ```` " + bad + "x" * 10_240, role=EvidenceRole.CAUSE),
            Evidence(line=2, text="\ud800 lone, \ufeff mark, 漢字" * 600, role=EvidenceRole.ECHO),
        ),
        missing=(bad,),
        confidence=0.5,
    )
    return replace(
        base,
        source=replace(base.source, name="evil\n\x1b[2J.log", notes=(bad,)),
        environment=replace(
            base.environment, model=bad, device="漢" * 200, vllm_version="0.8\x1b[5m.5"
        ),
        diagnosis=finding,
        facts=(
            FactOut(
                name="model.name", value=bad, unit="text", rank=None, line=1, origin=Origin.LOGGED
            ),
        ),
        fixes=(
            replace(
                base.fixes[0],
                proof=bad,
                cost=bad,
                command=f"vllm serve '{bad}' --x\n```\n--y {'z' * 10_240}",
                changes=(Change(flag="--model", to=bad),),
            ),
        ),
        ledger=Ledger(
            era=None,
            formula=None,
            ranks=(
                RankLedger(
                    rank=None,
                    device=bad,
                    total_bytes=None,
                    entries=(
                        LedgerEntry(
                            term="x", label=bad, bytes=-(2**28), origin=Origin.LOGGED, failed=True
                        ),
                        LedgerEntry(
                            term="y", label="漢字" * 40, bytes=10**18, origin=Origin.LOGGED
                        ),
                    ),
                    unexplained_bytes=None,
                ),
            ),
        ),
        not_helpful=(NotHelpful(change=bad, why=bad),),
        related=(
            Related(
                id="x#1",
                kind="issue",
                title=bad,
                url="javascript:alert(1)//`)",
                score=0.1,
                why=bad,
            ),
        ),
        next_steps=(bad,),
    )


def eight_ranks() -> Diagnosis:
    """Eight ranks, seven alike."""
    base = kv_max_len()
    ranks = [_kv_rank(number) for number in range(8)]
    entries = ranks[0].entries
    ranks[0] = replace(
        ranks[0], entries=(replace(entries[0], bytes=gib(59.0)), *entries[1:3], entries[4])
    )
    return replace(base, ledger=replace(base.ledger, ranks=tuple(ranks)))


SAMPLES = {
    "kv_max_len": kv_max_len,
    "free_below_target": free_below_target,
    "port_in_use": port_in_use,
    "healthy": healthy,
    "unknown": unknown,
    "runtime_oom": runtime_oom,
    "hostile": hostile,
    "eight_ranks": eight_ranks,
}
"""Every sample by name; each call makes a fresh object."""
