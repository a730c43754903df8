"""Test the commands of `everbeat schedules`: what they print, change and refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from rich.cells import cell_len

from everbeat import App
from everbeat.cli.failures import ExitCode
from everbeat.domain.schedule.model import Timing
from everbeat.domain.schedule.ticks import decide as decision_of
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.cli.terminal import pages_at_terminal
from tests.client.conftest import app
from tests.store.conftest import StoreHarness
from tests.store.scheduling import HOUR, decide, decision, due_one, make_due, put, sent
from tests.variants import every_nth_quick

pytestmark = pytest.mark.usefixtures("migrated")
__all__ = ["app"]

BERLIN = ["--cron", "30 2 * * *", "--timezone", "Europe/Berlin", "--since", "2026-03-28T00:00:00Z"]


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        made.supervisor("s1", "w1")
        yield made
        made.database.close()


def passed(db: StoreHarness, name: str = "hourly", *, by: timedelta = HOUR) -> None:
    """Let a scheduler decide the ticks of the past `by`."""
    db.connection.execute(
        db.plain(
            "update {schema}.schedules set decided_to = statement_timestamp() - %s, next_at = statement_timestamp() where name = %s"
        ),
        [by, name],
    )
    decide(db, decision_of(due_one(db, name), installation="i"))


def one(everbeat: Command, name: str = "hourly") -> dict[str, Any]:
    """Return the schedule as `show --json` prints it."""
    return dict(everbeat("schedules", "show", name, "--json").assert_code(0).document)


def declared(db: StoreHarness, name: str = "hourly") -> None:
    db.connection.execute(
        db.plain("update {schema}.schedules set owner = 'shop', declaration = 'x' where name = %s"), [name]
    )


def test_next_shows_the_ticks_of_a_cron_expression_without_a_database(everbeat: Command) -> None:
    nowhere = {"EVERBEAT_DATABASE_URL": None, "EVERBEAT_SCHEMA": None}
    shown = everbeat("schedules", "next", *BERLIN, "-n", "2", **nowhere).assert_code(0).out
    assert re.findall(r"(?m)^\w{3} (\S+ \S+)  (\S+ \S+)", shown) == [
        ("2026-03-28 02:30:00+01:00", "2026-03-28 01:30:00Z"),
        ("2026-03-29 03:00:00+02:00", "2026-03-29 01:00:00Z"),  # the clock skips 02:30
    ]
    document = everbeat("schedules", "next", *BERLIN, "-n", "2", "--json", **nowhere).assert_code(0).document
    assert document == {
        "timing": "30 2 * * * in Europe/Berlin",
        "timezone": "Europe/Berlin",
        "ticks": [
            {"at": "2026-03-28T01:30:00Z", "local": "2026-03-28T02:30:00+01:00"},
            {"at": "2026-03-29T01:00:00Z", "local": "2026-03-29T03:00:00+02:00"},
        ],
    }


def test_next_shows_the_ticks_of_an_interval_with_its_offset(everbeat: Command) -> None:
    words = ["--every", "6h", "--offset", "30m", "--since", "2026-01-01T00:00:00Z", "-n", "2", "--json"]
    document = everbeat("schedules", "next", *words, EVERBEAT_DATABASE_URL=None).assert_code(0).document
    assert [each["at"] for each in document["ticks"]] == ["2026-01-01T00:30:00Z", "2026-01-01T06:30:00Z"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the name of a schedule, or --cron or --every"),
        (["--cron", "0 * * * *", "--every", "1h"], "--cron and --every exclude each other"),
        (["hourly", "--cron", "0 * * * *"], "give either a name, or --cron"),
        (["--cron", "30 2 31 2 *"], "--cron = '30 2 31 2 *'"),
        (["--cron", "0 0 1--1000000 * *"], "--cron = '0 0 1--1000000 * *'"),
        (["--cron", "* " * 200], "at most 200 are allowed"),
        (["--cron", "0 * * * *", "--timezone", "Europe/Berln"], "write 'Europe/Berlin'"),
        (["--every", "0s"], "--every"),
        (["--cron", "0 * * * *", "--since", "soon"], "--since 'soon' is not a time"),
    ],
)
def test_next_rejects_wrong_options_and_names_them(everbeat: Command, words: list[str], said: str) -> None:
    answer = everbeat("schedules", "next", *words, EVERBEAT_DATABASE_URL=None)
    assert said in " ".join(answer.assert_code(ExitCode.USAGE).err.split())


def test_the_default_command_lists_schedules_with_their_latest_ticks(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    put(db, "daily", timing=Timing(cron=("30 2 * * *",), timezone="Europe/Berlin"))
    put(db)
    passed(db)
    app.pause_schedule("daily")
    out = everbeat("schedules").assert_code(0).out
    assert re.search(r"(?m)^daily +PAUSED +30 2 \* \* \* in Europe/Berlin ", out)
    assert re.search(r"(?m)^hourly +ACTIVE +every 1h .* SENT +PENDING +1 +work$", out)
    names = [each["name"] for each in everbeat("schedules", "--json").assert_code(0).document["schedules"]]
    assert names == ["daily", "hourly"]


def test_the_list_shows_that_the_last_run_failed(everbeat: Command, db: StoreHarness) -> None:
    put(db)
    passed(db)
    (claimed,) = db.claim("w1", names=("work",))
    assert db.start(claimed) == ["started"]
    db.settle(claimed, "FAILED", error=b'{"code": "REFUSED", "message": "no"}')
    seen = make_due(db)
    decide(db, decision(seen, sent(seen, 5)))  # its next run has not ended
    assert re.search(r"(?m)^hourly +ACTIVE .* FAILED +2 +work$", everbeat("schedules").assert_code(0).out)
    (document,) = everbeat("schedules", "--json").assert_code(0).document["schedules"]
    assert document["last_run"]["state"] == "FAILED"


@pytest.mark.parametrize(
    ("words", "names"),
    every_nth_quick(
        2,
        [
            (["--state", "paused"], ["daily"]),
            (["--prefix", "h"], ["hourly"]),
            (["--task", "other"], []),
            (["--owner", "shop"], ["hourly"]),
            (["--after", "daily"], ["hourly"]),
            (["--limit", "1"], ["daily"]),
        ],
    ),
)
def test_the_options_of_the_list_select_schedules(
    everbeat: Command, app: App, db: StoreHarness, words: list[str], names: list[str]
) -> None:
    put(db, "daily")
    put(db)
    declared(db)
    app.pause_schedule("daily")
    answer = everbeat("schedules", "list", *words).assert_code(0)
    assert re.findall(r"(?m)^(daily|hourly) ", answer.out) == names
    assert ("No matching schedules." in answer.err) == (not names)
    assert ("--after daily" in answer.err) == ("--limit" in words)


def test_an_unknown_state_is_rejected_with_the_known_states(everbeat: Command, db: StoreHarness) -> None:
    answer = everbeat("schedules", "list", "--state", "sleeping").assert_code(ExitCode.USAGE)
    assert "--state = 'sleeping'" in answer.err
    assert "RETIRED" in answer.err


def test_show_has_the_rule_the_runs_and_the_ticks_of_a_schedule(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    put(
        db,
        overlap="skip",
        most_runs=9,
        pause_after_failures=3,
        expires_ms=60_000,
        jitter_ms=5_000,
        note="by ann",
    )
    passed(db)
    app.run_schedule("hourly")
    page = everbeat("schedules", "show", "hourly").assert_code(0).out
    for name, value in (
        ("state", "ACTIVE"), ("ticks", "every 1h"), ("task", "work"), ("arguments", '{"n":1}'), ("note", "by ann"), ("overlap", "skip"),
        ("jitter", "5s"), ("most runs", "9"), ("pause after", "3 failures"), ("expires", "1m after the tick"), ("catchup window", "1d"),
    ):  # fmt: skip
        assert re.search(rf"(?m)^{name} +{re.escape(value)}$", page), (name, page)
    assert re.search(r"(?s)\nLive runs\n.* by hand .*\nLatest ticks\n.* SENT .*\nNext ticks\n", page)
    document = one(everbeat)
    assert len(document["runs_live"]) == 2
    assert [each["outcome"] for each in document["ticks"]] == ["SENT"]
    assert len(document["next_ticks"]) == 5


def test_show_still_works_if_the_stored_rule_is_unreadable(everbeat: Command, db: StoreHarness) -> None:
    put(db)
    db.connection.execute(db.plain("update {schema}.schedules set timing = %s"), ['{"every_ms": "often"}'])
    assert re.search(r"(?m)^ticks +unreadable$", everbeat("schedules", "show", "hourly").assert_code(0).out)


def test_ticks_lists_each_tick_with_its_task_or_its_reason(everbeat: Command, db: StoreHarness) -> None:
    put(db)
    passed(db, by=3 * HOUR)
    out = everbeat("schedules", "ticks", "hourly").assert_code(0).out
    assert re.findall(r"(?m) (SENT|MISSED) ", out) == ["SENT", "MISSED", "MISSED"]
    assert len(re.findall(r"(?m) NOT_LATEST$", out)) == 2
    found = (
        everbeat("schedules", "ticks", "hourly", "--json", "--limit", "1").assert_code(0).document["ticks"]
    )
    before = found[0]["at"]
    assert found[0]["outcome"] == "SENT"
    rest = everbeat("schedules", "ticks", "hourly", "--json", "--before", before).document["ticks"]
    assert [each["outcome"] for each in rest] == ["MISSED", "MISSED"]


def test_the_task_of_a_tick_shows_its_schedule_and_its_tick(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    put(db)
    passed(db)
    (tick,) = app.list_ticks("hourly")
    page = everbeat("tasks", "show", str(tick.task_id)).assert_code(0).out
    assert re.search(r"(?m)^schedule +hourly$", page)
    assert re.search(rf"(?m)^tick +{tick.at.astimezone():%Y-%m-%d %H:%M:%S}", page)
    plain = db.send("work")
    assert not re.search(r"(?m)^(schedule|tick) ", everbeat("tasks", "show", str(plain)).assert_code(0).out)


def test_next_of_a_stored_schedule_says_that_a_pause_holds_its_ticks_back(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    put(db, jitter_ms=60_000)
    assert "up to 1m after its tick" in everbeat("schedules", "next", "hourly").assert_code(0).err
    app.pause_schedule("hourly")
    answer = everbeat("schedules", "next", "hourly", "-n", "3").assert_code(0)
    assert len(answer.out.splitlines()) == 4
    assert "The schedule is paused" in answer.err
    document = everbeat("schedules", "next", "hourly", "-n", "3", "--json").document
    assert (document["state"], len(document["ticks"])) == ("PAUSED", 3)


def test_pause_and_resume_change_each_schedule_and_report_unknown_names(
    everbeat: Command, db: StoreHarness
) -> None:
    put(db)
    put(db, "daily")
    asked = datetime.now(UTC)
    answer = everbeat("schedules", "pause", "hourly", "nightly", "daily", "--reason", "move", "--until", "2h")
    assert answer.assert_code(ExitCode.NOT_FOUND).out.count("is paused since") == 2
    assert "Schedule 'nightly' is not known here" in answer.err
    found = one(everbeat)
    assert (found["state"], found["pause_reason"], found["paused_by"]) == ("PAUSED", "move", "operator")
    resume_at = datetime.fromisoformat(found["resume_at"])
    assert timedelta(hours=2) <= resume_at - asked < timedelta(hours=2, minutes=5)
    again = everbeat("schedules", "pause", "hourly", "--reason", "other").assert_code(0)
    assert "was paused already" in again.out
    assert "The earlier pause is unchanged" in again.err
    assert everbeat("schedules", "resume", "hourly").assert_code(0).out == "schedule hourly is resumed\n"
    assert one(everbeat)["state"] == "ACTIVE"
    assert "is not paused" in everbeat("schedules", "resume", "hourly").assert_code(ExitCode.FAILED).err


def test_run_sends_a_task_outside_the_ticks(everbeat: Command, app: App, db: StoreHarness) -> None:
    put(db)
    (run,) = everbeat("schedules", "run", "hourly", "--json").assert_code(0).document["runs"]
    found = app.info(UUID(run["task_id"]))
    assert (found.name, found.schedule, found.tick) == ("work", "hourly", None)
    assert app.list_ticks("hourly") == []


def test_delete_refuses_a_schedule_that_code_declares(everbeat: Command, app: App, db: StoreHarness) -> None:
    put(db)
    put(db, "daily")
    declared(db)
    answer = everbeat("schedules", "delete", "hourly", "daily").assert_code(ExitCode.FAILED)
    assert answer.out == "schedule daily is deleted\n"
    assert "declared in the code of app 'shop'" in answer.err
    assert [each.name for each in app.list_schedules()] == ["hourly"]


def test_backfill_sends_each_missing_tick_once_and_a_dry_run_sends_none(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    put(db)
    words = ["backfill", "hourly", "--since", "2026-01-01T00:00:00Z", "--until", "2026-01-01T03:00:00Z"]
    hours = [f"2026-01-01 0{hour}:00:00Z" for hour in range(3)]
    dry = everbeat("schedules", *words, "--dry-run").assert_code(0)
    assert (dry.out.splitlines(), dry.err) == (hours, "Dry run: 3 ticks would be sent.\n")
    assert app.list_ticks("hourly") == []
    assert everbeat("schedules", *words).assert_code(0).err == "Sent 3 ticks.\n"
    assert len(app.list_ticks("hourly")) == 3
    document = everbeat("schedules", *words, "--json").assert_code(0).document
    assert document == {"schedule": "hourly", "dry_run": False, "ticks": []}


def test_backfill_reports_wrong_options_by_their_names(everbeat: Command, db: StoreHarness) -> None:
    put(db)
    since = ["--since", "2026-01-01T00:00:00Z"]
    for words, said in (
        ([*since, "--until", "2025-01-01T00:00:00Z"], "--since"),
        ([*since, "--until", "2026-01-02T00:00:00Z", "--overlap", "skip"], "--overlap"),
        (["--since", "never"], "--since"),
    ):
        assert said in everbeat("schedules", "backfill", "hourly", *words).assert_code(ExitCode.USAGE).err


def test_explain_accepts_the_name_of_a_schedule(everbeat: Command, app: App, db: StoreHarness) -> None:
    put(db)
    app.pause_schedule("hourly", reason="move")
    page = everbeat("explain", "schedule:hourly").assert_code(0).out
    assert re.search(r"(?m)^schedule +hourly$", page)
    assert re.search(r"(?m)^SCHEDULE_PAUSED  it was paused by operator: move", page)
    assert "try: everbeat schedules resume hourly" in page
    found = everbeat("explain", "schedule:hourly", "--json").assert_code(0).document["explanation"]
    assert (found["schedule"], found["reasons"][0]["code"]) == ("hourly", "SCHEDULE_PAUSED")
    unknown = everbeat("explain", "schedule:nightly").assert_code(ExitCode.NOT_FOUND)
    assert "Schedule 'nightly' is not known here" in unknown.err


def test_the_tables_fit_a_terminal_of_80_columns(everbeat: Command, app: App, db: StoreHarness) -> None:
    name = "send-the-weekly-digest-of-the-european-region-to-customer-42"
    put(
        db,
        name,
        timing=Timing(cron=("30 2 * * *", "15 4 * * 1-5"), timezone="America/Argentina/Buenos_Aires"),
    )
    passed(db, name, by=timedelta(days=3))
    app.run_schedule(name)
    pages = [
        ["schedules"], ["schedules", "show", name], ["schedules", "ticks", name], ["schedules", "next", name],
        ["explain", f"schedule:{name}"], ["schedules", "next", *BERLIN],
    ]  # fmt: skip
    for words, page in zip(
        pages,
        pages_at_terminal(pages, folder=everbeat.folder, environment=everbeat.environment, columns=80),
        strict=True,
    ):
        assert [line for line in page.splitlines() if cell_len(line) > 80] == [], (words, page)
        assert "Traceback" not in page
        assert name in page or "--cron" in words or words[1] in ("ticks", "next"), page


def test_names_cannot_send_control_characters_to_a_terminal(everbeat: Command, db: StoreHarness) -> None:
    put(db, note="a\x1b]0;title\x07b")
    for words in (["schedules"], ["schedules", "show", "hourly"], ["explain", "schedule:hourly"]):
        assert "\x1b" not in everbeat(*words).assert_code(0).out, words
    assert json.loads(everbeat("schedules", "--json").out)["schedules"][0]["note"] == "a\x1b]0;title\x07b"
