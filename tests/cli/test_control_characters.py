"""Test hostile text in every stored text column and in arguments: no command passes control characters to a terminal."""

from __future__ import annotations

import io
import json
import logging
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Json

from everbeat import App
from everbeat.cli.logs import LOG_FORMAT, VisibleFormatter
from everbeat.domain.settings.settings import shown
from everbeat.errors import EverbeatError
from everbeat.errors.wording import on_one_line, visible, visible_json
from everbeat.runtime.events import HookFailed, event_text
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.cli.scene import Scene, played
from tests.cli.terminal import HOSTILE, at_terminal, obeyed
from tests.client.conftest import app
from tests.store.conftest import StoreHarness

__all__ = ["app"]


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    """Return a harness without audit triggers, because the tests replace every stored text."""
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        made.supervisor("s1", "w1", "w2")
        yield made
        made.database.close()


@pytest.fixture
def scene(app: App, db: StoreHarness) -> Scene:
    return played(app, db)


def spoil(connection: psycopg.Connection[Any], schema: str) -> dict[str, list[str]]:
    """Put hostile text into every text and JSON column of the catalogue; return what constraints refused, by table."""
    columns = connection.execute(
        "select table_name, column_name, data_type from information_schema.columns join information_schema.tables"
        " using (table_schema, table_name) where table_schema = %s and table_type = 'BASE TABLE'"
        " and data_type in ('text', 'json') and table_name not in ('schema_versions', 'schema_steps')",
        [schema],
    ).fetchall()
    connection.execute("set session_replication_role = replica")  # foreign keys would keep ids as they are
    refused: dict[str, list[str]] = {}
    for table, column, kind in columns:
        place = sql.Identifier(schema, table)
        if (table, column) in DECODED:
            continue
        try:
            if kind == "text":
                query = sql.SQL("update {} set {} = left({}, 3) || %s").format(
                    place, sql.Identifier(column), sql.Identifier(column)
                )
                connection.execute(query, [HOSTILE])
            else:
                spoil_json(connection, place, column)
        except psycopg.errors.CheckViolation:
            refused.setdefault(table, []).append(column)
    connection.execute("set session_replication_role = origin")
    return refused


def spoil_json(connection: psycopg.Connection[Any], place: sql.Identifier, column: str) -> None:
    name = sql.Identifier(column)
    for row, value in connection.execute(
        sql.SQL("select ctid::text, {} from {} where {} is not null").format(name, place, name)
    ).fetchall():
        connection.execute(
            sql.SQL("update {} set {} = %s where ctid = %s::tid").format(place, name),
            [Json(spoilt(value)), row],
        )


def spoilt(value: Any) -> Any:
    """Return the JSON with hostile text in place of every text."""
    if isinstance(value, dict):
        return {name: spoilt(each) for name, each in value.items()}
    return HOSTILE if isinstance(value, str) else value


# These columns are enumerations or task settings: other text there is a broken row, not a text to show.
DECODED = {
    ("tasks", "policy"),
    ("nodes", "options"),
    ("nodes", "graph"),
    ("recoveries", "was"),
    ("recoveries", "noticed_by"),
}


def test_no_command_lets_a_terminal_obey_stored_text(
    everbeat: Command, scene: Scene, db: StoreHarness, schema: str
) -> None:  # J17
    refused = spoil(db.connection, schema)
    spared = {f"{table}.{column}" for table, columns in refused.items() for column in columns}
    assert {"tasks.state", "attempts.outcome", "nodes.kind", "workflows.on_error"} <= spared
    assert not spared & {
        "tasks.name",
        "tasks.key",
        "tasks.error",
        "tasks.progress",
        "recoveries.cause",
        "workers.hostname",
    }
    (worker,) = db.connection.execute(
        sql.SQL("select id from {}.workers order by id limit 1").format(sql.Identifier(schema))
    ).fetchone() or ("",)
    pages, drawings, running = scene.pages(worker), scene.drawings(), str(scene.running)
    acts = [
        ["tasks", "retry", running], ["tasks", "pause", HOSTILE], ["tasks", "cancel", running, HOSTILE], ["tasks", "signal", HOSTILE, HOSTILE],
        ["queues", "resume", HOSTILE], ["send", HOSTILE, "--args", HOSTILE], ["check", HOSTILE], [HOSTILE], ["tasks", "show", HOSTILE],
        ["tasks", "list", "--state", HOSTILE], ["tasks", "list", "--schema", HOSTILE], ["tasks", "list", "--url", f"postgresql://{HOSTILE}"],
    ]  # fmt: skip
    written = at_terminal(
        [*pages, *drawings, *([*page, "--json"] for page in (*pages, *acts)), *acts],
        folder=everbeat.folder,
        environment=everbeat.environment,
    )
    assert obeyed(written) == [], written
    assert "Traceback (most recent call last)" not in written
    assert written.count("exit 0") >= len(pages)
    assert "\\x1b]52;c;" in written
    assert "\\u202e" in written
    assert ":bomb:[link=https://x.y]z[/link]" in written


