"""The message catalogue: rows found on a line, groups converted by their suffix, rows that can't be right."""

from __future__ import annotations

import pytest
from log_samples import GIB, MIB, line, small_catalogue

from diag.errors import RuleFileError, UnitError
from diag.facts import catalogue as cataloguing
from diag.facts.catalogue import MAX_HITS, catalogue, convert, load, message_files, scan_patterns
from diag.patterns import MAX_TEXT, compile_pattern, required_literals
from diag.resources import data_dir
from diag.terms import Phase, RowRole


@pytest.mark.parametrize(
    ("group", "text", "value"),
    [
        ("kv_gib", "8.60", 9234179686),  # 8.60 * 2**30 = 9234179686.4
        ("kv_gib", "-26.31", -28250147389),  # -26.31 * 2**30 = -28250147389.4
        ("graph_mib", "305", 305 * MIB),
        ("x_kib", "64", 65536),
        ("x_bytes", "24180219801", 24180219801),
        ("tried_size", "432.00 MiB", 432 * MIB),
        ("tried_size", "2.00 GB", 2 * 10**9),
        ("pool_tokens", "1,052,704", 1052704),
        ("gpu_blocks", "2358", 2358),
        ("waiting_count", "12", 12),
        ("asked_len", "163840", 163840),
        ("load_s", "20.67", 20.67),
        ("usage_pct", "99.1", 99.1),
        ("fits_x", "284.25", 284.25),
        ("gmu_ratio", "0.9", 0.9),
        ("version", "0.11.0", "0.11.0"),
        ("model_name", "8", "8"),
    ],
)
def test_a_group_is_converted_by_its_suffix(group, text, value):
    converted = convert(group, text)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("group", "text"), [("kv_gib", "1.2.3"), ("a_size", "4 bananas"), ("n_count", "-")]
)
def test_a_text_that_does_not_fit_the_unit(group, text):
    with pytest.raises(UnitError):
        convert(group, text)


def found(known, text, **fields):
    return [(event.row, dict(event.values)) for event in known.find(line(text, **fields))]


def test_a_row_gives_an_event_with_its_values():
    known = small_catalogue(
        {
            "id": "kv.size",
            "pattern": r"KV cache size: (?P<kv_tokens>[\d,]+) tokens",
            "phase": "kv_alloc",
        }
    )
    (event,) = known.find(line("GPU KV cache size: 62,608 tokens", number=7))
    assert (event.row, event.values, event.phase) == (
        "kv.size",
        {"kv_tokens": 62608},
        Phase.KV_ALLOC,
    )
    assert event.line.number == 7


def test_groups_that_took_no_part_are_left_out():
    known = small_catalogue(
        {"id": "a", "pattern": r"took (?P<a_gib>[\d.]+) GiB(?: and (?P<b_s>\d+) s)?"}
    )
    assert found(known, "took 1 GiB") == [("a", {"a_gib": GIB})]


def test_a_row_is_found_as_often_as_it_occurs_within_bounds():
    known = small_catalogue({"id": "p", "pattern": r"Process (?P<pid_count>\d+) has"})
    assert found(known, "Process 1 has, Process 2 has") == [
        ("p", {"pid_count": 1}),
        ("p", {"pid_count": 2}),
    ]
    assert len(found(known, "Process 3 has " * 100)) == MAX_HITS


@pytest.mark.parametrize("number", ["1.2.3", "9" * 400])
def test_a_number_that_is_none_drops_that_value_alone(number):
    known = small_catalogue(
        {"id": "bad", "pattern": r"takes (?P<a_gib>[\d.]+) GiB"}, {"id": "good", "pattern": "GiB"}
    )
    assert found(known, f"takes {number} GiB") == [("bad", {}), ("good", {})]


