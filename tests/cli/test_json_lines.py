"""A JSON log line stays one JSON object of a bounded size, also if a program logs hostile values."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from everbeat.cli.logs import JsonFormatter
from everbeat.runtime.log_pump import _MOST_PUMPED_BYTES
from tests.variants import long_except

TASK = "019a2f3e-0000-7000-8000-000000000000"


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def logged(**fields: object) -> dict[str, Any]:
    record = logging.makeLogRecord(
        {"name": "orders", "msg": "packing", "process": 7, "task_id": TASK} | fields
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    return found


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        ([1.0, float("inf")], "[1.0, inf]"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (endless(), "[[...]]"),
        (Unprintable(), "(cannot be converted to text)"),
    ],
)
def test_a_value_that_json_cannot_hold_leaves_the_other_fields_as_they_are(value: object, shown: str) -> None:
    found = logged(value=value, other=[1, "two"])
    assert found["fields"] == {"task_id": TASK, "value": shown, "other": [1, "two"]}
    assert (found["pid"], found["message"]) == (7, "packing")


@pytest.mark.parametrize(
    "character", long_except(["x", "\x01", "\u202e", "\U0001f600", '"'], "x", "\U0001f600")
)
def test_a_huge_line_is_cut_and_stays_an_object_that_the_log_pump_passes_on(character: str) -> None:
    huge = character * 3_000_000
    record = logging.makeLogRecord(
        {"name": "orders", "msg": huge, "process": 7, "task_id": TASK, "stack_info": huge, "huge": huge}
    )
    record.__dict__ |= {f"more{n}": huge[:5_000] for n in range(300)}
    record.__dict__ |= {"small": [1, 2], huge: 1}
    line = JsonFormatter().format(record)
    assert len(line) < _MOST_PUMPED_BYTES
    found = json.loads(line)
    assert found["message"].startswith(character * 1_000)
    assert found["message"].endswith("characters cut]")
    assert (found["pid"], found["fields"]["task_id"]) == (7, TASK)
