"""The reader of vLLM's sources, on small hand-written ones of three styles; nothing of them is imported or run."""

from __future__ import annotations

import textwrap

import build_flags
import pytest
import yaml
from flagtable.arguments import read_flags
from flagtable.packages import chosen
from flagtable.runs import changes, runs
from flagtable.sources import Computed, Sources
from flagtable.variables import read_variables

CALLS = {
    "engine/arg_utils.py": """
        import argparse
        from dataclasses import dataclass

        @dataclass
        class EngineArgs:
            model: str = "base"
            share: float = 0.9
            blocks: int = 8 << 1
            pool: str = None

            @staticmethod
            def add_cli_args(parser):
                raise_if_run()
                parser.add_argument('--model', type=str, default=EngineArgs.model, help='The model.')
                parser.add_argument('--share', '--part', type=float, default=EngineArgs.share)
                parser.add_argument('--block_size', type=int, default=EngineArgs.blocks, choices=[8, 32, 16])
                parser.add_argument('--eager', action='store_true', help='[DEPRECATED] Not used.')
                parser.add_argument('--sizes', '-s', nargs='+', type=int, default=[1, 2])
                parser.add_argument('--limit', type=json.loads, default=make_limit())
                return parser

        @dataclass
        class AsyncEngineArgs(EngineArgs):
            @staticmethod
            def add_cli_args(parser, async_args_only=False):
                parser = EngineArgs.add_cli_args(parser)
                parser.add_argument('--quiet', action='store_true')
                return parser
    """,
    "entrypoints/openai/cli_args.py": """
        from vllm.engine.arg_utils import AsyncEngineArgs

        def make_arg_parser(parser):
            parser.add_argument("--port", type=int, default=8000)
            parser = AsyncEngineArgs.add_cli_args(parser)
            return parser
    """,
    "scripts.py": """
        from vllm.entrypoints.openai.cli_args import make_arg_parser

        def main():
            serve_parser = subparsers.add_parser("serve")
            serve_parser.add_argument("--config", default='')
            serve_parser = make_arg_parser(serve_parser)
            chat_parser = subparsers.add_parser("chat")
            chat_parser.add_argument("--url")
    """,
}
DATACLASSES = {
    "config/__init__.py": "from vllm.config.cache import CacheConfig\n",
    "config/cache.py": '''
        from typing import Literal, get_args
        from pydantic import Field
        from .utils import config

        Kind = Literal["auto", "fp8"]
        Wide = Literal["both", Kind]

        @config
        @dataclass
        class Inner:
            a: int = 1

        @config
        class CacheConfig:
            share: float = Field(default=0.92, gt=0, le=1)
            """Share of memory."""
            kind: Kind = "auto"
            wide: Wide | None = None
            open_kind: Kind | str = "auto"
            sizes: list[int] | None = None
            inner: Inner = Field(default_factory=Inner)
            extra: dict[str, int] = field(default_factory=dict)
            caching: bool | None = None
            offload: int = 4
            """Deprecated: set it elsewhere."""
            seen: ClassVar[int] = 0
    ''',
    "engine/arg_utils.py": """
        from vllm.config import CacheConfig

        class EngineArgs:
            @staticmethod
            def add_cli_args(parser):
                cache_kwargs = get_kwargs(CacheConfig)
                group = parser.add_argument_group(title="CacheConfig")
                group.add_argument("--share", "--part", **cache_kwargs["share"])
                group.add_argument("--kind", **cache_kwargs["kind"])
                group.add_argument("--wide", **cache_kwargs["wide"])
                group.add_argument("--open-kind", **cache_kwargs["open_kind"])
                group.add_argument("--sizes", **cache_kwargs["sizes"])
                group.add_argument("--inner", "-i", **cache_kwargs["inner"])
                group.add_argument("--caching", **{**cache_kwargs["caching"], "default": True})
                offload_kwargs = cache_kwargs["offload"]
                offload_kwargs["default"] = argparse.SUPPRESS
                group.add_argument("--offload", **offload_kwargs)
                for arg, type in [("--old-a", str), ("--old-b", int)]:
                    group.add_argument(arg, type=type, deprecated=True)
                return parser
    """,
    "entrypoints/openai/cli_args.py": """
        from vllm.engine.arg_utils import EngineArgs

        @config
        class BaseArgs:
            lora_modules: list[str] | None = None
            log_stats: bool = False

            @classmethod
            def _customize(cls, frontend_kwargs):
                frontend_kwargs["lora_modules"]["default"] = []
                return frontend_kwargs

            @classmethod
            def add_cli_args(cls, parser):
                frontend_kwargs = get_kwargs(cls)
                frontend_kwargs = cls._customize(frontend_kwargs)
                group = parser.add_argument_group(title="Frontend")
                for key, value in frontend_kwargs.items():
                    group.add_argument(f"--{key.replace('_', '-')}", **value)
                return parser

        @config
        class FrontendArgs(BaseArgs):
            port: int = 8000
            allowed: list[str] = field(default_factory=lambda: ["*"])

            @classmethod
            def _customize(cls, frontend_kwargs):
                frontend_kwargs = super()._customize(frontend_kwargs)
                frontend_kwargs["allowed"]["type"] = json.loads
                del frontend_kwargs["allowed"]["nargs"]
                return frontend_kwargs

        def make_arg_parser(parser):
            parser = FrontendArgs.add_cli_args(parser)
            parser = EngineArgs.add_cli_args(parser)
            return parser
    """,
}
ENVS = {
    "envs.py": """
        import os

        if TYPE_CHECKING:
            VLLM_PORT: int | None = None
            VLLM_ROOT: str = "~/.cache"
            VLLM_FAST: bool = True

        def get_port():
            return None

        environment_variables = {
            "VLLM_SPACE": lambda: int(os.getenv("VLLM_SPACE", "4")),
            "VLLM_LATER": lambda: int(os.getenv("VLLM_LATER", "0")) if "VLLM_LATER" in os.environ else None,
            "VLLM_PORT": get_port,
            "VLLM_ROOT": lambda: expand(os.getenv("VLLM_ROOT", join(default(), "x"))),
            "VLLM_FAST": lambda: os.getenv("VLLM_FAST", "True").lower() in ("1", "true") or other(),
            "VLLM_MODE": env_with_choices("VLLM_MODE", "auto", ["auto", "off"]),
            "VLLM_BARE": lambda: os.environ.get("VLLM_BARE"),
        }
    """
}


