from __future__ import annotations

import shlex

import pytest
import yaml
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
from diag.fixes.rewrite import Kind, command_in_file, rewrite


def lines(name, *changes, service=None):
    """The lines that changes touch in a sample; a second run must touch none."""
    result = rewrite(sample(name), changes, service=service, name=name)
    assert rewrite(result.text, changes, service=service, name=name).diff == ""
    return touched(result.diff)


# --- compose --------------------------------------------------------------------------------------------------


def test_a_list_keeps_comments_and_quotes():
    assert lines("compose-list.yaml", LENGTH, SHARE, EAGER) == (
        ['      - "32768"   # what the product asks for'],
        [
            '      - "4096"   # what the product asks for',
            "      - --gpu-memory-utilization",
            '      - "0.85"',
            "      - --enforce-eager",
        ],
    )


def test_variables_of_a_list_and_a_map():
    nvls = Change(env="NCCL_NVLS_ENABLE", to=0)
    assert lines("compose-list.yaml", nvls) == ([], ["      - NCCL_NVLS_ENABLE=0"])
    assert lines("compose-folded.yaml", nvls) == ([], ['      NCCL_NVLS_ENABLE: "0"'])
    assert lines("compose-folded.yaml", ALLOCATOR_OUT) == (
        ["      PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True"],
        [],
    )


def test_a_folded_command_gets_a_line_of_its_own():
    assert lines("compose-folded.yaml", LENGTH, EAGER, IMAGES) == (
        ["      --max-model-len 16384", "      --limit-mm-per-prompt '{\"image\": 4}'"],
        [
            "      --max-model-len 4096",
            "      --limit-mm-per-prompt '{\"image\": 1}'",
            "      --enforce-eager",
        ],
    )


def test_shared_memory():
    assert lines("compose-folded.yaml", SHM) == (["    shm_size: 6.15g"], ["    shm_size: 16g"])
    assert lines("compose-strings.yaml", SHM, service="ocr") == ([], ["    shm_size: 16g"])
    shared = rewrite(sample("compose-list.yaml"), [SHM])  # ipc: host
    assert shared.diff == ""
    assert "its /dev/shm is the host's" in shared.notes[0]


def test_more_shared_memory_than_asked_for_is_left():
    text = sample("compose-folded.yaml").replace("6.15g", "32gb")
    result = rewrite(text, [SHM])
    assert result.diff == ""
    assert result.held == 0
    assert result.notes == ("shm_size is 32gb already",)


def test_a_plain_string_is_changed_in_place_and_the_lost_variable_is_told():
    result = rewrite(sample("compose-strings.yaml"), [SHARE], service="embed")
    assert touched(result.diff) == (
        [
            "    command: --model BAAI/bge-m3 --gpu-memory-utilization ${EMBED_SHARE:-0.2} --port 8001"
        ],
        ["    command: --model BAAI/bge-m3 --gpu-memory-utilization 0.85 --port 8001"],
    )
    assert "came from ${EMBED_SHARE:-0.2}" in result.notes[0]


def test_a_plain_string_is_quoted_when_it_must_be():
    result = rewrite(sample("compose-strings.yaml"), [IMAGES], service="embed")
    command = yaml.safe_load(result.text)["services"]["embed"]["command"]
    assert shlex.split(command)[-2:] == ["--limit-mm-per-prompt", '{"image": 1}']


def test_a_script_in_a_block_keeps_its_continuations():
    assert lines("compose-strings.yaml", LENGTH, SHARE, service="chat") == (
        ["          --max-model-len 8192 \\", "          --port 8000   # behind the proxy"],
        [
            "          --max-model-len 4096 \\",
            "          --port 8000 \\",
            "          --gpu-memory-utilization 0.85   # behind the proxy",
        ],
    )


def test_a_flow_list_over_lines():
    assert lines("compose-strings.yaml", LENGTH, service="ocr") == (
        ['              "--enforce-eager",]'],
        ['              "--enforce-eager",', '              "--max-model-len", "4096",]'],
    )
    assert lines("compose-strings.yaml", EAGER_OUT, service="ocr") == (
        ['              "--max-num-seqs", "64",', '              "--enforce-eager",]'],
        ['              "--max-num-seqs", "64",]'],
    )


