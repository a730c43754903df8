"""`everbeat doctor`: each finding is made on a real server and found; healed, it is gone."""

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

import psycopg
from psycopg import sql

from everbeat import App, RecoveryConfig
from everbeat.cli.examination import Examination
from everbeat.cli.exit_codes import ExitCode
from everbeat.domain.diagnosis import Check, CheckCode, Clocks, Connections, NotifyQueue, QueueHolder, Verdict
from everbeat.domain.server_checks import judge_clock, judge_connections, judge_notify_queue
from everbeat.store import workers
from tests.cli.conftest import Command
from tests.client.conftest import app, hands
from tests.conftest import NewServer
from tests.notify_queue import SETTINGS, full_queue, require_small_queue
from tests.store.conftest import Hands
from tests.stories.pooler import pooled
from tests.wake.conftest import Wire, wire_folder

__all__ = ["app", "hands", "wire_folder"]

ALL = [code.value for code in CheckCode]


def examine(app: App, *, long_transaction_s: float = 300.0) -> dict[str, Check]:
    return {check.code: check for check in Examination(app, long_transaction_s=long_transaction_s).checks()}


def change(hands: Hands, statement: str, *values: Any) -> None:
    query = sql.SQL(statement).format(schema=sql.Identifier(hands.target.schema))  # type: ignore[arg-type]
    hands.connection.execute(query, values or None)


@contextmanager
def other(app: App, **settings: Any) -> Iterator[App]:
    """The same schema as another app sees it."""
    settings = {"url": app.door.target.url} | settings
    opened = App(schema=app.schema, auto_migrate=False, **settings)
    try:
        yield opened
    finally:
        opened.close()


def test_a_sound_installation_has_nothing_to_be_told(app: App, hands: Hands) -> None:
    found = examine(app)
    assert list(found) == ALL
    assert {code: check.text for code, check in found.items() if check.verdict is not Verdict.OK} == {}
    assert found["DATABASE"].text.startswith("PostgreSQL ")
    assert "in " in found["LISTEN"].text


