from __future__ import annotations

import json
from dataclasses import fields, replace

import jsonschema
import pytest
from report_samples import SAMPLES

from diag.errors import Location, LogReadError
from diag.report.jsonout import dump, error_document, json_schema, to_json, to_jsonl
from diag.report.model import Diagnosis
from diag.terms import Family, Outcome, Phase

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_follow_the_schema(name):
    VALIDATOR.validate(json.loads(to_json(SAMPLES[name]())))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda body: body.update(extra=1), "Additional properties"),
        (lambda body: body.pop("outcome"), "required"),
        (lambda body: body.update(outcome="fine"), "is not one of"),
        (lambda body: body["diagnosis"].update(confidence=1.5), "not valid under any"),
        (lambda body: body["source"].update(lines="many"), "is not of type"),
        (lambda body: body["fixes"][0]["changes"][0].update(from_=1), "Additional properties"),
    ],
)
def test_the_schema_refuses_what_is_wrong(change, why):
    body = json.loads(to_json(SAMPLES["kv_max_len"]()))
    change(body)
    with pytest.raises(jsonschema.ValidationError, match=why):
        VALIDATOR.validate(body)


def test_enums_are_listed():
    defs = SCHEMA["$defs"]
    assert defs["Family"]["enum"] == [family.value for family in Family]
    assert defs["Outcome"]["enum"] == [outcome.value for outcome in Outcome]
    assert defs["Phase"]["enum"] == [phase.value for phase in Phase]


def test_every_object_is_closed():
    for shape in (SCHEMA, *SCHEMA["$defs"].values()):
        if shape.get("type") == "object":
            assert shape["additionalProperties"] is False


def test_key_order_is_that_of_the_model():
    body = json.loads(to_json(SAMPLES["kv_max_len"]()))
    names = [item.name for item in fields(Diagnosis)]
    assert list(body) == ["schema_version", "oomdoc_version", *names]


def test_sizes_are_raw_bytes():
    body = json.loads(to_json(SAMPLES["kv_max_len"]()))
    assert body["ledger"]["ranks"][0]["entries"][0]["bytes"] == round(61.03 * 2**30)


def test_jsonl_is_a_line_each():
    lines = to_jsonl([SAMPLES["hostile"](), SAMPLES["unknown"]()]).splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["memory_failure", "unknown"]


def test_strings_are_clean_and_commands_keep_their_lines():
    body = json.loads(to_json(SAMPLES["hostile"]()))
    text = json.dumps(body, ensure_ascii=False)
    for char in text.replace("\\n", ""):
        assert char.isprintable(), repr(char)
    assert body["fixes"][0]["command"].count("\n") == 2


def test_a_number_json_does_not_know_is_null():
    log = SAMPLES["kv_max_len"]()
    log = replace(log, gmu=replace(log.gmu, suggested=float("nan")))
    assert json.loads(to_json(log))["gmu"]["suggested"] is None


def test_error_document_follows_its_schema():
    error = LogReadError("not text", location=Location("x.log", 3), hint="give the log")
    body = json.loads(dump(error_document("x.log", error), indent=None))
    shape = {**SCHEMA["$defs"]["ErrorDocument"], "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(shape).validate(body)
    assert body["error"] == {"message": "not text", "hint": "give the log", "line": 3}
