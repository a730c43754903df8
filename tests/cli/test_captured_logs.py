"""Test `everbeat logs`: text for people, JSON for programs, and nothing that a hostile log line can forge."""

from __future__ import annotations

from datetime import UTC, datetime

from everbeat.domain.task.captured_log import LogLine, UnwrittenPart
from everbeat.store import attempt_logs
from everbeat.store.attempt_logs import LogPlace
from everbeat.store.claims import Claimed
from tests.cli.conftest import Command
from tests.cli.test_task_list import app, db
from tests.store.conftest import StoreHarness

__all__ = ["app", "db"]

AT = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOSTILE = "\x1b[2J\x07[red]bold[/red] :smile: \u202e {{ 1 }} <b>"


def write(db: StoreHarness, held: Claimed, attempt: int, *lines: LogLine, part: int = 0) -> None:
    place = LogPlace(held.id, attempt, held.claim_id)
    db.run(attempt_logs.write_parts([(place, UnwrittenPart(part, list(lines)))]))


def line(number: int, message: str = "packing", *, exception: str | None = None) -> LogLine:
    return LogLine(number, AT, "INFO", "shop", f"{message} {number}", exception)


def test_the_log_of_each_attempt_is_shown_with_what_is_missing(db: StoreHarness, everbeat: Command) -> None:
    held = db.running("w1")
    write(db, held, 1, line(1), line(2, exception="Traceback:\n  ValueError"))
    write(db, held, 1, line(1_503), line(1_504), part=4)
    write(db, held, 2, line(1, "again"))
    shown = everbeat("logs", str(held.id)).assert_code(0).out.splitlines()
    assert [each.partition("INFO    ")[2] or each for each in shown] == [
        "", "Attempt 1", "shop: packing 1", "shop: packing 2", "  Traceback:", "    ValueError", "… 1,500 lines not kept …",
        "shop: packing 1503", "shop: packing 1504", "", "Attempt 2", "shop: again 1",
    ]  # fmt: skip
    document = everbeat("logs", str(held.id), "--attempt", "1", "--json").assert_code(0).document
    (log,) = document["logs"]
    assert (document["id"], log["attempt"], log["dropped"]) == (str(held.id), 1, 1_500)
    assert [each["number"] for each in log["lines"]] == [1, 2, 1_503, 1_504]
    assert log["lines"][1]["exception"] == "Traceback:\n  ValueError"
    assert log["lines"][0]["at"] == "2030-01-01T12:00:00Z"


def test_a_task_without_a_captured_log_is_reported(db: StoreHarness, everbeat: Command) -> None:
    held = db.running("w1")
    answer = everbeat("logs", str(held.id)).assert_code(0)
    assert answer.out == ""
    assert "The task has no captured log" in answer.err
    assert "Attempt 3 has no captured log" in everbeat("logs", str(held.id), "--attempt", "3").err
    assert everbeat("logs", str(held.id), "--json").assert_code(0).document["logs"] == []
    assert everbeat("logs", str(held.id), "--attempt", "0").assert_code(2)


def test_hostile_lines_are_shown_as_text(db: StoreHarness, everbeat: Command) -> None:
    held = db.running("w1")
    name = f"{HOSTILE}\nAttempt 9"
    hostile = LogLine(
        1, AT, name, name, f"{HOSTILE}\n\nAttempt 9\n2030-01-01 INFO forged", f"{HOSTILE}\nAttempt 9"
    )
    write(db, held, 1, hostile)
    shown = everbeat("logs", str(held.id)).assert_code(0).out
    assert not set("\x1b\x07\u202e") & set(shown)
    assert shown.splitlines()[:2] == ["", "Attempt 1"]
    assert [each for each in shown.splitlines()[3:] if not each.startswith("  ")] == []
    assert "\\x1b[2J\\x07[red]bold[/red] :smile: \\u202e {{ 1 }} <b>" in shown
    document = everbeat("logs", str(held.id), "--json").assert_code(0)
    assert not set("\x1b\x07\u202e") & set(document.out)
    assert document.document["logs"][0]["lines"][0]["message"] == hostile.message


def test_a_row_that_another_program_has_changed_costs_only_its_own_lines(
    db: StoreHarness, everbeat: Command
) -> None:
    held = db.running("w1")
    write(db, held, 1, line(1))
    write(db, held, 1, line(2), part=1)
    for value in ('{"a": 1}', "[[]]", '[{"number": "x"}]', "null"):
        change = "update {schema}.attempt_logs set lines = %s::json where part = 0"
        db.connection.execute(db.plain(change), [value])
        (log,) = everbeat("logs", str(held.id), "--json").assert_code(0).document["logs"]
        assert ([each["number"] for each in log["lines"]], log["dropped"]) == ([2], 1)
        assert "1 line not kept" in everbeat("logs", str(held.id)).assert_code(0).out