class TestServer:
    def test_no_database_no_further_checks(self) -> None:
        app = App("postgresql://127.0.0.1:1/nowhere")
        (check,) = Examination(app, long_transaction_s=300).checks()
        assert (check.code, check.verdict) == ("DATABASE", "FAIL")
        assert "cannot be reached" in check.text
        assert check.fix is not None

    def test_no_schema_and_none_is_made(self, database_url: str, schema: str) -> None:
        app = App(database_url, schema=schema)
        found = examine(app)
        assert list(found) == ["DATABASE", "SCHEMA"]
        assert (found["SCHEMA"].verdict, found["SCHEMA"].fix) == ("FAIL", "run 'everbeat migrate'.")
        assert app.schema_status().applied == ()
        app.migrate(to=1)
        assert "needs" in examine(app)["SCHEMA"].text
        app.migrate()
        assert examine(app)["SCHEMA"].verdict is Verdict.OK
        app.close()

    def test_a_role_that_lacks_rights(self, app: App, hands: Hands) -> None:
        role = f"doctor_{hands.target.schema}"
        change(hands, f"create role {role} login")
        url = psycopg.conninfo.make_conninfo(hands.target.url, user=role)
        try:
            change(hands, f"grant usage on schema {{schema}} to {role}")
            change(
                hands, f"grant select, insert, update, delete on all tables in schema {{schema}} to {role}"
            )
            poor = App(url, schema=app.schema, auto_migrate=False)
            assert examine(poor)["RIGHTS"].verdict is Verdict.OK
            change(hands, f"revoke delete, update on {{schema}}.tasks from {role}")
            check = examine(poor)["RIGHTS"]
            assert check.verdict is Verdict.FAIL
            assert check.text == "the role lacks UPDATE, DELETE on tasks"
            change(hands, f"revoke select on {{schema}}.pauses from {role}")
            found = examine(poor)
            assert (found["PAUSES"].verdict, list(found)) == (Verdict.WARN, ALL)
            assert "could not be looked at" in found["PAUSES"].text
            poor.close()
        finally:
            change(hands, f"drop owned by {role}")
            change(hands, f"drop role {role}")

    def test_behind_a_transaction_pooler(self, new_server: NewServer) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = new_server(tcp_port=port)
        with _migrated(server.tcp_url) as direct:
            assert examine(direct)["POOLER"].verdict is Verdict.OK
            with pooled(server.tcp_url) as url, other(direct, url=url) as behind:
                found = examine(behind)
        assert found["POOLER"].verdict is found["LISTEN"].verdict is Verdict.WARN
        assert found["LISTEN"].fix == "give workers a direct URL instead of the pooler's."
        assert {found[code].verdict for code in ("RIGHTS", "CLOCK", "SWEEPER", "RETENTION")} == {Verdict.OK}

    async def test_a_proxy_that_swallows_notifications(
        self, app: App, hands: Hands, wire_folder: Path
    ) -> None:
        server = f"{hands.connection.info.host}/.s.PGSQL.{hands.connection.info.port}"
        async with SwallowingWire(wire_folder, server).open() as wire:
            with other(app, url=wire.url) as with_wire:
                for swallows, verdict in ((True, Verdict.WARN), (False, Verdict.OK)):
                    wire.feigns_backend = swallows
                    found = await asyncio.to_thread(examine, with_wire)
                    assert found["LISTEN"].verdict is verdict
                    assert found["POOLER"].verdict is Verdict.OK

    def test_a_full_queue_of_notifications_and_the_session_that_keeps_it(
        self, new_server: NewServer, database_url: str
    ) -> None:  # J12
        require_small_queue(database_url)
        server = new_server(settings=dict(SETTINGS))
        with _migrated(server.url) as direct:
            assert examine(direct)["NOTIFY_QUEUE"].verdict is Verdict.OK
            with full_queue(server.url) as pid:
                # PostgreSQL names it once in 5 s, and has done so to the session that filled the queue.
                time.sleep(5.5)  # the pause of PostgreSQL
                check = examine(direct)["NOTIFY_QUEUE"]
                # PostgreSQL has just named it: the next look knows the transactions only.
                again = examine(direct)
            assert check.verdict is Verdict.FAIL
            assert f"it is kept by: pid {pid}, of everbeat_nobody (idle in transaction)" in check.text
            assert f"pg_terminate_backend({pid})" in (check.fix or "")
            assert f"the oldest transactions are: pid {pid}, " in again["NOTIFY_QUEUE"].text
            assert again["LISTEN"].verdict is Verdict.WARN
            assert examine(direct)["NOTIFY_QUEUE"].verdict is Verdict.OK

    def test_half_of_the_trees_are_silent(self, app: App, hands: Hands) -> None:  # E14
        hands.supervisor("s2")
        for name in ("s3", "s4"):
            hands.supervisor(name, f"{name}-w")
        assert (examine(app)["TREES"].verdict, examine(app)["TREES"].fix) == (Verdict.OK, None)
        hands.running("s3-w")
        change(
            hands,
            "update {schema}.supervisors set last_beat_at = now() - interval '61 s' where id in ('s3', 's4')",
        )
        check = examine(app)["TREES"]
        assert check.verdict is Verdict.WARN
        assert "2 of 4 trees silent" in check.text
        assert "with 1 task" in check.text
        assert check.fix is not None
        assert check.fix.endswith(f": everbeat sweep --threshold 1m --schema {app.schema}.")
        past = "now() - interval '61 s'"
        change(
            hands,
            f"update {{schema}}.tasks set sent_at = {past}, enqueued_at = {past}, claimed_at = {past}, started_at = {past}",
        )
        swept = app.sweep_stale_workers(sweep_threshold="1m")
        assert swept.recovered_count == 1
        assert examine(app)["TREES"].verdict is Verdict.OK

    def test_the_clock(self, app: App, hands: Hands) -> None:
        change(hands, "update {schema}.supervisors set last_beat_at = last_beat_at + interval '1 hour'")
        check = examine(app)["CLOCK"]
        assert check.verdict is Verdict.WARN
        assert (
            "1 supervisors (s1) lie up to 3600" in check.text
            or "1 supervisors (s1) lie up to 3599" in check.text
        )
        change(hands, "update {schema}.supervisors set last_beat_at = statement_timestamp()")
        assert examine(app)["CLOCK"].verdict is Verdict.OK

    def test_a_clock_that_is_off_is_told_from_a_slow_answer(self) -> None:
        now = datetime(2030, 1, 1, tzinfo=UTC)
        clocks = Clocks(now, (), 0.0)
        early, late = now - timedelta(seconds=10), now + timedelta(seconds=10)
        assert judge_clock(clocks, asked_at=early, answered_at=late).verdict is Verdict.OK
        behind = judge_clock(clocks, asked_at=early, answered_at=early)
        assert (behind.verdict, "10.0 s behind" in behind.text) == (Verdict.WARN, True)
        assert "10.0 s ahead of" in judge_clock(clocks, asked_at=late, answered_at=late).text

    def test_connections_run_out(self, new_server: NewServer) -> None:
        server = new_server(settings={"max_connections": "13", "superuser_reserved_connections": "3"})
        with _migrated(server.url) as app:
            assert examine(app)["CONNECTIONS"].verdict is Verdict.OK
            with ExitStack() as guests:
                for _ in range(7):
                    guests.enter_context(psycopg.connect(server.url))
                check = examine(app)["CONNECTIONS"]
            assert check.verdict is Verdict.WARN
            assert check.text == "8 of 10 connections are in use, 1 of them by everbeat"
        full = judge_connections(Connections(96, 100, 1))
        assert full.verdict is Verdict.FAIL
        assert "not declared dead" in full.text

    def test_a_long_transaction(self, app: App, hands: Hands) -> None:
        with psycopg.connect(hands.target.url, application_name="forgetful") as stranger:
            stranger.execute("select pg_current_xact_id()")
            pid = stranger.info.backend_pid
            hands.connection.execute("select pg_sleep(0.2)")  # it must grow old
            check = examine(app, long_transaction_s=0.1)["TRANSACTIONS"]
            assert check.verdict is Verdict.WARN
            assert "forgetful of postgres (idle in transaction)" in check.text
            assert f"pid {pid}" in check.text
            assert f"pid {pid}" not in examine(app)["TRANSACTIONS"].text
        assert "forgetful" not in examine(app, long_transaction_s=0.1)["TRANSACTIONS"].text

    def test_a_session_that_keeps_others_waiting(self, app: App, hands: Hands) -> None:  # J14
        task = hands.send()
        row = sql.SQL("select from {}.tasks where id = %s for update").format(
            sql.Identifier(hands.target.schema)
        )
        assert examine(app)["LOCKS"].verdict is Verdict.OK
        with (
            psycopg.connect(hands.target.url, application_name="forgetful") as stranger,
            ThreadPoolExecutor(1) as threads,
        ):
            stranger.execute(row, [task])
            waiting = threads.submit(app.cancel, task)
            give_up_at = time.monotonic() + 20
            while (check := examine(app)["LOCKS"]).verdict is Verdict.OK:
                assert time.monotonic() < give_up_at
            assert "session forgetful of role postgres (backend" in check.text
            assert "holds locks for which 1 session waits, for " in check.text
            assert f"psql -c 'select pg_terminate_backend({stranger.info.backend_pid})'" in (check.fix or "")
            (reason,) = [each for each in app.explain(task).reasons if each.code == "LOCKED"]
            assert (reason.blocked_by, reason.command in (check.fix or "")) == ("forgetful", True)
            stranger.rollback()
            waiting.result(timeout=20)
        assert examine(app)["LOCKS"].verdict is Verdict.OK

    def test_dead_rows(self, app: App, hands: Hands) -> None:
        change(hands, "alter table {schema}.tasks set (autovacuum_enabled = false)")
        change(hands, "alter table {schema}.tasks disable trigger audit")
        change(
            hands, """insert into {schema}.tasks (id, name, queue, args)
                select gen_random_uuid(), 'work', 'default', '{{}}' from generate_series(1, 50001)""",
        )  # fmt: skip
        change(hands, "delete from {schema}.tasks")
        hands.connection.execute("select pg_stat_force_next_flush()")
        check = examine(app)["DEAD_ROWS"]
        assert check.verdict is Verdict.WARN
        assert "50,001 dead rows (vacuumed never)" in check.text
        change(hands, "vacuum {schema}.tasks")
        check = examine(app)["DEAD_ROWS"]
        assert (check.verdict, "last 20" in check.text) == (Verdict.OK, True)