@pytest.fixture
def release(tmp_path):
    def write(files, name="0.9.0"):
        for path, text in files.items():
            file = tmp_path / name / "vllm" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        return Sources(tmp_path / name)

    write.root = tmp_path
    return write


def test_plain_calls_take_their_defaults_from_the_class(release):
    flags = read_flags(release(CALLS))
    assert set(flags) == {
        "--model", "--share", "--block-size", "--eager", "--sizes", "--limit", "--quiet", "--port",
        "--config",
    }  # fmt: skip
    assert (flags["--share"].default, flags["--share"].type) == ("0.9", "float")
    assert flags["--share"].aliases == ("--part",)
    assert (flags["--block-size"].default, flags["--block-size"].choices) == (
        "16",
        ("8", "16", "32"),
    )
    assert (flags["--eager"].takes, flags["--eager"].default) == ("switch", "False")
    assert flags["--eager"].deprecated
    assert not flags["--model"].deprecated
    assert (flags["--sizes"].takes, flags["--sizes"].default) == ("list", "[1, 2]")
    assert (flags["--limit"].takes, flags["--limit"].default) == ("json", "=make_limit()")


def test_dataclass_fields_become_flags(release):
    flags = read_flags(release(DATACLASSES))
    assert (flags["--share"].default, flags["--share"].type) == ("0.92", "float")
    assert flags["--kind"].choices == ("auto", "fp8")
    assert flags["--wide"].choices == ("auto", "both", "fp8")
    assert flags["--open-kind"].choices is None  # any text is taken
    assert (flags["--sizes"].takes, flags["--sizes"].type) == ("list", "int")
    assert (flags["--inner"].takes, flags["--inner"].default) == ("json", "=Inner()")
    assert (flags["--caching"].takes, flags["--caching"].negated) == ("switch", True)
    assert flags["--caching"].default == "True"  # the call's own, over the field's
    assert flags["--offload"].default == "None"
    assert flags["--offload"].deprecated
    assert flags["--old-b"].type == "int"
    assert flags["--old-a"].deprecated
    assert "--seen" not in flags


