"""The command line: typer commands that read options, call the core and return an exit code.

`diag.apps.entry.main` calls `run` and maps its errors. Heavy parts are imported by the command that needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, TypeVar

import typer

from diag import __version__
from diag.apps.compare import CompareRequest
from diag.apps.compare import run as run_compare
from diag.apps.console import (
    COULD_NOT,
    DONE,
    STDIN,
    ColorChoice,
    DocumentFormat,
    Look,
    StdoutSink,
    complain,
    is_terminal,
    look_of,
    open_sink,
)
from diag.apps.explain import (
    OutputFormat,
    Request,
    expand_sources,
    parse_attempt,
)
from diag.apps.explain import explain as run_explain
from diag.apps.plan import PlanRequest
from diag.apps.plan import run as run_plan
from diag.apps.startfile import launch_in_file
from diag.errors import UsageError

# "\b" keeps the line breaks of a paragraph in the help.
_EPILOG = """\b
Start with
  oomdoc explain vllm.log
  docker logs NAME 2>&1 | oomdoc explain

\b
Exit codes of every command
  0    the job was done, whatever was found
  2    it could not be done: usage, unreadable input, bad rule files
  130  interrupted
"""
_EXPLAIN_EPILOG = """\b
Examples
  oomdoc explain vllm.log
  docker logs NAME 2>&1 | oomdoc explain --evidence
  kubectl logs POD --previous | oomdoc explain --launch "vllm serve MODEL --max-model-len 32768"
  oomdoc explain vllm.log --config compose.yaml
  oomdoc explain --exit-code --format plain vllm.log || notify-team

\b
Exit codes
  0    done, whatever was found
  1    a failure was found, with --exit-code only
  2    a file could not be read, or the options are wrong
  130  interrupted
"""

_COMPARE_EPILOG = """\b
Examples
  oomdoc compare monday.log today.log
  oomdoc compare server.log         one log that holds a good start and a failed one
  docker logs NAME 2>&1 | oomdoc compare good.log -
"""

_PLAN_EPILOG = """\b
Examples
  oomdoc plan Qwen/Qwen3-32B --gpu 2xA100-80GB --vllm 0.33 --max-model-len 32768
  oomdoc plan ./my-model --gpu L4 --max-model-len auto --kv-cache-dtype fp8
  oomdoc plan Qwen/Qwen2.5-7B-Instruct --gpu 24GB --instances 2

\b
All other options are vLLM's own and mean what they mean there.
"""

_FIX_EPILOG = """\b
Examples
  oomdoc fix vllm.log --in compose.yaml
  oomdoc fix vllm.log --in deployment.yaml --fix shorten_context --write
  kubectl logs POD --previous | oomdoc fix - --in values.yaml --service llama3 | patch -p1