class SwallowingWire(Wire):
    """Loses every notification on its way, as some proxies do."""

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
    def test_no_worker_lives(self, app: App, hands: Hands) -> None:
        change(hands, "update {schema}.supervisors set last_beat_at = last_beat_at - interval '1 hour'")
        check = examine(app)["WORKERS"]
        assert check.verdict is Verdict.WARN
        assert "the last beat came at" in check.text
        task = hands.send()
        assert examine(app)["WORKERS"].verdict is Verdict.FAIL
        app.cancel(task)
        hands.send(serial="key:x")
        assert examine(app)["WORKERS"].verdict is Verdict.FAIL
        change(hands, "update {schema}.supervisors set last_beat_at = statement_timestamp()")
        assert examine(app)["WORKERS"].verdict is Verdict.OK

    def test_beats_come_too_slowly_for_the_thresholds(self, app: App, hands: Hands) -> None:
        change(
            hands, """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
                select id, n, statement_timestamp() - (100 - n) * interval '10 s' - late * interval '3 s', 0
                from generate_series(1, 90) n cross join (values ('s1', 0), ('s2', 1)) as each (id, late)""",
        )  # fmt: skip
        check = examine(app)["BEATS"]
        assert check.verdict is Verdict.OK
        assert "178 gaps between beats: median 10.00 s, p99 10.00 s, longest 10.00 s (s" in check.text
        change(
            hands, """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
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
            assert check.verdict is Verdict.WARN  # the longest gap is 100 s
            assert check.fix is not None
            assert "to 300 s or more" in check.fix
        with other(app, recovery=RecoveryConfig(claimed_stale_threshold_ms=90_000)) as tighter:
            assert examine(tighter)["BEATS"].verdict is Verdict.FAIL
        change(hands, "delete from {schema}.beats")
        assert "nothing to measure" in examine(app)["BEATS"].text

    def test_an_outage_of_all_is_no_fault_of_a_tree(self, app: App, hands: Hands) -> None:  # E7
        beats = """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
            select id, n, statement_timestamp() - (300 - n - case when n > 100 then 150 else 0 end) * interval '1 s' - late, 0
            from generate_series(1, 150) n cross join (values ('s1', interval '0 s'), ('s2', interval '0.4 s')) as each (id, late)"""
        change(hands, beats)
        quick = RecoveryConfig(
            claimed_stale_threshold_ms=30_000,
            running_stale_threshold_ms=30_000,
            claimer_heartbeat_interval_ms=1_000,
            runner_heartbeat_interval_ms=1_000,
        )
        with other(app, recovery=quick) as judging:
            check = examine(judging)["BEATS"]
            assert (check.verdict, check.fix) == (Verdict.OK, None)
            assert "longest 1." in check.text
            assert "not counted: 1 outage of up to 151 s, the last until " in check.text
            change(hands, "delete from {schema}.beats where supervisor_id = 's2'")
            assert (
                examine(judging)["BEATS"].verdict is Verdict.WARN
            )  # it was alone, so it might have been its own fault
            change(hands, "delete from {schema}.beats")
            change(hands, beats)
            change(
                hands, """insert into {schema}.beats (supervisor_id, seq, sent_at, held)
                    select 's3', n, statement_timestamp() - (300 - n) * interval '1 s', 0 from generate_series(1, 300) n""",
            )  # fmt: skip
            check = examine(judging)["BEATS"]
            assert (check.verdict, "outage" in check.text) == (Verdict.FAIL, False)

    def test_a_sweeper_that_stopped(self, app: App, hands: Hands) -> None:
        claimed = hands.running()
        change(
            hands, """update {schema}.tasks set sent_at = sent_at - interval '1 hour', claimed_at = claimed_at - interval '1 hour',
                started_at = started_at - interval '1 hour'""",
        )  # fmt: skip
        assert examine(app)["SWEEPER"].verdict is Verdict.OK
        # One second before the threshold and two looks have passed, then one after.
        for silent_s, verdict in ((300 + 60 - 1, Verdict.OK), (300 + 60 + 1, Verdict.FAIL)):
            change(
                hands, f"update {{schema}}.supervisors set last_beat_at = statement_timestamp() - interval '{silent_s} s'"
            )  # fmt: skip
            check = examine(app)["SWEEPER"]
            assert check.verdict is verdict
        assert "1 lease overdue for recovery" in check.text
        assert "(1 of silent workers, 0 of ended ones)" in check.text
        assert check.fix is not None
        assert str(claimed.id) in check.fix
        change(hands, """update {schema}.tasks set flags = '{{"infrastructure_resilient": true}}'""")
        assert examine(app)["SWEEPER"].verdict is Verdict.OK
        change(hands, "update {schema}.tasks set flags = null, left_claim_id = claim_id")
        assert examine(app)["SWEEPER"].verdict is Verdict.OK
        change(hands, "update {schema}.tasks set left_claim_id = null")
        assert examine(app)["SWEEPER"].verdict is Verdict.FAIL
        with other(app, recovery=RecoveryConfig(auto_fail_stale_running=False)) as careless:
            assert examine(careless)["SWEEPER"].verdict is Verdict.OK
        off = RecoveryConfig(auto_fail_stale_running=False, auto_requeue_stale_claimed=False)
        with other(app, recovery=off) as manual:
            check = examine(manual)["SWEEPER"]
            assert (check.verdict, "is off" in check.text) == (Verdict.WARN, True)
        change(hands, "update {schema}.supervisors set last_beat_at = statement_timestamp()")
        change(
            hands,
            "update {schema}.workers set ended_at = statement_timestamp() - interval '61 s' where id = 'w1'",
        )
        assert "(0 of silent workers, 1 of ended ones)" in examine(app)["SWEEPER"].text
        change(hands, "update {schema}.workers set ended_at = null")
        hands.settle(claimed, result=b"null")
        assert examine(app)["SWEEPER"].verdict is Verdict.OK

    def test_tasks_that_nobody_takes(self, app: App, hands: Hands) -> None:
        hands.run(workers.bury_workers(worker_ids=["w1", "w2"], how="test"))
        row = workers.WorkerRow(
            id="w3", supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=["mail"],
            metadata='{"tasks": ["work"]}',
        )  # fmt: skip
        hands.run(workers.register_worker(row))
        hands.send(queue="mail")
        found = examine(app)
        assert (found["NAMES"].verdict, found["QUEUES"].verdict) == (Verdict.OK, Verdict.OK)
        strange = [hands.send("wrok", queue="mail") for _ in range(2)]
        lost = hands.send(queue="post", serial="queue:post")
        found = examine(app)
        assert found["NAMES"].verdict is found["QUEUES"].verdict is Verdict.WARN
        assert found["NAMES"].text.endswith("knows: wrok (2 in queue mail)")
        assert found["QUEUES"].text.endswith("serves: post (1)")
        assert found["QUEUES"].fix == "start workers for them: everbeat worker MODULE:APP --queues post."
        for task in (*strange, lost):
            app.cancel(task)
        found = examine(app)
        assert (found["NAMES"].verdict, found["QUEUES"].verdict) == (Verdict.OK, Verdict.OK)

    def test_what_is_held_back(self, app: App, hands: Hands) -> None:
        task = hands.send()
        change(
            hands, "insert into {schema}.pauses (kind, name, paused_by, reason) values ('task', 'work', 'brake', '50 crashes')"
        )  # fmt: skip
        change(hands, "update {schema}.tasks set suspect = true")
        found = examine(app)
        assert found["PAUSES"].verdict is found["SUSPECTS"].verdict is Verdict.WARN
        assert found["PAUSES"].text == "paused: task work by brake (50 crashes)"
        assert found["PAUSES"].fix == "when the reason is gone: everbeat tasks resume work."
        assert f"1 task may kill their worker and run alone, such as work ({task})" in found["SUSPECTS"].text
        change(hands, "delete from {schema}.pauses")
        app.cancel(task)
        found = examine(app)
        assert (found["PAUSES"].verdict, found["SUSPECTS"].verdict) == (Verdict.OK, Verdict.OK)

    def test_failures_of_the_last_minutes(self, app: App, hands: Hands) -> None:  # J4
        assert examine(app)["FAILURES"].text == "no task failed in the last 10m"
        errors = [b'{"code": "UNHANDLED_EXCEPTION", "type": "KeyError"}'] * 3 + [
            b'{"code": "NO_STOCK"}',
            b"5",
        ]
        for error in (*errors, b'{"code": "a\\u0000b"}'):
            assert hands.settle(hands.running(), "FAILED", error=error) == "FAILED"
        old = hands.running()
        hands.settle(old, "FAILED", error=b"{}")
        change(
            hands, "update {schema}.tasks set failed_at = now() - interval '11 minutes' where id = %s", old.id
        )
        check = examine(app)["FAILURES"]
        assert check.verdict is Verdict.WARN
        assert check.text.startswith("6 tasks failed in the last 10m (")
        assert "a second since the first): work: UNHANDLED_EXCEPTION (KeyError) 3 times, since " in check.text
        assert "work: NO_STOCK 1 times" in check.text
        assert "work: ? 2 times" in check.text
        change(hands, "update {schema}.tasks set failed_at = 'infinity' where id = %s", old.id)
        assert examine(app)["FAILURES"].text.startswith("6 tasks failed")

    def test_retention_lags(self, app: App, hands: Hands) -> None:
        claimed = hands.running()
        hands.settle(claimed, result=b"null")
        change(hands, "update {schema}.tasks set completed_at = completed_at - interval '722 hours'")
        assert examine(app)["RETENTION"].verdict is Verdict.OK
        change(hands, "update {schema}.tasks set completed_at = completed_at - interval '2 hours'")
        change(
            hands,
            "insert into {schema}.beats values ('s1', 1, statement_timestamp() - interval '28 hours', 0)",
        )
        check = examine(app)["RETENTION"]
        assert check.verdict is Verdict.WARN
        assert "ended tasks up to 724.0 h old (terminal_record_retention_hours is 720)" in check.text
        assert "beats up to 28.0 h old" in check.text
        keep = RecoveryConfig(terminal_record_retention_hours=None, heartbeat_retention_hours=None)
        with other(app, recovery=keep) as keeper:
            assert examine(keeper)["RETENTION"].verdict is Verdict.OK


class TestCommand:
    def test_it_answers_people_and_programs(self, everbeat: Command, app: App, hands: Hands) -> None:
        page = everbeat("doctor").assert_code(0)
        assert [line.split()[:2] for line in page.out.splitlines()] == [["OK", code] for code in ALL]
        assert page.err == f"{len(ALL)} OK, 0 WARN, 0 FAIL\n"
        document = everbeat("doctor", "shop:app", "--json").assert_code(0).document
        assert document["verdict"] == "OK"
        assert list(document["checks"][0]) == ["code", "verdict", "text", "fix"]

    def test_a_failed_check_is_the_exit_code(self, everbeat: Command, app: App, hands: Hands) -> None:
        change(hands, "update {schema}.supervisors set last_beat_at = last_beat_at - interval '1 hour'")
        hands.send()
        page = everbeat("doctor").assert_code(ExitCode.FAILED)
        assert "FAIL WORKERS      no live worker, and tasks wait" in page.out
        assert "try: start one: everbeat worker MODULE:APP." in page.out
        answer = everbeat("doctor", "--json", "--url", "postgresql://127.0.0.1:1/x").assert_code(
            ExitCode.FAILED
        )
        assert answer.document["verdict"] == "FAIL"
        assert "--long-transaction" in everbeat("doctor", "--long-transaction", "soon").assert_code(2).err


def test_a_queue_of_notifications_that_is_half_full_is_a_warning() -> None:  # J12
    for used, verdict in ((0.49, Verdict.OK), (0.5, Verdict.WARN), (0.89, Verdict.WARN), (0.9, Verdict.FAIL)):
        check = judge_notify_queue(NotifyQueue(used, (QueueHolder(7, "app of me", None),)))
        assert check.verdict is verdict
        assert (check.fix is None) is (verdict is Verdict.OK)
    assert "the server's log" in (judge_notify_queue(NotifyQueue(0.6)).fix or "")
