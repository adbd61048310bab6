from __future__ import annotations

import ast
import builtins

import pytest
from rewrite_samples import ALLOCATOR, EAGER, EAGER_OUT, IMAGES, LENGTH, SHARE, SHM, sample, touched

from diag.errors import MissingExtraError, RewriteError
from diag.fixes.model import Change
from diag.fixes.rewrite import Kind, command_in_file, detect, rewrite


@pytest.fixture(autouse=True)
def needs_libcst(request):
    if "without" not in request.node.name:
        pytest.importorskip("libcst")


def test_keywords_over_lines_keep_their_comments():
    result = rewrite(sample("offline.py"), [LENGTH, SHARE, IMAGES])
    assert touched(result.diff) == (
        [
            "        max_model_len=32768,  # longest document",
            '        limit_mm_per_prompt={"image": 2},',
        ],
        [
            "        max_model_len=4096,  # longest document",
            '        limit_mm_per_prompt={"image": 1},',
            "        gpu_memory_utilization=0.85,",
        ],
    )
    assert rewrite(result.text, [LENGTH, SHARE, IMAGES]).diff == ""


def test_one_line_and_the_spacing_of_the_call():
    result = rewrite(sample("engine.py"), [EAGER, LENGTH], service="draft")
    assert touched(result.diff)[1] == [
        'draft = AsyncEngineArgs("c/d", enforce_eager=True, max_num_seqs = 16, max_model_len=4096)'
    ]


@pytest.mark.parametrize(
    ("call", "changes", "new"),
    [
        ("LLM('m')", [Change(flag="--dtype", to="half")], "LLM('m', dtype='half')"),
        (
            "LLM(\n    'm',\n    seed=0\n)",
            [SHARE],
            "LLM(\n    'm',\n    seed=0,\n    gpu_memory_utilization=0.85\n)",
        ),
        (
            'LLM(model="m",\n    enforce_eager=True,\n    seed=0)',
            [EAGER_OUT],
            'LLM(model="m",\n    seed=0)',
        ),
        ('LLM("m", enforce_eager=True)', [EAGER_OUT], 'LLM("m")'),
        (
            'LLM(\n    "m",\n    seed=0  # why\n    # end\n)',
            [SHARE],
            'LLM(\n    "m",\n    seed=0,  # why\n    # end\n    gpu_memory_utilization=0.85\n)',
        ),
        ('LLM("é", n=1)', [LENGTH], 'LLM("é", n=1, max_model_len=4096)'),
    ],
)
def test_calls(call, changes, new):
    text = "from vllm import LLM\nname = 'ü'; llm = {}  # c\n"
    assert rewrite(text.format(call), changes).text == text.format(new)


def test_a_call_by_another_name():
    text = "from vllm import LLM as Engine\nengine = Engine('m')\n"
    assert touched(rewrite(text, [LENGTH]).diff)[1] == ["engine = Engine('m', max_model_len=4096)"]


def test_what_is_no_keyword_is_told():
    result = rewrite(sample("offline.py"), [ALLOCATOR, SHM])
    assert result.diff == ""
    assert "before vllm is imported" in result.notes[0]
    assert result.notes[1] == "start the container with --shm-size 16g"


def test_arguments_from_a_mapping_are_not_doubled():
    text = "from vllm import LLM\nllm = LLM('m', **options)\n"
    result = rewrite(text, [LENGTH])
    assert result.diff == ""
    assert "mapping" in result.notes[0]


def test_several_calls_need_a_name():
    with pytest.raises(RewriteError, match="several lines: 3, 4"):
        rewrite(sample("engine.py"), [LENGTH])


def test_the_command_of_a_call():
    assert command_in_file(sample("offline.py"), "offline.py") == (
        "vllm serve Qwen/Qwen3-8B --dtype auto --max-model-len 32768 --limit-mm-per-prompt '{\"image\": 2}'"
    )
    assert (
        command_in_file(sample("engine.py"), service="draft") == "vllm serve c/d --max-num-seqs 16"
    )
    assert detect(sample("offline.py")) is Kind.PYTHON


def test_the_result_is_the_same_program_but_for_the_call():
    old, new = (
        ast.parse(text)
        for text in (sample("offline.py"), rewrite(sample("offline.py"), [SHARE]).text)
    )
    calls = [node for tree in (old, new) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        call.keywords = [item for item in call.keywords if item.arg != "gpu_memory_utilization"]
    assert ast.dump(old) == ast.dump(new)


def test_without_libcst_the_user_is_told_what_to_install(monkeypatch):
    load = builtins.__import__

    def without(name, *args, **options):
        if name.split(".")[0] == "libcst":
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'oomdoc\[rewrite\]'"):
        rewrite(sample("offline.py"), [LENGTH])


@pytest.mark.parametrize(
    "argument",
    ["(" * 5000 + ")" * 5000, "1+" * 20000 + "1", "-" * 20000 + "1", "a" + ".b" * 5000, "("],
)
def test_hostile_programs_are_refused(argument):
    with pytest.raises(RewriteError):
        rewrite(f"from vllm import LLM\nLLM({argument})\n", [LENGTH], name="x.py")
