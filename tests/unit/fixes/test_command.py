from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diag.facts.model import Event, Facts
from diag.fixes.command import changed_command, command_from_facts
from diag.fixes.model import Change
from diag.log.model import LogLine
from diag.terms import RowRole

LENGTH = Change(flag="--max-model-len", from_=8192, to=4096)
SHARE = Change(flag="--gpu-memory-utilization", to=0.95)


@pytest.mark.parametrize(
    ("command", "changes", "changed"),
    [
        pytest.param("vllm serve m", [LENGTH], "vllm serve m --max-model-len 4096", id="append"),
        pytest.param(
            "vllm serve m --max-model-len 8192 --port 1",
            [LENGTH],
            "vllm serve m --max-model-len 4096 --port 1",
            id="separate value",
        ),
        pytest.param(
            "vllm serve m --max_model_len=8192",
            [LENGTH],
            "vllm serve m --max_model_len=4096",
            id="underscores, =",
        ),
        pytest.param(
            "vllm serve m -tp 2",
            [Change(flag="--tensor-parallel-size", to=4)],
            "vllm serve m -tp 4",
            id="short flag",
        ),
        pytest.param(
            "vllm serve m --enforce-eager --port 1",
            [Change(flag="--enforce-eager", to=None)],
            "vllm serve m --port 1",
            id="remove a switch",
        ),
        pytest.param(
            "vllm serve m --cuda-graph-sizes 1 2 4 --port 1",
            [Change(flag="--cuda-graph-sizes", to=64)],
            "vllm serve m --cuda-graph-sizes 64 --port 1",
            id="list of values",
        ),
        pytest.param(
            "vllm serve 'my model' \\\n  --limit-mm-per-prompt '{\"image\": 2}' \\\n  --port 1 2>&1 | tee 'a b.log'",
            [SHARE],
            "vllm serve 'my model' --limit-mm-per-prompt '{\"image\": 2}' --port 1 --gpu-memory-utilization 0.95 "
            "2>&1 | tee 'a b.log'",
            id="continuations, quotes, pipe",
        ),
        pytest.param(
            "vllm serve m",
            [Change(flag="--limit-mm-per-prompt", to='{"image": 1}')],
            "vllm serve m --limit-mm-per-prompt '{\"image\": 1}'",
            id="quote a new value",
        ),
        pytest.param(
            "cd /srv && VLLM_USE_V1=0 python -m vllm.entrypoints.openai.api_server --model m &",
            [LENGTH, Change(env="A_B", to="x:y")],
            "cd /srv && VLLM_USE_V1=0 A_B=x:y python -m vllm.entrypoints.openai.api_server --model m "
            "--max-model-len 4096 &",
            id="python module after cd",
        ),
        pytest.param(
            "docker run --gpus all --shm-size 1g -e A=1 -p 80:80 vllm/vllm-openai:v0.8.5 --model m",
            [
                LENGTH,
                Change(flag="--shm-size", to="16g"),
                Change(env="A", to=2),
                Change(env="B", to="x"),
            ],
            "docker run -e B=x --shm-size=16g --gpus all -e A=2 -p 80:80 vllm/vllm-openai:v0.8.5 --model m "
            "--max-model-len 4096",
            id="docker",
        ),
        pytest.param(
            "X=expandable_segments:True vllm serve m",
            [Change(env="X", to=None)],
            "vllm serve m",
            id="unset in front",
        ),
        pytest.param(
            "vllm serve m",
            [Change(env="X", to=None)],
            "env -u X vllm serve m",
            id="unset from elsewhere",
        ),
        pytest.param(
            "vllm serve m --device-memory-utilization 0.9",
            [SHARE],
            "vllm serve m --device-memory-utilization 0.95",
            id="alias",
        ),
        pytest.param(
            "vllm serve m", [Change(action="stop it")], None, id="an action changes no command"
        ),
        pytest.param(
            "vllm serve m",
            [Change(flag="--shm-size", to="16g")],
            None,
            id="docker flag without docker",
        ),
        pytest.param("ls -l /tmp", [LENGTH], None, id="another program"),
        pytest.param("vllm serve m --x 'open", [LENGTH], None, id="open quote"),
        pytest.param("", [LENGTH], None, id="empty"),
    ],
)
def test_changed_command(command, changes, changed):
    assert changed_command(command, changes) == changed


@given(st.text(alphabet="ab-= '\"\\\n|&;<>$vllm serve", max_size=80))
def test_any_text_is_survived_and_the_result_is_a_command(text):
    changed = changed_command(f"vllm serve {text}", [LENGTH])
    assert changed is None or shlex.split(changed)


def facts_with(args: str) -> Facts:
    line = LogLine(number=3, text=args)
    row = "cfg.non_default_args"
    event = Event(row=row, role=RowRole.INFO, phase=None, line=line, values={"args": args})
    return Facts(events=(event,))


def test_command_is_rebuilt_from_the_arguments_in_the_log():
    args = (
        "{'model_tag': 'org/m', 'model': 'org/m', 'max_model_len': 8192, 'enforce_eager': True, "
        "'enable_prefix_caching': False, 'limit_mm_per_prompt': {'image': 1}, 'api_key': 'secret', "
        "'served_model_name': ['a', 'b'], 'dtype': None}"
    )
    assert command_from_facts(facts_with(args)) == (
        "vllm serve org/m --max-model-len 8192 --enforce-eager --no-enable-prefix-caching "
        "--limit-mm-per-prompt '{\"image\": 1}' --served-model-name a b"
    )


@pytest.mark.parametrize(
    "args", ["{'model': <object at 0x1>}", "{}", "['m']", "__import__('os')", "{'model': 3}"]
)
def test_unreadable_arguments_give_no_command(args):
    assert command_from_facts(facts_with(args)) is None