\b
FILE is a compose file, a Kubernetes manifest, values of the vLLM production
stack, a vLLM --config file, a shell script, a Dockerfile or a Python program.
"""

app = typer.Typer(
    name="oomdoc",
    help="Why vLLM ran out of memory, proved from its log. No GPU, no network, no account.",
    epilog=_EPILOG,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
rules_app = typer.Typer(
    help="Look at the rules that name a failure, and test them.", rich_markup_mode=None
)
app.add_typer(rules_app, name="rules")

Text = str | None
Format = TypeVar("Format", OutputFormat, DocumentFormat)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> int:
    if version:
        _say_version()
        raise typer.Exit(DONE)
    if ctx.invoked_subcommand is None:
        return _help(ctx)
    return DONE


@app.command(epilog=_EXPLAIN_EPILOG)
def explain(
    ctx: typer.Context,
    *,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help='Logs, also .gz and .zst; "-" is stdin.'),
    ] = None,
    output_format: Annotated[
        OutputFormat | None,
        typer.Option("-f", "--format", help="How to write the answer; text if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    output: Annotated[
        Text, typer.Option("-o", "--output", metavar="FILE", help="Write here, all or nothing.")
    ] = None,
    attempt: Annotated[
        str,
        typer.Option(metavar="N|first|last", help="Which start to explain when the log has many."),
    ] = "last",
    vllm_version: Annotated[
        Text, typer.Option(metavar="X.Y.Z", help="The release, when the log does not say.")
    ] = None,
    gpu: Annotated[
        Text, typer.Option(metavar="NAME|SIZE", help="The card, when the log does not say.")
    ] = None,
    launch: Annotated[
        Text, typer.Option(metavar="COMMAND", help="The command you started vLLM with.")
    ] = None,
    config: Annotated[
        Text, typer.Option(metavar="FILE", help="The file that starts vLLM, instead of --launch.")
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="End with 1 when a failure was found.")
    ] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Short for --color never.")] = False,
    color: Annotated[
        ColorChoice, typer.Option(help="NO_COLOR and FORCE_COLOR are obeyed.")
    ] = ColorChoice.AUTO,
    show_all: Annotated[
        bool, typer.Option("--all", help="Every fix, reading, thread and rank.")
    ] = False,
    evidence: Annotated[bool, typer.Option("--evidence", help="Quote the log lines.")] = False,
    facts: Annotated[bool, typer.Option("--facts", help="List every number, with source.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of our bugs.")] = False,
) -> int:
    """Say what failed, why in numbers, and what to change."""
    if not files and is_terminal(sys.stdin):
        return _help(ctx)
    sources = expand_sources(files or [STDIN])
    if config is not None:
        if launch is not None:
            raise UsageError("--launch and --config say the same", hint="give one of them")
        launch = launch_in_file(config)
    request = Request(
        sources=sources,
        format=_format(OutputFormat, output_format, as_json),
        attempt=parse_attempt(attempt),
        vllm_version=vllm_version,
        gpu=gpu,
        launch=launch,
        exit_code=exit_code,
        show_all=show_all,
        show_evidence=evidence,
        show_facts=facts,
        debug=debug,
        **_look(output, color, no_color=no_color),
    )
    return run_explain(request, open_sink(output, sources))


def _format(kind: type[Format], chosen: Format | None, as_json: bool) -> Format:
    """The value of `--format`, or what `--json` is short for."""
    if as_json and chosen not in (None, kind.JSON):
        raise UsageError("--json and --format contradict each other", hint="give one of them")
    return kind.JSON if as_json else chosen or kind.TEXT


def _look(output: str | None, color: ColorChoice, *, no_color: bool) -> Look:
    """What the target of `-o` can show."""
    target = sys.stdout if output in (None, STDIN) else None
    return look_of(target, ColorChoice.NEVER if no_color else color)


@app.command(
    epilog=_PLAN_EPILOG,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def plan(
    ctx: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help='Folder, config.json, name, or a "vllm serve ..." line.'
        ),
    ],
    gpu: Annotated[
        str, typer.Option(metavar="[Nx]NAME|SIZE", help="The cards: 2xA100-80GB, L4, 24GB.")
    ],
    vllm: Annotated[
        Text, typer.Option(metavar="X.Y", help="The release; the newest known if not given.")
    ] = None,
    output_format: Annotated[
        DocumentFormat | None,
        typer.Option("-f", "--format", help="How to write the plan; text if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    output: Annotated[
        Text, typer.Option("-o", "--output", metavar="FILE", help="Write here, all or nothing.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="A table over lengths, TP sizes and KV dtypes.")
    ] = False,
    instances: Annotated[int, typer.Option(help="How many such servers share one card.")] = 1,
    limit_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="A limit for this server, not a share.")
    ] = None,
    used_gib: Annotated[
        float, typer.Option(metavar="GIB", help="What other processes hold on each card.")
    ] = 0.0,
    hub: Annotated[
        bool, typer.Option("--hub", help="Ask huggingface.co for a model that is not known.")
    ] = False,
    color: Annotated[
        ColorChoice, typer.Option(help="NO_COLOR and FORCE_COLOR are obeyed.")
    ] = ColorChoice.AUTO,
    no_color: Annotated[bool, typer.Option("--no-color", help="Short for --color never.")] = False,
) -> int:
    """Compute beforehand what vLLM will do with a card: every memory term, the KV pool, whether it starts."""
    request = PlanRequest(
        model=model,
        gpu=gpu,
        arguments=tuple(ctx.args),
        vllm_version=vllm,
        instances=instances,
        limit_gib=limit_gib,
        used_gib=used_gib,
        sweep=sweep,
        hub=hub,
        format=_format(DocumentFormat, output_format, as_json),
        **_look(output, color, no_color=no_color),
    )
    return run_plan(request, open_sink(output))


@app.command(context_settings={"ignore_unknown_options": True})  # `--swap-space` is a NAME here
def flags(
    name: Annotated[
        Text, typer.Argument(metavar="[NAME]", show_default=False, help="A flag or a variable.")
    ] = None,
    vllm: Annotated[
        Text, typer.Option("--vllm", "--vllm-version", metavar="X.Y", help="One release.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Say since when vLLM has a flag or variable, its defaults, and what replaced it.

    Without NAME: what changed its default or its name; with --vllm only what changed since that release.
    """
    from diag.apps import flags as flag_pages

    return _print(flag_pages.answer(name, vllm, as_json=as_json))