def test_json_output_keeps_hostile_text_exactly(
    everbeat: Command, scene: Scene, db: StoreHarness
) -> None:  # J17
    db.connection.execute(
        db.plain("update {schema}.tasks set key = %s where id = %s"), [HOSTILE, scene.failed]
    )
    written = at_terminal(
        [["tasks", "show", str(scene.failed), "--json"]],
        folder=everbeat.folder,
        environment=everbeat.environment,
    )
    assert obeyed(written) == []
    assert json.loads(written.partition("exit 0")[0])["key"] == HOSTILE
    assert everbeat("tasks", "show", str(scene.failed), "--json").assert_code(0).document["key"] == HOSTILE


def test_a_stored_value_cannot_forge_a_line_of_a_table(
    everbeat: Command, scene: Scene, db: StoreHarness
) -> None:  # J17
    forged = "k1\nstate        COMPLETED"
    db.connection.execute(
        db.plain("update {schema}.tasks set key = %s where id = %s"), [forged, scene.failed]
    )
    page = everbeat("tasks", "show", str(scene.failed)).assert_code(0).out
    assert "k1\\nstate        COMPLETED" in page


def test_each_table_cell_and_each_reason_is_one_line_with_the_whole_error(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J17
    error = json.dumps(
        {
            "code": "UNHANDLED_EXCEPTION",
            "type": "shop.Odd\nName\x1b[2J",
            "message": "first\r\nsecond\u2028third",
        }
    ).encode()
    said = "UNHANDLED_EXCEPTION (shop.Odd\\nName\\x1b[2J): first\\r\\nsecond\\u2028third"
    failed, retried = db.running("w1"), db.running("w1")
    db.settle(failed, "FAILED", error=error)
    db.settle(retried, "FAILED", error=error, retry_in_ms=3_600_000)
    lines = everbeat("tasks", "list").assert_code(0).out.splitlines()
    assert len(lines) == 3
    assert [said in line for line in lines[1:]] == [True, True]
    for task in (failed, retried):
        assert said in everbeat("explain", str(task.id)).assert_code(0).out
        page = everbeat("tasks", "show", str(task.id)).assert_code(0).out
        (attempt,) = [line for line in page.splitlines() if re.match(r"1 +FAILED ", line)]
        assert said in attempt
    page = everbeat("tasks", "show", str(retried.id)).assert_code(0).out
    (waits,) = [line for line in page.splitlines() if line.startswith("waits because")]
    assert said in waits


def test_log_lines_and_messages_escape_control_characters() -> None:  # J17
    event = HookFailed(
        hook=HOSTILE, function="f", task_id=None, task_name=HOSTILE, problem=f"{HOSTILE}\n{HOSTILE}"
    )
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(VisibleFormatter(LOG_FORMAT))
    handler.emit(logging.makeLogRecord({"msg": "%s", "args": (HOSTILE,), "levelname": "INFO"}))
    error = EverbeatError(f"it says {HOSTILE}", fix=HOSTILE)

    class Broken:
        def __repr__(self) -> str:
            return HOSTILE

    for text in (
        event_text(event),
        stream.getvalue(),
        str(error),
        error.message,
        repr(error.args),
        shown(Broken()),
    ):
        assert obeyed(text) == []
        assert "\\x1b" in text


def test_every_control_and_format_character_becomes_an_escape() -> None:  # J17
    number_signs = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
    harmful = [
        chr(number)
        for number in range(0x110000)
        if unicodedata.category(chr(number)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and number not in number_signs
    ]
    assert [one for one in harmful if one not in "\n\t" and visible(one) == one] == []
    assert [one for one in harmful if on_one_line(one) == one] == []
    assert (visible("a\tb\nc"), on_one_line("a\tb\nc")) == ("a\tb\nc", "a\\tb\\nc")
    assert visible("Grüße, 東京　and 👍 \xa0") == "Grüße, 東京　and 👍 \xa0"
    document = json.dumps({"a": "|".join(harmful)}, ensure_ascii=False, indent=2)
    assert json.loads(visible_json(document)) == json.loads(document)


def test_suggested_commands_quote_names_for_the_shell(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J17
    name = "work;touch${IFS}stolen"
    task_id = db.send(name, queue="default")
    app.pause_task(name)
    told = everbeat("explain", str(task_id)).assert_code(0).out + everbeat("doctor").out
    assert told.count(f"everbeat tasks resume '{name}'") == 2
