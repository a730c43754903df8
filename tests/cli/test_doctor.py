"""Test `everbeat doctor`: each problem is created on a real server and reported, and repaired it is gone."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from everbeat import App, RecoveryConfig
from everbeat.cli.failures import ExitCode
from everbeat.client.database_access import database_of
from everbeat.domain.doctor.findings import (
    Check,
    CheckCode,
    CheckVerdict,
    Clocks,
    Connections,
    NotifyQueue,
    QueueHolder,
)
from everbeat.domain.doctor.server import judge_clock, judge_connections, judge_notify_queue
from everbeat.domain.schedule.model import Timing
from everbeat.examination import Examination
from everbeat.store import workers
from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.conftest import NewServer
from tests.hints.conftest import Wire, wire_folder
from tests.notify_queue import SETTINGS, full_queue, require_small_queue
from tests.store.conftest import StoreHarness
from tests.store.scheduling import put
from tests.stories.pooler import pooled

__all__ = ["app", "db", "wire_folder"]

ALL = [code.value for code in CheckCode]


def examine(app: App, *, long_transaction_s: float = 300.0) -> dict[str, Check]:
    return {check.code: check for check in Examination(app, long_transaction_s=long_transaction_s).checks()}


def change(db: StoreHarness, statement: str, *values: Any) -> None:
    query = sql.SQL(statement).format(schema=sql.Identifier(db.target.schema))  # type: ignore[arg-type]
    db.connection.execute(query, values or None)


@contextmanager
def other(app: App, **settings: Any) -> Iterator[App]:
    """Yield another app on the same schema."""
    settings = {"url": database_of(app).target.url} | settings
    opened = App(schema=app.schema, auto_migrate=False, **settings)
    try:
        yield opened
    finally:
        opened.close()


def test_doctor_finds_no_problem_in_a_healthy_installation(app: App, db: StoreHarness) -> None:
    found = examine(app)
    assert list(found) == ALL
    assert {code: check.text for code, check in found.items() if check.verdict is not CheckVerdict.OK} == {}
    assert found["DATABASE"].text.startswith("PostgreSQL ")
    assert "in " in found["LISTEN"].text


class TestServer:
    def test_doctor_stops_after_an_unreachable_database(self) -> None:
        app = App("postgresql://127.0.0.1:1/nowhere")
        (check,) = Examination(app, long_transaction_s=300).checks()
        assert (check.code, check.verdict) == ("DATABASE", "FAIL")
        assert "cannot be reached" in check.text
        assert check.fix is not None

    def test_doctor_reports_a_missing_schema_and_does_not_create_it(
        self, database_url: str, schema: str
    ) -> None:
        app = App(database_url, schema=schema)
        found = examine(app)
        assert list(found) == ["DATABASE", "SCHEMA"]
        assert (found["SCHEMA"].verdict, found["SCHEMA"].fix) == ("FAIL", "run 'everbeat migrate'.")
        assert app.schema_status().applied == ()
        app.migrate(to=1)
        assert "needs" in examine(app)["SCHEMA"].text
        app.migrate()
        assert examine(app)["SCHEMA"].verdict is CheckVerdict.OK
        app.close()

    def test_doctor_reports_missing_privileges_of_the_role(self, app: App, db: StoreHarness) -> None:
        role = f"doctor_{db.target.schema}"
        change(db, f"create role {role} login")
        url = psycopg.conninfo.make_conninfo(db.target.url, user=role)
        try:
            change(db, f"grant usage on schema {{schema}} to {role}")
            change(db, f"grant select, insert, update, delete on all tables in schema {{schema}} to {role}")
            poor = App(url, schema=app.schema, auto_migrate=False)
            assert examine(poor)["RIGHTS"].verdict is CheckVerdict.OK
            change(db, f"revoke delete, update on {{schema}}.tasks from {role}")
            check = examine(poor)["RIGHTS"]
            assert check.verdict is CheckVerdict.FAIL
            assert check.text == "the role lacks UPDATE, DELETE on tasks"
            change(db, f"revoke select on {{schema}}.pauses from {role}")
            found = examine(poor)
            assert (found["PAUSES"].verdict, list(found)) == (CheckVerdict.WARN, ALL)
            assert "this check failed to run" in found["PAUSES"].text
            poor.close()
        finally:
            change(db, f"drop owned by {role}")
            change(db, f"drop role {role}")

    def test_doctor_reports_a_transaction_pooler(self, new_server: NewServer) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = new_server(tcp_port=port)
        with _migrated(server.tcp_url) as direct:
            assert examine(direct)["POOLER"].verdict is CheckVerdict.OK
            with pooled(server.tcp_url) as url, other(direct, url=url) as behind:
                found = examine(behind)
        assert found["POOLER"].verdict is found["LISTEN"].verdict is CheckVerdict.WARN
        assert found["LISTEN"].fix == "give workers a direct URL instead of the pooler's."
        assert {found[code].verdict for code in ("RIGHTS", "CLOCK", "SWEEPER", "RETENTION")} == {
            CheckVerdict.OK
        }

    async def test_doctor_reports_a_proxy_that_drops_notifications(
        self, app: App, db: StoreHarness, wire_folder: Path
    ) -> None:
        server = f"{db.connection.info.host}/.s.PGSQL.{db.connection.info.port}"
        async with SwallowingWire(wire_folder, server).open() as wire:
            with other(app, url=wire.url) as with_wire:
                for swallows, verdict in ((True, CheckVerdict.WARN), (False, CheckVerdict.OK)):
                    wire.feigns_backend = swallows
                    found = await asyncio.to_thread(examine, with_wire)
                    assert found["LISTEN"].verdict is verdict
                    assert found["POOLER"].verdict is CheckVerdict.OK

    @pytest.mark.long
    def test_doctor_reports_a_full_notification_queue_and_its_session(
        self, new_server: NewServer, database_url: str
    ) -> None:  # J12
        require_small_queue(database_url)
        server = new_server(settings=dict(SETTINGS))
        with _migrated(server.url) as direct:
            assert examine(direct)["NOTIFY_QUEUE"].verdict is CheckVerdict.OK
            with full_queue(server.url) as pid:
                # PostgreSQL names the session once in 5 s, and it has done so to the session that filled the queue.
                time.sleep(5.5)  # the interval of PostgreSQL
                check = examine(direct)["NOTIFY_QUEUE"]
                # PostgreSQL has just named it, so the next check finds only the transactions.
                again = examine(direct)
            assert check.verdict is CheckVerdict.FAIL
            assert f"it is held by: pid {pid}, of everbeat_nobody (idle in transaction)" in check.text
            assert f"pg_terminate_backend({pid})" in (check.fix or "")
            assert f"the oldest transactions are: pid {pid}, " in again["NOTIFY_QUEUE"].text
            assert again["LISTEN"].verdict is CheckVerdict.WARN
            assert examine(direct)["NOTIFY_QUEUE"].verdict is CheckVerdict.OK

    def test_doctor_reports_that_half_of_the_trees_are_silent(
        self, app: App, db: StoreHarness
    ) -> None:  # E14
        db.supervisor("s2")
        for name in ("s3", "s4"):
            db.supervisor(name, f"{name}-w")
        assert (examine(app)["TREES"].verdict, examine(app)["TREES"].fix) == (CheckVerdict.OK, None)
        db.running("s3-w")
        change(
            db,
            "update {schema}.supervisors set last_beat_at = now() - interval '61 s' where id in ('s3', 's4')",
        )
        check = examine(app)["TREES"]
        assert check.verdict is CheckVerdict.WARN
        assert "2 of 4 trees silent" in check.text
        assert "with 1 task" in check.text
        assert check.fix is not None
        assert check.fix.endswith(f": everbeat sweep --threshold 1m --schema {app.schema}.")
        past = "now() - interval '61 s'"
        change(
            db,
            f"update {{schema}}.tasks set sent_at = {past}, enqueued_at = {past}, claimed_at = {past}, started_at = {past}",
        )
        swept = app.sweep_stale_workers(sweep_threshold="1m")
        assert swept.recovered_count == 1
        assert examine(app)["TREES"].verdict is CheckVerdict.OK

    def test_doctor_reports_a_clock_that_is_off(self, app: App, db: StoreHarness) -> None:
        change(db, "update {schema}.supervisors set last_beat_at = last_beat_at + interval '1 hour'")
        check = examine(app)["CLOCK"]
        assert check.verdict is CheckVerdict.WARN
        assert (
            "1 supervisor (s1) are up to 3600" in check.text
            or "1 supervisor (s1) are up to 3599" in check.text
        )
        change(db, "update {schema}.supervisors set last_beat_at = statement_timestamp()")
        assert examine(app)["CLOCK"].verdict is CheckVerdict.OK

    def test_doctor_distinguishes_a_wrong_clock_from_a_slow_answer(self) -> None:
        now = datetime(2030, 1, 1, tzinfo=UTC)
        clocks = Clocks(now, (), 0.0)
        early, late = now - timedelta(seconds=10), now + timedelta(seconds=10)
        assert judge_clock(clocks, asked_at=early, answered_at=late).verdict is CheckVerdict.OK
        behind = judge_clock(clocks, asked_at=early, answered_at=early)
        assert (behind.verdict, "10.0 s behind" in behind.text) == (CheckVerdict.WARN, True)
        assert "10.0 s ahead of" in judge_clock(clocks, asked_at=late, answered_at=late).text

    def test_doctor_reports_that_connections_run_out(self, new_server: NewServer) -> None:
        server = new_server(settings={"max_connections": "13", "superuser_reserved_connections": "3"})
        with _migrated(server.url) as app:
            assert examine(app)["CONNECTIONS"].verdict is CheckVerdict.OK
            with ExitStack() as guests:
                for _ in range(7):
                    guests.enter_context(psycopg.connect(server.url))
                check = examine(app)["CONNECTIONS"]
            assert check.verdict is CheckVerdict.WARN
            assert check.text == "8 of 10 connections are in use, 1 of them by everbeat"
        full = judge_connections(Connections(96, 100, 1))
        assert full.verdict is CheckVerdict.FAIL
        assert "not declared dead" in full.text

    def test_doctor_reports_a_long_transaction(self, app: App, db: StoreHarness) -> None:
        with psycopg.connect(db.target.url, application_name="forgetful") as stranger:
            stranger.execute("select pg_current_xact_id()")
            pid = stranger.info.backend_pid
            db.connection.execute("select pg_sleep(0.2)")  # the transaction must reach the age
            check = examine(app, long_transaction_s=0.1)["TRANSACTIONS"]
            assert check.verdict is CheckVerdict.WARN
            assert "forgetful of postgres (idle in transaction)" in check.text
            assert f"pid {pid}" in check.text
            assert f"pid {pid}" not in examine(app)["TRANSACTIONS"].text
        assert "forgetful" not in examine(app, long_transaction_s=0.1)["TRANSACTIONS"].text

    def test_doctor_reports_a_session_that_blocks_others(self, app: App, db: StoreHarness) -> None:  # J14
        task = db.send()
        row = sql.SQL("select from {}.tasks where id = %s for update").format(
            sql.Identifier(db.target.schema)
        )
        assert examine(app)["LOCKS"].verdict is CheckVerdict.OK
        with (
            psycopg.connect(db.target.url, application_name="forgetful") as stranger,
            ThreadPoolExecutor(1) as threads,
        ):
            stranger.execute(row, [task])
            waiting = threads.submit(app.cancel, task)
            give_up_at = time.monotonic() + 20
            while (check := examine(app)["LOCKS"]).verdict is CheckVerdict.OK:
                assert time.monotonic() < give_up_at
            assert "session forgetful of role postgres (backend" in check.text
            assert "holds locks that 1 session waits for; the longest wait so far is " in check.text
            assert f"psql -c 'select pg_terminate_backend({stranger.info.backend_pid})'" in (check.fix or "")
            (reason,) = [each for each in app.explain(task).reasons if each.code == "LOCKED"]
            assert (reason.blocked_by, reason.command in (check.fix or "")) == ("forgetful", True)
            stranger.rollback()
            waiting.result(timeout=20)
        assert examine(app)["LOCKS"].verdict is CheckVerdict.OK

    def test_doctor_reports_many_dead_rows(self, app: App, db: StoreHarness) -> None:
        change(db, "alter table {schema}.tasks set (autovacuum_enabled = false)")
        change(db, "alter table {schema}.tasks disable trigger audit")
        change(
            db, """insert into {schema}.tasks (id, name, queue, args)
                select gen_random_uuid(), 'work', 'default', '{{}}' from generate_series(1, 50001)""",
        )  # fmt: skip
        change(db, "delete from {schema}.tasks")
        db.connection.execute("select pg_stat_force_next_flush()")
        check = examine(app)["DEAD_ROWS"]
        assert check.verdict is CheckVerdict.WARN
        assert "50,001 dead rows (vacuumed never)" in check.text
        change(db, "vacuum {schema}.tasks")
        check = examine(app)["DEAD_ROWS"]
        assert (check.verdict, "last 20" in check.text) == (CheckVerdict.OK, True)


class SwallowingWire(Wire):
    """Drops every notification, as some proxies do."""

    @staticmethod
    def _feigned(data: bytes) -> bytes:
        return re.sub(rb"A\0\0\0\x19.{4}everbeat_doctor\0\0", b"", data, flags=re.DOTALL)


@contextmanager
def _migrated(url: str) -> Iterator[App]:
    app = App(url)
    app.migrate()
    try:
        yield app
    finally:
        app.close()


class TestWork:
    def test_doctor_reports_that_no_worker_is_alive(self, app: App, db: StoreHarness) -> None:
        change(db, "update {schema}.supervisors set last_beat_at = last_beat_at - interval '1 hour'")
        check = examine(app)["WORKERS"]
        assert check.verdict is CheckVerdict.WARN
        assert "the last heartbeat was received at" in check.text
        task = db.send()
        assert examine(app)["WORKERS"].verdict is CheckVerdict.FAIL
        app.cancel(task)
        db.send(serial="key:x")
        assert examine(app)["WORKERS"].verdict is CheckVerdict.FAIL
        change(db, "update {schema}.supervisors set last_beat_at = statement_timestamp()")
        assert examine(app)["WORKERS"].verdict is CheckVerdict.OK

    def test_doctor_reports_heartbeats_that_are_too_slow_for_the_thresholds(
        self, app: App, db: StoreHarness
    ) -> None:
        change(
            db, """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
                select id, n, statement_timestamp() - (100 - n) * interval '10 s' - late * interval '3 s', 0
                from generate_series(1, 90) n cross join (values ('s1', 0), ('s2', 1)) as each (id, late)""",
        )  # fmt: skip
        check = examine(app)["BEATS"]
        assert check.verdict is CheckVerdict.OK
        assert "178 gaps between beats: median 10.00 s, p99 10.00 s, longest 10.00 s (s" in check.text
        change(
            db, """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
                select supervisor_id, 91, sent_at + interval '100 s', 0 from {schema}.beats
                where supervisor_id = 's1' and seq = 90
                union all
                select supervisor_id, 90 + n, sent_at + n * interval '10 s', 0 from {schema}.beats, generate_series(1, 10) n
                where supervisor_id = 's2' and seq = 90""",
        )  # fmt: skip
        close = RecoveryConfig(
            claimed_stale_threshold_ms=150_000, running_stale_threshold_ms=150_000, heartbeat_retention_hours=None
        )  # fmt: skip
        with other(app, recovery=close) as tight:
            check = examine(tight)["BEATS"]
            assert check.verdict is CheckVerdict.WARN  # the longest gap is 100 s
            assert check.fix is not None
            assert "to 300 s or more" in check.fix
        with other(app, recovery=RecoveryConfig(claimed_stale_threshold_ms=90_000)) as tighter:
            assert examine(tighter)["BEATS"].verdict is CheckVerdict.FAIL
        change(db, "delete from {schema}.beats")
        assert "too few heartbeats have been recorded" in examine(app)["BEATS"].text

    def test_doctor_does_not_attribute_a_common_outage_to_one_tree(
        self, app: App, db: StoreHarness
    ) -> None:  # E7
        beats = """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
            select id, n, statement_timestamp() - (300 - n - case when n > 100 then 150 else 0 end) * interval '1 s' - late, 0
            from generate_series(1, 150) n cross join (values ('s1', interval '0 s'), ('s2', interval '0.4 s')) as each (id, late)"""
        change(db, beats)
        quick = RecoveryConfig(
            claimed_stale_threshold_ms=30_000,
            running_stale_threshold_ms=30_000,
            claimer_heartbeat_interval_ms=1_000,
            runner_heartbeat_interval_ms=1_000,
        )
        with other(app, recovery=quick) as judging:
            check = examine(judging)["BEATS"]
            assert (check.verdict, check.fix) == (CheckVerdict.OK, None)
            assert "longest 1." in check.text
            assert "not counted: 1 outage of up to 151 s, the last until " in check.text
            change(db, "delete from {schema}.beats where supervisor_id = 's2'")
            assert (
                examine(judging)["BEATS"].verdict is CheckVerdict.WARN
            )  # it was the only tree, so the gap might be its own fault
            change(db, "delete from {schema}.beats")
            change(db, beats)
            change(
                db, """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
                    select 's3', n, statement_timestamp() - (300 - n) * interval '1 s', 0 from generate_series(1, 300) n""",
            )  # fmt: skip
            check = examine(judging)["BEATS"]
            assert (check.verdict, "outage" in check.text) == (CheckVerdict.FAIL, False)

    def test_doctor_reports_that_stale_tasks_are_not_recovered(self, app: App, db: StoreHarness) -> None:
        claimed = db.running()
        change(
            db, """update {schema}.tasks set sent_at = sent_at - interval '1 hour', claimed_at = claimed_at - interval '1 hour',
                started_at = started_at - interval '1 hour'""",
        )  # fmt: skip
        assert examine(app)["SWEEPER"].verdict is CheckVerdict.OK
        # One second before the threshold and two checks, then one second after.
        for silent_s, verdict in ((300 + 60 - 1, CheckVerdict.OK), (300 + 60 + 1, CheckVerdict.FAIL)):
            change(
                db, f"update {{schema}}.supervisors set last_beat_at = statement_timestamp() - interval '{silent_s} s'"
            )  # fmt: skip
            check = examine(app)["SWEEPER"]
            assert check.verdict is verdict
        assert "1 lease overdue for recovery" in check.text
        assert "(1 of silent workers, 0 of workers that have exited)" in check.text
        assert check.fix is not None
        assert str(claimed.id) in check.fix
        change(db, """update {schema}.tasks set flags = '{{"infrastructure_resilient": true}}'""")
        assert examine(app)["SWEEPER"].verdict is CheckVerdict.OK
        change(db, "update {schema}.tasks set flags = null, left_claim_id = claim_id")
        assert examine(app)["SWEEPER"].verdict is CheckVerdict.OK
        change(db, "update {schema}.tasks set left_claim_id = null")
        assert examine(app)["SWEEPER"].verdict is CheckVerdict.FAIL
        with other(app, recovery=RecoveryConfig(auto_fail_stale_running=False)) as careless:
            assert examine(careless)["SWEEPER"].verdict is CheckVerdict.OK
        off = RecoveryConfig(auto_fail_stale_running=False, auto_requeue_stale_claimed=False)
        with other(app, recovery=off) as manual:
            check = examine(manual)["SWEEPER"]
            assert (check.verdict, "is off" in check.text) == (CheckVerdict.WARN, True)
        change(db, "update {schema}.supervisors set last_beat_at = statement_timestamp()")
        change(
            db,
            "update {schema}.workers set ended_at = statement_timestamp() - interval '61 s' where id = 'w1'",
        )
        assert "(0 of silent workers, 1 of workers that have exited)" in examine(app)["SWEEPER"].text
        change(db, "update {schema}.workers set ended_at = null")
        db.settle(claimed, result=b"null")
        assert examine(app)["SWEEPER"].verdict is CheckVerdict.OK

    def test_doctor_reports_queues_and_names_that_no_worker_serves(self, app: App, db: StoreHarness) -> None:
        db.run(workers.bury_workers(worker_ids=["w1", "w2"], how="test"))
        row = workers.WorkerRow(
            id="w3", supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=["mail"],
            metadata='{"tasks": ["work"]}',
        )  # fmt: skip
        db.run(workers.register_worker(row))
        db.send(queue="mail")
        found = examine(app)
        assert (found["NAMES"].verdict, found["QUEUES"].verdict) == (CheckVerdict.OK, CheckVerdict.OK)
        strange = [db.send("wrok", queue="mail") for _ in range(2)]
        lost = db.send(queue="post", serial="queue:post")
        found = examine(app)
        assert found["NAMES"].verdict is found["QUEUES"].verdict is CheckVerdict.WARN
        assert found["NAMES"].text.endswith("waiting tasks: wrok (2 in queue mail)")
        assert found["QUEUES"].text.endswith("waiting tasks: post (1)")
        assert found["QUEUES"].fix == "start workers for them: everbeat worker MODULE:APP --queues post."
        for task in (*strange, lost):
            app.cancel(task)
        found = examine(app)
        assert (found["NAMES"].verdict, found["QUEUES"].verdict) == (CheckVerdict.OK, CheckVerdict.OK)

    def test_doctor_reports_pauses_and_suspects(self, app: App, db: StoreHarness) -> None:
        task = db.send()
        change(
            db, "insert into {schema}.pauses (kind, name, paused_by, reason) values ('task', 'work', 'brake', '50 crashes')"
        )  # fmt: skip
        change(db, "update {schema}.tasks set suspect = true")
        found = examine(app)
        assert found["PAUSES"].verdict is found["SUSPECTS"].verdict is CheckVerdict.WARN
        assert found["PAUSES"].text == "paused: task work by brake (50 crashes)"
        assert found["PAUSES"].fix == "when the reason no longer applies: everbeat tasks resume work."
        assert (
            f"1 task might kill their worker and run alone, such as work ({task})" in found["SUSPECTS"].text
        )
        change(db, "delete from {schema}.pauses")
        app.cancel(task)
        found = examine(app)
        assert (found["PAUSES"].verdict, found["SUSPECTS"].verdict) == (CheckVerdict.OK, CheckVerdict.OK)

    def test_doctor_reports_a_schedule_whose_ticks_no_supervisor_decides(
        self, app: App, db: StoreHarness
    ) -> None:
        put(db)
        late = "update {schema}.schedules set next_at = now() - interval '10 minutes'"
        change(db, "update {schema}.schedules set next_at = now() - interval '5 seconds'")
        assert examine(app)["SCHEDULES"].verdict is CheckVerdict.OK
        change(db, late)
        found = examine(app)["SCHEDULES"]
        assert found.verdict is CheckVerdict.FAIL
        assert found.text.startswith("no supervisor decides the due ticks of hourly, hourly for 10 m")
        assert found.fix == "see the reason: everbeat explain schedule:hourly."
        change(db, f"{late}, timing = %s", '{"every_ms": "often"}')
        broken = examine(app)["SCHEDULES"]
        assert broken.verdict is CheckVerdict.WARN
        assert "the stored rules of these schedules are unreadable: hourly (" in broken.text
        change(db, "delete from {schema}.schedules")
        assert examine(app)["SCHEDULES"].verdict is CheckVerdict.OK

    def test_doctor_reports_a_time_zone_that_this_machine_does_not_know(
        self, app: App, db: StoreHarness
    ) -> None:
        put(db, timing=Timing(cron=("30 2 * * *",), timezone="Moon/Tranquility"))
        change(db, "update {schema}.schedules set next_at = now() + interval '1 hour'")
        found = examine(app)["SCHEDULES"]
        assert found.verdict is CheckVerdict.WARN
        assert "does not know the time zones of some schedules: Moon/Tranquility" in found.text
        assert found.fix == "install the Python package tzdata on this machine."

    def test_doctor_reports_schedules_that_failures_paused_but_not_those_that_an_operator_paused(
        self, app: App, db: StoreHarness
    ) -> None:
        put(db)
        app.pause_schedule("hourly")
        assert examine(app)["SCHEDULES"].verdict is CheckVerdict.OK
        change(
            db,
            "update {schema}.schedules set paused_by = 'everbeat', pause_reason = 'the last 3 runs failed'",
        )
        found = examine(app)["SCHEDULES"]
        assert found.verdict is CheckVerdict.WARN
        assert found.text == "1 schedule is paused because the latest runs failed: hourly"
        assert found.fix is not None
        assert found.fix.endswith("everbeat schedules resume hourly.")

    def test_doctor_reports_recent_failures_by_code(self, app: App, db: StoreHarness) -> None:  # J4
        assert examine(app)["FAILURES"].text == "no task failed in the last 10 minutes"
        errors = [b'{"code": "UNHANDLED_EXCEPTION", "type": "KeyError"}'] * 3 + [
            b'{"code": "NO_STOCK"}',
            b"5",
        ]
        for error in (*errors, b'{"code": "a\\u0000b"}', b'{"code": "\\uDC00"}'):
            assert db.settle(db.running(), "FAILED", error=error) == "FAILED"
        old = db.running()
        db.settle(old, "FAILED", error=b"{}")
        change(
            db, "update {schema}.tasks set failed_at = now() - interval '11 minutes' where id = %s", old.id
        )
        check = examine(app)["FAILURES"]
        assert check.verdict is CheckVerdict.WARN
        assert check.text.startswith("7 tasks failed in the last 10 minutes (")
        assert re.search(r" a second since the first, [\d.]+ m?s ago\): ", check.text), check.text
        assert re.search(r"work: UNHANDLED_EXCEPTION \(KeyError\) 3 times, first [\d.]+ m?s ago", check.text)
        assert "work: NO_STOCK 1 time, first " in check.text
        assert "work: ? 3 times" in check.text
        change(db, "update {schema}.tasks set failed_at = 'infinity' where id = %s", old.id)
        assert examine(app)["FAILURES"].text.startswith("7 tasks failed")

    def test_doctor_reports_failure_handlers_that_were_not_sent(self, app: App, db: StoreHarness) -> None:
        def fail(name: str) -> UUID:
            handler = f'{{"on_failure": {{"name": {name}, "parameter": "failure", "queue": "default"}}}}'
            claimed = db.running(policy=handler.encode())
            assert db.settle(claimed, "FAILED", error=b'{"code": "BROKEN"}') == "FAILED"
            return claimed.id

        fail('"alert"')
        assert examine(app)["HANDLERS"].verdict is CheckVerdict.OK
        unsent = fail("null")
        check = examine(app)["HANDLERS"]
        assert check.verdict is CheckVerdict.WARN
        assert check.text.endswith(f"1 task that failed in the last hour were not sent: {unsent}")
        change(
            db, "update {schema}.tasks set failed_at = now() - interval '61 minutes' where id = %s", unsent
        )
        assert examine(app)["HANDLERS"].verdict is CheckVerdict.OK

    def test_doctor_reports_overdue_retention(self, app: App, db: StoreHarness) -> None:
        claimed = db.running()
        db.settle(claimed, result=b"null")
        change(db, "update {schema}.tasks set completed_at = completed_at - interval '722 hours'")
        assert examine(app)["RETENTION"].verdict is CheckVerdict.OK
        change(db, "update {schema}.tasks set completed_at = completed_at - interval '2 hours'")
        change(
            db,
            "insert into {schema}.beats values ('s1', 1, statement_timestamp() - interval '28 hours', 0)",
        )
        check = examine(app)["RETENTION"]
        assert check.verdict is CheckVerdict.WARN
        assert "ended tasks up to 724.0 h old (terminal_record_retention_hours is 720)" in check.text
        assert "beats up to 28.0 h old" in check.text
        keep = RecoveryConfig(terminal_record_retention_hours=None, heartbeat_retention_hours=None)
        with other(app, recovery=keep) as keeper:
            assert examine(keeper)["RETENTION"].verdict is CheckVerdict.OK


class TestCommand:
    def test_the_doctor_command_prints_a_page_and_json(
        self, everbeat: Command, app: App, db: StoreHarness
    ) -> None:
        page = everbeat("doctor").assert_code(0)
        assert [line.split()[:2] for line in page.out.splitlines()] == [["OK", code] for code in ALL]
        assert page.err == f"{len(ALL)} OK, 0 WARN, 0 FAIL\n"
        document = everbeat("doctor", "shop:app", "--json").assert_code(0).document
        assert document["verdict"] == "OK"
        assert list(document["checks"][0]) == ["code", "verdict", "text", "fix"]

    def test_the_doctor_command_exits_with_failed_if_a_check_fails(
        self, everbeat: Command, app: App, db: StoreHarness
    ) -> None:
        change(db, "update {schema}.supervisors set last_beat_at = last_beat_at - interval '1 hour'")
        db.send()
        page = everbeat("doctor").assert_code(ExitCode.FAILED)
        assert "FAIL WORKERS      no live worker, and tasks wait" in page.out
        assert "try: start one: everbeat worker MODULE:APP." in page.out
        answer = everbeat("doctor", "--json", "--url", "postgresql://127.0.0.1:1/x").assert_code(
            ExitCode.FAILED
        )
        assert answer.document["verdict"] == "FAIL"
        assert "--long-transaction" in everbeat("doctor", "--long-transaction", "soon").assert_code(2).err


def test_doctor_warns_about_a_half_full_notification_queue() -> None:  # J12
    for used, verdict in (
        (0.49, CheckVerdict.OK),
        (0.5, CheckVerdict.WARN),
        (0.89, CheckVerdict.WARN),
        (0.9, CheckVerdict.FAIL),
    ):
        check = judge_notify_queue(NotifyQueue(used, (QueueHolder(7, "app of me", None),)))
        assert check.verdict is verdict
        assert (check.fix is None) is (verdict is CheckVerdict.OK)
    assert "the server's log" in (judge_notify_queue(NotifyQueue(0.6)).fix or "")
