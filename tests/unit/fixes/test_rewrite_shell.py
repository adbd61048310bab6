from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_samples import (
    ALLOCATOR,
    ALLOCATOR_OUT,
    BLOCKS_OUT,
    EAGER,
    EAGER_OUT,
    IMAGES,
    LENGTH,
    SHARE,
    SHM,
    sample,
    touched,
)

from diag.errors import RewriteError
from diag.fixes.model import Change
from diag.fixes.rewrite import Kind, command_in_file, detect, rewrite

NVLS = Change(env="NCCL_NVLS_ENABLE", to=0)


def lines(name, *changes):
    result = rewrite(sample(name), changes, name=name)
    assert rewrite(result.text, changes, name=name).diff == ""
    return touched(result.diff)


def test_a_script_keeps_quotes_continuations_and_the_pipe():
    assert lines("serve.sh", LENGTH, EAGER, ALLOCATOR) == (
        [
            'export PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:256"',
            '    --max-model-len "32768" \\',
            "    --port 8000 2>&1 | tee -a /var/log/vllm.log",
        ],
        [
            'export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"',
            '    --max-model-len "4096" \\',
            "    --port 8000 \\",
            "    --enforce-eager 2>&1 | tee -a /var/log/vllm.log",
        ],
    )


def test_an_export_goes_with_its_line():
    assert lines("serve.sh", ALLOCATOR_OUT) == (
        ['export PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:256"'],
        [],
    )


def test_docker_run_gets_options_before_the_image():
    assert lines("docker-run.sh", SHM, ALLOCATOR, LENGTH) == (
        ["    --tokenizer_mode mistral --max_model_len 65536 \\"],
        [
            "    --shm-size=16g \\",
            "    -e PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \\",
            "    --tokenizer_mode mistral --max_model_len 4096 \\",
        ],
    )


def test_shared_memory_of_the_host_is_no_option():
    for option in ("--ipc=host", "--ipc host"):
        result = rewrite(f"docker run {option} vllm/vllm-openai --model m\n", [SHM])
        assert result.diff == ""
        assert "its /dev/shm is the host's" in result.notes[0]


def test_a_unit_file():
    assert lines("vllm.service", NVLS, SHARE) == (
        ["    --port 8000"],
        [
            "Environment=NCCL_NVLS_ENABLE=0",
            "    --port 8000 \\",
            "    --gpu-memory-utilization 0.85",
        ],
    )


def test_a_dockerfile():
    assert lines("Dockerfile", LENGTH, EAGER, IMAGES, ALLOCATOR) == (
        ['     "--max-model-len", "16384", \\', '     "--gpu-memory-utilization", "0.9"]'],
        [
            "ENV PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            '     "--max-model-len", "4096", \\',
            '     "--gpu-memory-utilization", "0.9", \\',
            '     "--enforce-eager", \\',
            '     "--limit-mm-per-prompt", "{\\"image\\": 1}"]',
        ],
    )
    assert lines("Dockerfile", Change(env="HF_HUB_OFFLINE", to=0)) == (
        ["ENV HF_HUB_OFFLINE=1 \\"],
        ["ENV HF_HUB_OFFLINE=0 \\"],
    )
    assert lines("Dockerfile", Change(env="VLLM_LOGGING_LEVEL", to=None)) == (
        ["ENV HF_HUB_OFFLINE=1 \\", "    VLLM_LOGGING_LEVEL=INFO"],
        ["ENV HF_HUB_OFFLINE=1"],
    )


@pytest.mark.parametrize(
    ("text", "change", "new"),
    [
        pytest.param(
            "vllm serve m --no-enable-chunked-prefill --port 1",
            Change(flag="--enable-chunked-prefill", to=True),
            "vllm serve m --enable-chunked-prefill --port 1",
            id="negated",
        ),
        pytest.param(
            "vllm serve m -tp 2",
            Change(flag="--tensor-parallel-size", to=4),
            "vllm serve m -tp 4",
            id="short",
        ),
        pytest.param(
            "vllm serve m --cuda-graph-sizes 1 2 4 --port 1",
            Change(flag="--cuda-graph-sizes", to=64),
            "vllm serve m --cuda-graph-sizes 64 --port 1",
            id="list of values",
        ),
        pytest.param(
            "vllm serve m \\\n  --num-gpu-blocks-override 100 \\\n  --port 1\n",
            BLOCKS_OUT,
            "vllm serve m \\\n  --port 1\n",
            id="a line out",
        ),
        pytest.param(
            "vllm serve m \\\n  --port 1 \\\n  --enforce-eager\necho done\n",
            EAGER_OUT,
            "vllm serve m \\\n  --port 1\necho done\n",
            id="the last line out",
        ),
        pytest.param(
            "if true; then\n    sudo vllm serve m --port 1 &\nfi\n",
            NVLS,
            "if true; then\n    sudo NCCL_NVLS_ENABLE=0 vllm serve m --port 1 &\nfi\n",
            id="variable in front",
        ),
        pytest.param(
            "cat > x <<'EOF'\nit's\nvllm serve not-this\nEOF\nvllm serve m # 'x\n",
            LENGTH,
            "cat > x <<'EOF'\nit's\nvllm serve not-this\nEOF\nvllm serve m --max-model-len 4096 # 'x\n",
            id="here-document, comment",
        ),
        pytest.param(
            'docker run --gpus all -e NCCL_NVLS_ENABLE=1 vllm/vllm-openai bash -c "vllm serve m && echo \\"hi\\""',
            NVLS,
            'docker run --gpus all -e NCCL_NVLS_ENABLE=0 vllm/vllm-openai bash -c "vllm serve m && echo \\"hi\\""',
            id="variable of docker run",
        ),
        pytest.param(
            "ssh host \"docker run vllm/vllm-openai sh -c 'vllm serve m --port 1'\"",
            IMAGES,
            "ssh host \"docker run vllm/vllm-openai sh -c 'vllm serve m --port 1 --limit-mm-per-prompt "
            r"\"{\\\"image\\\": 1}\"'"
            '"',
            id="three quotings deep",
        ),
        pytest.param(
            "docker run `\n  -p 8000:8000 `\n  vllm/vllm-openai:latest `\n  --model m\n",
            SHM,
            "docker run `\n  -p 8000:8000 `\n  --shm-size=16g `\n  vllm/vllm-openai:latest `\n  --model m\n",
            id="PowerShell",
        ),
    ],
)
def test_one_change(text, change, new):
    assert rewrite(text, [change]).text == new
    assert rewrite(new, [change]).text == new


