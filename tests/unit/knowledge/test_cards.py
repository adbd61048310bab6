"""Cards are read whole or refused with every reason; the shipped ones name classes and patterns that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from diag.errors import RuleFileError
from diag.knowledge.cards import read_card, read_cards
from diag.patterns import found
from diag.resources import data_dir
from diag.rules.load import load_rules

GOOD = """---
id: example-12
kind: issue
title: Two images at once end the server
urls: [https://github.com/example-org/example/issues/12]
class: act.multimodal_encoder
also: [act.prefill]
phase: serving
date: 2026-03-04
reported: "0.17.0"
releases: '>=0.15,<0.20'
hardware: [L4]
flags: [--limit-mm-per-prompt]
symptoms: ['OutOfMemoryError.*vision_tower']
fix: --limit-mm-per-prompt with one image
solved: confirmed
confidence: high
---
## Cause
The encoder runs both images as one batch.

## What fixed it
One image a prompt.
"""


def write(folder: Path, text: str, name: str = "example-12.md") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_card_is_read_with_its_sections(tmp_path: Path):
    card = read_card(write(tmp_path, GOOD))
    assert (card.class_, card.classes) == (
        "act.multimodal_encoder",
        ("act.multimodal_encoder", "act.prefill"),
    )
    assert (card.date, card.reported, card.url) == (
        "2026-03-04",
        "0.17.0",
        "https://github.com/example-org/example/issues/12",
    )
    assert card.section("Cause") == "The encoder runs both images as one batch."
    assert card.section("What did not help") == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("---\nid", "id", "no front matter"),
        ("kind: issue", "kind: rumour", "kind"),
        ("kind: issue", "kind: [", "not YAML"),
        ("solved: confirmed", "solvd: confirmed", "solvd"),
        ("https://github", "http://github", "https://"),
        ("## Cause", "## Reason", "Cause' is missing"),
        ("fix: --limit-mm-per-prompt with one image\n", "", "fix says nothing"),
        ("id: example-12", "id: example-13", "the file is called"),
    ],
)
def test_a_bad_card_is_refused_with_the_reason(tmp_path: Path, old: str, new: str, said: str):
    assert old in GOOD
    with pytest.raises(RuleFileError) as caught:
        read_card(write(tmp_path, GOOD.replace(old, new, 1)))
    assert said in "\n".join(caught.value.problems)


def test_the_problems_of_all_cards_come_together(tmp_path: Path):
    write(tmp_path, GOOD.replace("kind: issue", "kind: rumour"))
    write(tmp_path, "no card", "example-13.md")
    with pytest.raises(RuleFileError) as caught:
        read_cards(tmp_path)
    text = "\n".join(caught.value.problems)
    assert "example-12.md" in text
    assert "example-13.md" in text


def test_the_shipped_cards_name_classes_ranges_and_patterns_that_exist():
    folder = data_dir("corpus") / "cards"
    cards = read_cards(folder)
    classes = {rule.name for rule in load_rules()}
    for card in cards:
        assert set(card.classes) <= classes, card.id
        SpecifierSet(card.releases or "")
        for pattern in card.symptoms:
            found(pattern, "any line")  # raises when RE2 does not take it
    assert len({card.url for card in cards}) == len(cards)
