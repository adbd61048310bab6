"""The data files: one bundle of all YAML, kept until a file changes; a broken file is named with its line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from diag import resources
from diag.errors import RuleFileError
from diag.resources import build_bundle, data_dir, data_names, read_data, read_yaml, yaml_files

ROW = "- {id: a.b, pattern: 'KV cache (?P<n>\\d+)', role: info, means: x, example: KV cache 3, values: {n: 3}}\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small checkout with its own cache folder."""
    root = tmp_path / "checkout"
    (root / "rules" / "messages").mkdir(parents=True)
    (root / "corpus").mkdir()
    (root / "rules" / "messages" / "vllm.yaml").write_text(f"origin: vllm\nmessages:\n{ROW}")
    (root / "rules" / "sites.yaml").write_text("sites: {one: {frames: [x]}}\n")
    (root / "corpus" / "gpus.yaml").write_text("gpus: [1]\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "oomdoc" / "bundle").glob("*"))


def write_later(path: Path, text: str) -> None:
    """Write, and make sure that the file's time differs whatever the file system's clock."""
    path.write_text(text)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))


def test_the_bundle_holds_every_file_by_its_path(tree):
    bundle = json.loads(build_bundle(tree))
    assert list(bundle) == ["corpus/gpus.yaml", "rules/messages/vllm.yaml", "rules/sites.yaml"]
    assert bundle["corpus/gpus.yaml"] == {"gpus": [1]}


def test_rows_lose_their_examples_and_gain_their_clauses(tree):
    (row,) = json.loads(build_bundle(tree))["rules/messages/vllm.yaml"]["messages"]
    assert row["clauses"] == [["KV cache "]]
    assert not {"example", "values"} & set(row)


def test_the_bundle_is_kept_and_used_again(tree, tmp_path, monkeypatch):
    first = resources._cached(tree)
    assert len(kept(tmp_path)) == 1
    monkeypatch.setattr(resources, "build_bundle", lambda root: pytest.fail("built twice"))
    assert resources._cached(tree) == first


def test_a_changed_file_makes_it_anew_and_removes_the_old(tree, tmp_path):
    resources._cached(tree)
    before = kept(tmp_path)
    write_later(tree / "corpus" / "gpus.yaml", "gpus: [2]\n")
    assert resources._cached(tree)["corpus/gpus.yaml"] == {"gpus": [2]}
    after = kept(tmp_path)
    assert len(after) == 1
    assert after != before


@pytest.mark.parametrize("change", ["added", "removed"])
def test_an_added_or_removed_file_makes_it_anew(tree, change):
    before = resources._cached(tree)
    if change == "added":
        (tree / "rules" / "new.yaml").write_text("a: 1\n")
    else:
        (tree / "corpus" / "gpus.yaml").unlink()
    after = resources._cached(tree)
    assert set(before) ^ set(after) == {
        "rules/new.yaml" if change == "added" else "corpus/gpus.yaml"
    }


def test_no_part_written_files_stay_behind(tree, tmp_path):
    resources._cached(tree)
    assert [path.suffix for path in kept(tmp_path)] == [".json"]


def test_a_cache_that_cannot_be_written_is_passed_over(tree, tmp_path, monkeypatch):
    (tmp_path / "blocked").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    assert resources._cached(tree)["corpus/gpus.yaml"] == {"gpus": [1]}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_folder_without_write_permission_is_passed_over(tree, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert resources._cached(tree)["corpus/gpus.yaml"] == {"gpus": [1]}


def test_a_user_without_a_home_folder_does_without_a_cache(tree, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert resources._cached(tree)["corpus/gpus.yaml"] == {"gpus": [1]}


def test_a_damaged_cache_is_made_anew(tree, tmp_path, monkeypatch):
    resources._cached(tree)
    kept(tmp_path)[0].write_text('{"rules/si')
    assert resources._cached(tree)["corpus/gpus.yaml"] == {"gpus": [1]}


def test_broken_yaml_is_named_with_its_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("a: 1\nb: [1, 2\nc: 3\n")
    with pytest.raises(RuleFileError, match=r"bad\.yaml:3: not YAML"):
        read_yaml(path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(RuleFileError, match=r"bad\.yaml.*not YAML"):
        read_yaml(path)


def test_yaml_can_make_no_objects(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("a: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(RuleFileError, match=r"bad\.yaml:1"):
        read_yaml(path)


def test_every_broken_file_is_reported_together(tree):
    (tree / "rules" / "one.yaml").write_text("a: [\n")
    (tree / "corpus" / "two.yaml").write_text("a: 'open\n")
    with pytest.raises(RuleFileError) as caught:
        build_bundle(tree)
    assert len(caught.value.problems) == 2
    assert {problem.split(":")[0] for problem in caught.value.problems} == {"one.yaml", "two.yaml"}


def test_a_row_without_a_pattern_is_left_to_the_check(tree):
    """The bundle only carries files; what a row must have, the catalogue says when it loads them."""
    (tree / "rules" / "messages" / "vllm.yaml").write_text(
        "origin: x\nmessages:\n- {id: a.b, role: info}\n"
    )
    (row,) = json.loads(build_bundle(tree))["rules/messages/vllm.yaml"]["messages"]
    assert row["clauses"] == []


def test_the_shipped_data_is_complete():
    root = data_dir("rules").parent
    assert {path.relative_to(root).as_posix() for path in yaml_files(root)} == {
        *data_names("rules"), *data_names("corpus")
    }  # fmt: skip
    assert "rules/messages/pytorch.yaml" in data_names("rules/messages")
    assert read_data("rules/sites.yaml")["schema"] == 1


def test_a_name_that_does_not_exist():
    with pytest.raises(KeyError):
        read_data("rules/none.yaml")
    with pytest.raises(FileNotFoundError, match="reinstall"):
        data_dir("nothing")