def test_a_loop_over_a_class_makes_a_flag_of_every_field(release):
    flags = read_flags(release(DATACLASSES))
    assert flags["--lora-modules"].default == "[]"  # changed by the base class
    assert flags["--log-stats"].negated
    assert flags["--port"].default == "8000"
    assert (flags["--allowed"].takes, flags["--allowed"].default) == ("json", "['*']")


def test_variables_have_the_fallback_of_their_getter(release):
    assert read_variables(release(ENVS)) == {
        "VLLM_SPACE": "4",
        "VLLM_LATER": "None",
        "VLLM_PORT": "None",
        "VLLM_ROOT": "~/.cache",
        "VLLM_FAST": "1",
        "VLLM_MODE": "auto",
        "VLLM_BARE": "None",
    }


def test_a_release_without_a_table_of_variables_has_none(release):
    assert read_variables(release(CALLS)) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4 * 1024", 4096),
        ("not True", False),
        ("cast(int, 7)", 7),
        ("field(default_factory=dict)", {}),
        ("1 << 10**9", Computed("1 << 10 ** 9")),
        ("9**9**9", Computed("9 ** 9 ** 9")),
        ("__import__('os').system('false')", Computed("__import__('os').system('false')")),
        ("[1, unknown]", Computed("[1, unknown]")),
    ],
)
def test_only_literals_and_small_sums_are_worked_out(release, text, value):
    sources = release({"x.py": f"NAME = {text}\n"})
    module = sources.module("vllm.x")
    assert sources.value(module.names["NAME"].value, module) == value


def test_runs_and_changes():
    releases = ["0.1", "0.2", "0.3", "0.4"]
    assert runs(releases, {"0.2": 1, "0.4": 1}) == [["0.2", "0.3"], ["0.4", None]]
    assert changes(releases, {"0.1": "a", "0.2": "b", "0.3": "b"}) == {"0.1": "a", "0.2": "b"}
    assert changes(releases, {"0.3": "a", "0.4": "a"}) == "a"


def test_the_last_build_of_each_release_is_read():
    listed = ["0.10.0", "0.9.2", "0.8.5", "0.8.5.post1", "0.9.0rc1", "0.1.7", "old"]
    assert chosen(listed) == ["0.8.5.post1", "0.9.2", "0.10.0"]


def test_the_files_fold_releases_together(release, tmp_path, capsys):
    release({**CALLS, **ENVS}, "0.8.5.post1")
    release(DATACLASSES, "0.9.0")
    (tmp_path / "0.9.1").mkdir()  # nothing in it: left out and named
    output = tmp_path / "out"
    output.mkdir()
    arguments = ["--sources", str(tmp_path), "--output", str(output)]
    assert build_flags.main([*arguments, "--check"]) == 1
    assert build_flags.main(arguments) == 0
    assert build_flags.main([*arguments, "--check"]) == 0
    assert "0.9.1" in capsys.readouterr().err
    table = yaml.safe_load((output / "flags.yaml").read_text())
    assert table["releases"] == ["0.8.5", "0.9.0"]
    share = {"0.8.5": "0.9", "0.9.0": "0.92"}
    assert table["flags"]["--share"] == {
        "runs": [["0.8.5", None]],
        "default": share,
        "type": "float",
    }
    assert table["flags"]["--eager"]["runs"] == [["0.8.5", "0.9.0"]]
    assert table["flags"]["--part"] == {"runs": [["0.8.5", None]], "is": "--share"}
    variables = yaml.safe_load((output / "environment.yaml").read_text())
    assert variables["variables"]["VLLM_SPACE"] == {"runs": [["0.8.5", None]], "default": "4"}