@app.command(epilog=_COMPARE_EPILOG)
def compare(
    *,
    good: Annotated[
        str, typer.Argument(metavar="GOOD", help='The log of a start that worked; "-" is stdin.')
    ],
    bad: Annotated[
        Text,
        typer.Argument(
            metavar="BAD", help="The log of one that failed; without it GOOD holds both."
        ),
    ] = None,
    output_format: Annotated[
        DocumentFormat | None,
        typer.Option("-f", "--format", help="How to write the answer; text if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    output: Annotated[
        Text, typer.Option("-o", "--output", metavar="FILE", help="Write here, all or nothing.")
    ] = None,
    gpu: Annotated[
        Text, typer.Option(metavar="NAME|SIZE", help="The card of both, when the logs don't say.")
    ] = None,
    no_color: Annotated[bool, typer.Option("--no-color", help="Short for --color never.")] = False,
    color: Annotated[
        ColorChoice, typer.Option(help="NO_COLOR and FORCE_COLOR are obeyed.")
    ] = ColorChoice.AUTO,
) -> int:
    """Put a good and a bad start side by side: what differs, and what of it explains the failure."""
    request = CompareRequest(
        good=good,
        bad=bad,
        gpu=gpu,
        format=_format(DocumentFormat, output_format, as_json),
        **_look(output, color, no_color=no_color),
    )
    return run_compare(request, open_sink(output, tuple(filter(None, (good, bad)))))


@app.command(epilog=_FIX_EPILOG)
def fix(
    *,
    log: Annotated[str, typer.Argument(metavar="LOG", help='The log that failed; "-" is stdin.')],
    file: Annotated[
        str, typer.Option("--in", metavar="FILE", help="The file that vLLM is started from.")
    ],
    which: Annotated[
        Text,
        typer.Option("--fix", metavar="N|ID", help="Which fix; the first that fits if not given."),
    ] = None,
    service: Annotated[
        Text, typer.Option(metavar="NAME", help="Which service, container, model or variable.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Change the file, after asking; keeps FILE.bak.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    attempt: Annotated[
        str, typer.Option(metavar="N|first|last", help="Which start, as for explain.")
    ] = "last",
    vllm_version: Annotated[
        Text, typer.Option(metavar="X.Y.Z", help="The release, when the log does not say.")
    ] = None,
    gpu: Annotated[
        Text, typer.Option(metavar="NAME|SIZE", help="The card, when the log does not say.")
    ] = None,
    debug: Annotated[  # noqa: ARG001 - read by `main`
        bool, typer.Option("--debug", help="Show tracebacks of our bugs.")
    ] = False,
) -> int:
    """Put a fix into the file that starts vLLM: prints the diff, or writes it."""
    from diag.apps import fix as fix_app

    request = fix_app.FixRequest(
        log=log,
        file=file,
        fix=which,
        service=service,
        write=write,
        yes=yes,
        attempt=parse_attempt(attempt),
        vllm_version=vllm_version,
        gpu=gpu,
    )
    return fix_app.run(request)


@app.command()
def schema() -> int:
    """Print the JSON Schema (2020-12) of explain's JSON."""
    from diag.report import jsonout

    return _print(jsonout.dump(jsonout.json_schema()))


@app.command()
def version() -> int:
    """Print the version."""
    return _say_version()


@rules_app.command("check")
def rules_check() -> int:
    """Read every rule and message file and report all problems. Ends with 2 when there are any."""
    from diag.rules.check import check_all

    problems = check_all()
    for problem in problems:
        complain(problem)
    return COULD_NOT if problems else _print("All rule files are fine.")


@rules_app.command("list")
def rules_list() -> int:
    """List the rules: id and title."""
    from diag.apps import rules
    from diag.rules.load import all_rules

    return _print(rules.listing(all_rules()))


@rules_app.command("show")
def rules_show(rule_id: Annotated[str, typer.Argument(metavar="ID")]) -> int:
    """Print the page of one rule."""
    from diag.apps import rules

    return _print(rules.page(rules.find(rule_id)))


@rules_app.command("test")
def rules_test(
    rule_id: Annotated[Text, typer.Argument(metavar="[ID]", show_default=False)] = None,
) -> int:
    """Run the examples of one rule, or of all. Ends with 2 when some fail."""
    from diag.apps import rules
    from diag.rules.load import all_rules

    chosen = [rules.find(rule_id)] if rule_id else all_rules()
    count = sum(len(rule.examples) for rule in chosen)
    if not count:
        raise UsageError("the installed package carries no examples", hint="use a checkout")
    problems = list(rules.test(chosen))
    for problem in problems:
        complain(problem)
    return COULD_NOT if problems else _print(f"All {count} examples pass.")


def _say_version() -> int:
    return _print(f"oomdoc {__version__}")


def _print(text: str) -> int:
    StdoutSink().write(f"{text}\n")
    return DONE


def _help(ctx: typer.Context) -> int:
    """The help on stdout; nothing was asked for, so the job was not done."""
    text = ctx.get_help()  # typer prints it itself when rich formats it
    if text:
        _print(text)
    return COULD_NOT


def run(argv: Sequence[str]) -> int:
    """Parse and run a command; returns its exit code. Raises the errors that `diag.apps.entry.main` puts into words."""
    result = typer.main.get_command(app).main(
        args=list(argv), prog_name="oomdoc", standalone_mode=False
    )
    return result if isinstance(result, int) else DONE