def test_only_the_start_of_a_huge_line_is_looked_at():
    known = small_catalogue({"id": "n", "pattern": "needle"})
    assert found(known, "x" * (MAX_TEXT - 6) + "needle") == [("n", {})]
    assert found(known, "x" * MAX_TEXT + "needle") == []


@pytest.mark.parametrize(
    ("level", "source", "row_level", "role"),
    [
        ("ERROR", "core.py:1", None, RowRole.CAUSE),
        (None, None, None, RowRole.CAUSE),
        ("INFO", "core.py:1", None, RowRole.WARNING),
        ("WARNING", "core.py:1", None, RowRole.WARNING),
        ("DEBUG", "core.py:1", None, RowRole.WARNING),
        ("WARNING", "core.py:1", "warning", RowRole.CAUSE),  # a row that is a warning by nature
        ("INFO", None, None, RowRole.CAUSE),  # no Python logger said so
    ],
)
def test_a_failure_in_the_words_of_a_calm_logger_is_none(level, source, row_level, role):
    known = small_catalogue(
        {"id": "f", "pattern": "out of memory", "role": "cause", "level": row_level}
    )
    (event,) = known.find(line("out of memory", level=level, source=source))
    assert event.role is role


ROWS = (
    {"id": "a", "pattern": r"first words of (?P<n_count>\d+)", "literals": ["first words of "]},
    {"id": "b", "pattern": r"\d+ GiB"},
    {"id": "c", "pattern": "one|other", "literals": ["one", "other"]},
)


def test_many_lines_give_what_each_gives_alone():
    """Fixed texts are looked for in blocks of lines; the block's border must not matter."""
    known = small_catalogue(*ROWS)
    texts = [
        "first words of 3 GiB and one",
        "nothing",
        "",
        "other first words of 4, first words of 5",
        "7 GiB",
    ]
    lines = [line(text, number) for number, text in enumerate(texts, 1)]
    wanted = [(1, "a"), (1, "b"), (1, "c"), (4, "a"), (4, "a"), (4, "c"), (5, "b")]
    for size in (1 << 20, 30, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cataloguing, "BLOCK", size)
            assert [(event.line.number, event.row) for event in known.events(lines)] == wanted
    assert [event.row for one in lines for event in known.find(one)] == [row for _, row in wanted]


def test_no_line_no_event():
    assert list(small_catalogue(*ROWS).events([])) == []


def test_every_shipped_match_holds_one_of_its_rows_literals():
    """The literals decide whether a row's pattern is tried at all."""
    for name, body in message_files(data_dir("rules")):
        for row in body["messages"]:
            literals = required_literals(row["pattern"])
            examples = row.get("example") or ()
            for example in [examples] if isinstance(examples, str) else examples:
                for text in example.split("\n"):
                    if literals and compile_pattern(row["pattern"]).search(text):
                        assert any(literal in text for literal in literals), f"{name}: {row['id']}"


def test_rows_that_are_off_are_reported_together():
    bad = {
        "origin": "x",
        "messages": [
            {"id": "a.b", "role": "info", "means": "x"},
            {"id": "c.d", "pattern": "x", "role": "nonsense", "means": "x"},
            {"id": "e.f", "pattern": "x", "role": "info", "means": "x", "phase": "lunch"},
        ],
    }
    with pytest.raises(RuleFileError) as caught:
        load([("vllm.yaml", bad)], {})
    assert len(caught.value.problems) == 3
    assert "messages/vllm.yaml: row a.b: KeyError('pattern')" in caught.value.problems[0]


@pytest.mark.parametrize("body", [None, {"origin": "x"}, {"origin": "x", "messages": ["text"]}])
def test_a_file_of_another_shape_is_reported(body):
    with pytest.raises(RuleFileError):
        load([("vllm.yaml", body)], {})


def test_periodic_statistics_are_no_reason_to_keep_a_line():
    stats = {row.pattern for row in catalogue().rows if row.role is RowRole.STAT}
    assert stats
    assert not stats & set(scan_patterns())
