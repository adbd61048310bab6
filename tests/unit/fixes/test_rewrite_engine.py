from __future__ import annotations

import pytest
import yaml
from rewrite_samples import EAGER, FOLDER, LENGTH, SHARE, sample

from diag.errors import RewriteError
from diag.fixes.rewrite import Kind, command_in_file, detect, engine, rewrite
from diag.fixes.rewrite.model import Seen, Splice
from diag.fixes.rewrite.yamltext import YamlFile, walk

KINDS = {
    "compose-list.yaml": Kind.COMPOSE,
    "compose-folded.yaml": Kind.COMPOSE,
    "compose-strings.yaml": Kind.COMPOSE,
    "deployment.yaml": Kind.KUBERNETES,
    "statefulset.yaml": Kind.KUBERNETES,
    "values.yaml": Kind.HELM,
    "values-two.yaml": Kind.HELM,
    "serve.yaml": Kind.CONFIG,
    "serve.sh": Kind.SHELL,
    "docker-run.sh": Kind.SHELL,
    "vllm.service": Kind.SHELL,
    "Dockerfile": Kind.DOCKERFILE,
    "offline.py": Kind.PYTHON,
    "engine.py": Kind.PYTHON,
}


def test_every_sample_is_known_by_its_content():
    assert {path.name: detect(path.read_text("utf-8")) for path in FOLDER.iterdir()} == KINDS


@pytest.mark.parametrize(
    "text", ["", "hello\n", "a: 1\nb: 2\n", "pip install vllm\n", "{", "\0", "import os\n"]
)
def test_other_texts_are_not_taken_for_a_start_of_vllm(text):
    assert detect(text) is None
    assert command_in_file(text) is None
    with pytest.raises(RewriteError, match="nothing in the file starts vLLM"):
        rewrite(text, [LENGTH])


def test_a_byte_order_mark_stays():
    text = "\ufeff" + sample("statefulset.yaml")
    new = rewrite(text, [LENGTH]).text
    assert new.startswith("\ufeffapiVersion")
    assert new == "\ufeff" + rewrite(text[1:], [LENGTH]).text


@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith("yaml")])
def test_both_loaders_of_pyyaml_tell_the_same_places(name, monkeypatch):
    text = "# é 😀\n" + sample(name)
    found = []
    for loader in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        monkeypatch.setattr("diag.fixes.rewrite.yamltext._LOADER", loader)
        file = YamlFile(text)
        found.append([(path, node.start_mark.index, file.end(node)) for path, node in walk(file)])
    assert found[0] == found[1]


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB + "services: {v: {image: vllm, command: [--model, m]}}\n", "aliases"),
        ("services: &s {v: {image: vllm, command: [--model, m], x: *s}}\n", "contains itself"),
        ("a: " + "[" * 5000, "too deep|nesting depth"),
        ("- " * 5000, "too deep"),
        ("services:\n\tv:\n\t\timage: vllm\n", r"no valid YAML \(line 2\)"),
        ("a: b\n" * 100_000, "300,000 characters"),
        ("a: [" + "b, " * 70_000 + "]", "too large"),
        ("services: {v: {image: vllm, command: !!python/object:os.system x}}\n", "changed safely"),
    ],
)
def test_hostile_yaml_is_refused(text, problem):
    with pytest.raises(RewriteError, match=problem):
        rewrite(text, [LENGTH], name="x.yaml")


def test_an_edit_that_touches_more_is_refused(monkeypatch):
    text = "vllm serve m --port 1\n"
    good = engine._EDITORS[Kind.SHELL]

    def careless(file, change, service):
        return [*good.edit(file, change, service), Splice(20, 21, "2")]

    monkeypatch.setitem(
        engine._EDITORS, Kind.SHELL, engine._Editor(careless, good.seen, good.arguments)
    )
    with pytest.raises(RewriteError, match="other words of the command"):
        rewrite(text, [LENGTH])


def test_an_edit_that_misses_the_value_is_refused(monkeypatch):
    good = engine._EDITORS[Kind.SHELL]
    monkeypatch.setitem(
        engine._EDITORS,
        Kind.SHELL,
        engine._Editor(
            lambda *_: [Splice(0, 0, "A=1 ")], lambda *_: Seen(words=("x",)), good.arguments
        ),
    )
    with pytest.raises(RewriteError, match="--max-model-len would not get its value"):
        rewrite("vllm serve m\n", [LENGTH])


def test_the_diff_is_one_that_patch_takes():
    result = rewrite("vllm serve m", [SHARE, EAGER], name="run.sh")
    assert result.diff == (
        "--- a/run.sh\n+++ b/run.sh\n@@ -1 +1 @@\n-vllm serve m\n\\ No newline at end of file\n"
        "+vllm serve m --gpu-memory-utilization 0.85 --enforce-eager\n\\ No newline at end of file\n"
    )
    assert result.held == 2