def test_the_service_must_be_named_when_several_run_vllm():
    with pytest.raises(RewriteError, match="several services run vLLM: embed, chat, ocr"):
        rewrite(sample("compose-strings.yaml"), [LENGTH])
    with pytest.raises(RewriteError, match="no service 'x'"):
        rewrite(sample("compose-strings.yaml"), [LENGTH], service="x")


@pytest.mark.parametrize(
    "text",
    [
        "x: &cmd [--model, m]\nservices: {v: {image: vllm/vllm-openai, command: *cmd}}\n",
        "x: &c {command: [--model, m]}\nservices:\n  v:\n    <<: *c\n    image: vllm/vllm-openai\n",
        (
            "services:\n  v:\n    image: vllm/vllm-openai\n    command: &c [--model, m]\n"
            "  w:\n    image: nginx\n    command: *c\n"
        ),
    ],
)
def test_what_an_anchor_shares_is_not_changed(text):
    with pytest.raises(RewriteError, match="anchor"):
        rewrite(text, [LENGTH], service="v")


def test_an_entry_of_the_service_outranks_an_anchor():
    text = sample("compose-strings.yaml")
    assert touched(rewrite(text, [SHM], service="chat").diff) == ([], ["    shm_size: 16g"])
    assert rewrite(text.replace("8gb", "20gb"), [SHM], service="chat").notes == (
        "shm_size is 20gb already",
    )


def test_dos_line_ends_stay():
    text = sample("compose-list.yaml").replace("\n", "\r\n")
    changed = rewrite(text, [LENGTH, SHARE, ALLOCATOR]).text
    assert changed.count("\n") == changed.count("\r\n") == text.count("\n") + 3


def test_the_last_variable_takes_its_list_with_it():
    text = (
        "services:\n  v:\n    image: vllm/vllm-openai\n    environment:\n"
        "      - PYTORCH_CUDA_ALLOC_CONF=a:b\n    command: --model m\n"
    )
    assert touched(rewrite(text, [ALLOCATOR_OUT]).diff)[1] == []
    assert "environment" not in yaml.safe_load(rewrite(text, [ALLOCATOR_OUT]).text)["services"]["v"]


