"""Test read-only roles and standbys: every read command works there, and no write command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from psycopg import conninfo

from everbeat import App, TaskFailed
from everbeat.cli.failures import ExitCode
from everbeat.client.database_access import database_of
from everbeat.errors import DatabaseReadOnly, SchemaForbidden
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.cli.scene import Scene, played
from tests.client.conftest import app
from tests.conftest import NewPair
from tests.store.conftest import StoreHarness

__all__ = ["app"]

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def documented_grants() -> list[str]:
    """Return the statements that the page for operators gives for a read-only role."""
    (block,) = re.findall(r"```sql\n(create role everbeat_reader.*?)```", PAGE.read_text(), re.DOTALL)
    return [each.strip() for each in block.split(";") if each.strip()]


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    with Target.parse(database_url, schema=schema).connect("everbeat test") as connection:
        made = StoreHarness(Target.parse(database_url, schema=schema), connection)
        made.supervisor("s1", "w1", "w2")
        yield made
        made.database.close()


@pytest.fixture
def reader_url(db: StoreHarness, database_url: str, schema: str) -> Iterator[str]:
    """Yield the URL of a role with exactly the documented privileges."""
    name = f"reader_{uuid4().hex[:8]}"
    for statement in documented_grants():
        named = statement.replace("everbeat_reader", name).replace("schema everbeat ", f"schema {schema} ")
        db.connection.execute(named)  # type: ignore[call-overload]
    yield conninfo.make_conninfo(database_url, user=name)
    db.connection.execute(f"drop owned by {name} cascade")  # type: ignore[call-overload]
    db.connection.execute(f"drop role {name}")  # type: ignore[call-overload]


def assert_all_can_be_read(everbeat: Command, scene: Scene, url: str) -> None:
    for words in scene.pages("w1"):
        answer = everbeat(*words, EVERBEAT_DATABASE_URL=url)
        allowed = (0, 1) if words == ["doctor"] else (0,)
        assert answer.code in allowed, (words, answer)
        assert "this check failed to run" not in answer.out, answer.out


def read_in_python(reader: App, scene: Scene) -> None:
    """Call every read method."""
    assert reader.info(scene.failed).state == "FAILED"
    assert len(reader.list_tasks()) >= 5
    assert {each.worker_id for each in reader.list_workers()} == {"w1", "w2"}
    assert len(reader.list_active_workers()) == 2
    assert len(reader.list_supervisors()) == 1
    assert reader.queues()
    assert reader.heartbeats()
    assert len(reader.recoveries()) == 1
    assert len(reader.worker_states()) == 1
    assert reader.explain(scene.pending).reasons
    assert reader.explain_schedule("hourly").reasons
    assert reader.schedule_info("hourly").runs == 0
    assert [each.name for each in reader.list_schedules()] == ["hourly"]
    assert reader.list_ticks("hourly") == []
    assert len(reader.next_ticks("hourly")) == 5
    assert reader.list_pauses()[0].name == "unknown"
    assert len(reader.list_workflows()) == 1
    handle = reader.workflow_handle(scene.workflow)
    assert handle.info().name == "order"
    assert len(handle.nodes()) == 2
    assert handle.explain().reasons
    assert reader.sweep_stale_workers(dry_run=True).dry_run
    assert reader.recover_stuck_workflows(dry_run=True) == []
    assert reader.schema_status().pending == ()
    with pytest.raises(TaskFailed, match="BROKEN"):
        reader.handle(scene.failed).result(timeout=10)


def test_a_role_with_the_documented_grants_can_run_every_read_command(
    everbeat: Command, app: App, db: StoreHarness, reader_url: str, schema: str
) -> None:  # B15
    scene = played(app, db)
    assert_all_can_be_read(everbeat, scene, reader_url)
    doctor = everbeat("doctor", EVERBEAT_DATABASE_URL=reader_url)
    assert re.search(r"^WARN +RIGHTS +the role can read every table but write none", doctor.out, re.MULTILINE)
    reader = App(reader_url, schema=schema)
    try:
        read_in_python(reader, scene)
        for write in (
            lambda: reader.send_by_name("work"),
            lambda: reader.cancel(scene.running),
            reader.sweep_stale_workers,
            lambda: reader.pause_task("work"),
        ):
            with pytest.raises(SchemaForbidden):
                write()
    finally:
        reader.close()


def test_check_live_names_the_privileges_that_workers_and_senders_lack(
    everbeat: Command, app: App, db: StoreHarness, reader_url: str
) -> None:  # A8
    assert "has no errors" in everbeat("check", "shop:app", "--live").assert_code(0).err
    answer = everbeat("check", "shop:app", "--live", EVERBEAT_DATABASE_URL=reader_url)
    out = answer.assert_code(ExitCode.FAILED).out
    assert (
        "error: App 'app': the role can read every table but write none: it lacks INSERT, UPDATE, DELETE"
        in out
    )
    name = conninfo.conninfo_to_dict(reader_url)["user"]
    db.connection.execute(
        db.plain(f"grant insert, update, delete on all tables in schema {{schema}} to {name}")
    )
    everbeat("check", "shop:app", "--live", EVERBEAT_DATABASE_URL=reader_url).assert_code(0)
    db.connection.execute(db.plain(f"revoke delete on {{schema}}.tasks from {name}"))
    out = (
        everbeat("check", "shop:app", "--live", EVERBEAT_DATABASE_URL=reader_url)
        .assert_code(ExitCode.FAILED)
        .out
    )
    assert "the role lacks DELETE on tasks" in out


@pytest.mark.long
def test_a_role_that_is_read_only_by_default_can_run_every_read_command(
    everbeat: Command, app: App, db: StoreHarness, reader_url: str, schema: str
) -> None:  # B15
    scene = played(app, db)
    name = conninfo.conninfo_to_dict(reader_url)["user"]
    db.connection.execute(f"alter role {name} set default_transaction_read_only = on")  # type: ignore[call-overload]
    for words in (["tasks", "list"], ["doctor"]):
        assert everbeat(*words, EVERBEAT_DATABASE_URL=reader_url).code == 0
    doctor = everbeat("doctor", EVERBEAT_DATABASE_URL=reader_url)
    assert re.search(
        r"^WARN +DATABASE .*read-only by default, set for the role, so", doctor.out, re.MULTILINE
    )
    assert (
        "DATABASE_READ_ONLY"
        not in everbeat("explain", str(scene.pending), EVERBEAT_DATABASE_URL=reader_url).out
    )
    change = "update {schema}.supervisors set session_role = (select oid from pg_roles where rolname = %s)"
    db.connection.execute(db.plain(change), [name])  # workers connect with this role
    doctor = everbeat("doctor", EVERBEAT_DATABASE_URL=reader_url)
    assert re.search(r"^FAIL +DATABASE .*set for the role: no task is sent", doctor.out, re.MULTILINE)
    assert (
        "DATABASE_READ_ONLY" in everbeat("explain", str(scene.pending), EVERBEAT_DATABASE_URL=reader_url).out
    )
    with_everything = conninfo.make_conninfo(
        database_of(app).target.url, options="-c default_transaction_read_only=on"
    )
    writer = App(with_everything, schema=schema, patience="500ms")
    try:
        read_in_python(writer, scene)
        with pytest.raises(DatabaseReadOnly, match="this writes"):
            writer.send_by_name("work")
    finally:
        writer.close()


def test_a_standby_serves_every_read_command_and_never_shows_a_worker_as_stale(
    everbeat: Command, new_pair: NewPair, schema: str
) -> None:  # R1
    pair = new_pair()
    target = Target.parse(pair.primary.url, schema=schema)
    first = App(pair.primary.url, schema=schema)
    first.migrate()
    with target.connect("everbeat test") as connection:
        db = StoreHarness(target, connection)
        db.supervisor("s1", "w1", "w2")
        scene = played(first, db)
        later = db.send()
        for table, columns in (
            ("tasks", ("claimed_at", "started_at")), ("workers", ("started_at",)), ("supervisors", ("last_beat_at",)),
        ):  # fmt: skip
            older = ", ".join(f"{name} = {name} - interval '1 day'" for name in columns)
            connection.execute(db.plain(f"update {{schema}}.{table} set {older}"))
        db.database.close()
    pair.wait_replayed()
    url = pair.standby.url
    assert_all_can_be_read(everbeat, scene, url)
    standby = App(url, schema=schema, patience="500ms")
    try:
        read_in_python(standby, scene)
        assert [each.is_stale for each in standby.list_workers()] == [None, None]
        assert [each.is_stale for each in standby.list_supervisors()] == [None]
        assert [each.is_stale for each in first.list_workers()] == [True, True]
        swept = standby.sweep_stale_workers(dry_run=True)
        assert (swept.worker_ids, {task.action for task in swept.tasks}) == ((), {"unknown"})
        for id_, code in ((scene.running, "RUNNING"), (later, None)):
            codes = [each.code for each in standby.explain(id_).reasons]
            assert codes == ["LIVENESS_UNKNOWN", *([code] if code else [])]
        assert standby.workflow_handle(scene.workflow).explain().reasons[0].code == "LIVENESS_UNKNOWN"
        with pytest.raises(DatabaseReadOnly, match="standby"):
            standby.send_by_name("work")
        both = App(f"{pair.url}?options=-c%20default_transaction_read_only%3Don", schema=schema)
        assert [each.is_stale for each in both.list_workers()] == [True, True]  # the primary answers
        both.close()
    finally:
        standby.close()
        first.close()
    workers = everbeat("workers", EVERBEAT_DATABASE_URL=url).assert_code(0)
    assert "unknown" in workers.out
    assert "standby" in workers.err
    told = "".join(
        everbeat(*words, EVERBEAT_DATABASE_URL=url).out
        for words in (["workers"], ["doctor"], ["sweep", "--dry-run"])
    )
    assert not re.search(r"\b(dead(?! rows)|stale|no supervisor sweeps)\b", told)
    checks = {
        each["code"]: each
        for each in everbeat("doctor", "--json", EVERBEAT_DATABASE_URL=url).assert_code(0).document["checks"]
    }
    for code in ("DATABASE", "WORKERS", "SWEEPER", "NAMES", "QUEUES"):
        assert checks[code]["verdict"] == "WARN"
        assert "unknown here" in checks[code]["text"]