def test_the_shell_agrees_about_quotes_within_quotes():
    text = "bash -c \"printf '%s\\n' vllm serve m --port 1\""
    new = rewrite(text, [IMAGES]).text
    said = subprocess.run(["bash", "-c", new], capture_output=True, text=True, check=True).stdout
    assert said.split("\n") == [
        "vllm",
        "serve",
        "m",
        "--port",
        "1",
        "--limit-mm-per-prompt",
        '{"image": 1}',
        "",
    ]


def test_several_commands_need_a_word_that_tells_them_apart():
    text = "vllm serve org/a --port 1 &\nvllm serve org/b --port 2 &\n"
    with pytest.raises(RewriteError, match="on several lines: 1, 2"):
        rewrite(text, [LENGTH])
    assert touched(rewrite(text, [LENGTH], service="org/b").diff) == (
        ["vllm serve org/b --port 2 &"],
        ["vllm serve org/b --port 2 --max-model-len 4096 &"],
    )


def test_arguments_from_a_variable_are_told():
    text = 'ARGS=(--max-model-len 8192)\nvllm serve m "${ARGS[@]}"\n'
    assert "from a variable" in rewrite(text, [LENGTH]).notes[0]


@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [
        (
            "serve.sh",
            Kind.SHELL,
            (
                "vllm serve $MODEL --tensor-parallel-size 2 --max-model-len 32768 "
                "--limit-mm-per-prompt '{\"image\": 2}' --port 8000"
            ),
        ),
        (
            "docker-run.sh",
            Kind.SHELL,
            (
                "vllm serve --model mistralai/Mistral-Small-3.2-24B-Instruct-2506 "
                "--tokenizer_mode mistral --max_model_len 65536 --tensor-parallel-size 2"
            ),
        ),
        (
            "Dockerfile",
            Kind.DOCKERFILE,
            "vllm serve /model --max-model-len 16384 --gpu-memory-utilization 0.9",
        ),
        ("vllm.service", Kind.SHELL, "vllm serve Qwen/Qwen3-8B --max-model-len 32768 --port 8000"),
    ],
)
def test_kind_with_and_without_a_name_and_the_command(name, kind, command):
    assert detect(sample(name), name) is kind
    assert detect(sample(name)) is kind
    assert command_in_file(sample(name), name) == command


def test_an_image_named_by_a_variable():
    text = 'IMAGE=reg/vllm-openai:1\ndocker run --gpus all \\\n  "$IMAGE" \\\n  org/m\n'
    assert touched(rewrite(text, [LENGTH, SHM]).diff)[1] == [
        "  --shm-size=16g \\",
        "  org/m --max-model-len 4096",
    ]
    assert detect(text.replace("vllm-openai", "postgres")) is None


@pytest.mark.parametrize(
    "text",
    [
        'FROM reg/vllm-openai:1\nENTRYPOINT ["vllm-router"]\nCMD []\n',
        "services:\n  v:\n    image: reg/vllm-openai:1\n    entrypoint: [ray, start]\n    command: [--head]\n",
    ],
)
def test_another_program_in_an_image_of_vllm(text):
    with pytest.raises(RewriteError, match="no command that starts vLLM"):
        rewrite(text, [LENGTH])


def test_secrets_stay_in_the_file():
    assert command_in_file("vllm serve m --api-key s3cret --port 1") == "vllm serve m --port 1"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab-= '\"\\\n|&;<>$`(){}#vllm serve", max_size=80))
def test_any_text_is_survived(text):
    try:
        result = rewrite(f"vllm serve m {text}\necho end\n", [LENGTH, NVLS])
    except RewriteError:
        return
    assert "4096" in result.text
    assert rewrite(result.text, [LENGTH, NVLS]).diff == ""