WORDS = st.lists(
    st.sampled_from(
        [
            ["--port", "8000"],
            ["--max-model-len", "8192"],
            ["--max_model_len=16384"],
            ["--gpu-memory-utilization", "0.9"],
            ["--enforce-eager"],
            ["--num-gpu-blocks-override", "100"],
            ["--served-model-name", "a", "b c"],
            ["--chat-template", "{{ x }} # 'y'"],
            ["--limit-mm-per-prompt", '{"image": 4}'],
        ]
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda words: words[0].split("=")[0].replace("_", "-"),
)
LAYOUTS = ("block", "flow", "plain", "single", "double", "folded", "literal")


def laid_out(words: list[str], layout: str) -> str:
    """A compose file with the command in one of YAML's forms."""
    import json

    text = shlex.join(words)
    command = {
        "block": "".join(f"\n      - {json.dumps(word)}  # {k}" for k, word in enumerate(words)),
        "flow": " [" + ", ".join(json.dumps(word) for word in words) + "]",
        "plain": f" {text}",
        "single": " '" + text.replace("'", "''") + "'",
        "double": f" {json.dumps(text)}",
        "folded": " >-\n      " + text.replace(" --", "\n      --"),
        "literal": " |\n      " + text.replace(" --", " \\\n      --"),
    }[layout]
    return f"services:\n  v:\n    image: vllm/vllm-openai\n    command:{command}\n    ipc: host\n"


def words_of(text: str) -> list[str]:
    command = yaml.safe_load(text)["services"]["v"]["command"]
    if isinstance(command, list):
        return command
    return shlex.split(command.replace("\\\n", " "))


@settings(max_examples=60, deadline=None)
@given(
    WORDS, st.sampled_from(LAYOUTS), st.sets(st.sampled_from([LENGTH, SHARE, EAGER, BLOCKS_OUT]))
)
def test_any_layout_gets_the_values_and_keeps_the_rest(groups, layout, changes):
    words = ["--model", "m", *(word for group in groups for word in group)]
    text = laid_out(words, layout)
    try:
        if words_of(text) != words:
            return  # this layout can't hold these words
    except (yaml.YAMLError, ValueError):
        return
    new = rewrite(text, changes).text
    expected = {"--max-model-len": "4096", "--gpu-memory-utilization": "0.85"}
    wanted = [change.flag for change in changes if change.to is not None]
    found = " ".join(words_of(new)).replace("_", "-").replace("=", " ")
    for flag in wanted:
        assert f"{flag} {expected.get(flag, '')}".strip() in found
    if BLOCKS_OUT in changes:
        assert "--num-gpu-blocks-override" not in found
    untouched = [
        group
        for group in groups
        if group[0].split("=")[0].replace("_", "-") not in {change.flag for change in changes}
    ]
    left = words_of(new)
    for group in untouched:
        start = left.index(group[0])
        assert left[start : start + len(group)] == group
    assert yaml.safe_load(new)["services"]["v"]["ipc"] == "host"
    assert rewrite(new, changes).diff == ""


# --- Kubernetes -----------------------------------------------------------------------------------------------


def test_a_shell_string_in_a_list_and_the_rest_of_the_documents():
    removed, added = lines("deployment.yaml", LENGTH, IMAGES)
    assert len(removed) == len(added) == 1
    old, new = (
        list(yaml.safe_load_all(text))
        for text in (
            sample("deployment.yaml"),
            rewrite(sample("deployment.yaml"), [LENGTH, IMAGES]).text,
        )
    )
    assert new[0] == old[0]
    assert new[2] == old[2]
    script = new[1]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    assert shlex.split(script)[-4:] == [
        "--max-model-len",
        "4096",
        "--limit-mm-per-prompt",
        '{"image": 1}',
    ]


def test_the_memory_volume_and_a_named_variable():
    assert lines("deployment.yaml", SHM, ALLOCATOR) == (
        ['          sizeLimit: "2Gi"'],
        [
            '          sizeLimit: "16Gi"',
            "        - name: PYTORCH_CUDA_ALLOC_CONF",
            '          value: "expandable_segments:True"',
        ],
    )


def test_memory_limit():
    memory = Change(flag="--memory", to="64g")
    assert lines("deployment.yaml", memory) == (
        ["            memory: 20G"],
        ["            memory: 64Gi"],
    )


def test_flags_joined_to_their_values_stay_so():
    assert lines("statefulset.yaml", LENGTH, EAGER, Change(flag="--max-num-seqs", to=64)) == (
        ["            - --max-model-len=40960"],
        [
            "            - --max-model-len=4096",
            "            - --enforce-eager",
            "            - --max-num-seqs=64",
        ],
    )


def test_a_pod_without_a_memory_volume_gets_one():
    pod = yaml.safe_load(rewrite(sample("statefulset.yaml"), [SHM]).text)["spec"]["template"][
        "spec"
    ]
    assert pod["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    ]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert "volumeMounts" not in pod["containers"][1]


def test_more_gpus_are_asked_for_in_words():
    result = rewrite(sample("statefulset.yaml"), [Change(flag="--tensor-parallel-size", to=2)])
    assert result.notes == (
        "the container's limit of nvidia.com/gpu must be the tensor parallel size",
    )


def test_a_variable_from_a_secret_is_left():
    result = rewrite(sample("deployment.yaml"), [Change(env="HUGGING_FACE_HUB_TOKEN", to="x")])
    assert result.diff == ""
    assert "reference" in result.notes[0]


def test_a_script_that_exports_the_variable_itself():
    text = (
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: c\n"
        "    image: reg/custom:1\n    command: [sh, -c]\n    args:\n    - >-\n"
        "      export PYTORCH_CUDA_ALLOC_CONF=a:b &&\n      vllm serve m\n"
    )
    assert touched(rewrite(text, [ALLOCATOR]).diff)[1] == [
        "      export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True &&"
    ]
    assert touched(rewrite(text, [ALLOCATOR_OUT]).diff) == (
        ["      export PYTORCH_CUDA_ALLOC_CONF=a:b &&"],
        [],
    )


def test_kserve_and_other_values_with_a_container():
    kserve = (
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata: {name: q}\nspec:\n"
        "  predictor:\n    model:\n      args:\n        - --max-model-len=8192\n"
    )
    assert touched(rewrite(kserve, [LENGTH]).diff)[1] == ["        - --max-model-len=4096"]
    values = 'image:\n  command: ["vllm", "serve", "/data", "--port", "8000"]\nreplicas: 1\n'
    assert touched(rewrite(values, [LENGTH]).diff)[1] == [
        '  command: ["vllm", "serve", "/data", "--port", "8000", "--max-model-len", "4096"]'
    ]


# --- Helm and --config ----------------------------------------------------------------------------------------


def test_the_charts_own_keys_and_extra_arguments():
    assert lines("values.yaml", LENGTH, SHARE, EAGER) == (
        [
            "      maxModelLen: 16384   # tokens",
            '      extraArgs: ["--disable-log-requests", "--gpu-memory-utilization", "0.8"]',
        ],
        [
            "      maxModelLen: 4096   # tokens",
            '      extraArgs: ["--disable-log-requests", "--gpu-memory-utilization", "0.85", "--enforce-eager"]',
        ],
    )


def test_variables_and_shared_memory_of_the_chart():
    assert lines("values.yaml", ALLOCATOR, SHM) == (
        ["    env: []"],
        [
            "    env:",
            "      - name: PYTORCH_CUDA_ALLOC_CONF",
            '        value: "expandable_segments:True"',
            '    shmSize: "16Gi"',
        ],
    )


def test_a_model_of_several():
    assert lines("values-two.yaml", SHARE, LENGTH, service="small") == (
        ['        gpuMemoryUtilization: "0.95"'],
        ['        gpuMemoryUtilization: "0.85"', "        maxModelLen: 4096"],
    )
    with pytest.raises(RewriteError, match="several models"):
        rewrite(sample("values-two.yaml"), [SHARE])


def test_the_chart_mounts_shared_memory_only_for_tensor_parallel():
    result = rewrite(sample("values-two.yaml"), [SHM], service="big")
    assert result.diff == ""
    assert "tensorParallelSize" in result.notes[0]


def test_config_keys_and_a_mapping_as_value():
    assert lines("serve.yaml", LENGTH, EAGER, IMAGES) == (
        ["max-model-len: 32768  # as trained", "limit-mm-per-prompt:", "  image: 4", "  video: 1"],
        [
            "max-model-len: 4096  # as trained",
            "limit-mm-per-prompt: '{\"image\": 1}'",
            "enforce-eager: true",
        ],
    )


def test_config_with_underscores():
    text = "model: m\nmax_model_len: 8192\nenforce_eager: true\n"
    assert rewrite(text, [LENGTH, SHARE, EAGER_OUT]).text == (
        "model: m\nmax_model_len: 4096\ngpu_memory_utilization: 0.85\n"
    )


def test_config_tells_what_belongs_to_the_environment():
    result = rewrite(sample("serve.yaml"), [ALLOCATOR, SHM, Change(action="free the card")])
    assert result.diff == ""
    assert result.held == 0
    assert result.kind is Kind.CONFIG
    assert [note.split()[0] for note in result.notes] == ["start", "start", "free"]


@pytest.mark.parametrize(
    ("name", "service", "command"),
    [
        (
            "compose-list.yaml",
            None,
            (
                "vllm serve --model Qwen/Qwen3-32B --tensor-parallel-size 2 --max-model-len 32768 "
                "--served-model-name chat"
            ),
        ),
        (
            "compose-strings.yaml",
            "chat",
            "vllm serve /models/chat --max-model-len 8192 --port 8000",
        ),
        ("compose-strings.yaml", None, None),
        (
            "statefulset.yaml",
            None,
            "vllm serve --model=Qwen/Qwen3-8B --max-model-len=40960 --gpu-memory-utilization=0.9",
        ),
        (
            "values.yaml",
            None,
            (
                "vllm serve meta-llama/Llama-3.1-8B-Instruct --no-enable-chunked-prefill "
                "--no-enable-prefix-caching --max-model-len 16384 --dtype bfloat16 --tensor-parallel-size 2 "
                "--disable-log-requests --gpu-memory-utilization 0.8"
            ),
        ),
        (
            "serve.yaml",
            None,
            (
                "vllm serve Qwen/Qwen2.5-VL-7B-Instruct --host 127.0.0.1 --port 6379 --uvicorn-log-level info "
                "--max-model-len 32768 --gpu-memory-utilization 0.9 "
                '--limit-mm-per-prompt \'{"image": 4, "video": 1}\' --enable-prefix-caching'
            ),
        ),
    ],
)
def test_the_command_that_a_file_stands_for(name, service, command):
    assert command_in_file(sample(name), name, service=service) == command
