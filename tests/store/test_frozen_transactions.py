"""A process that freezes inside a transaction of everbeat keeps its locks for a bounded time, for every kind of transaction."""

from __future__ import annotations

import ast
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql

from everbeat import App
from everbeat.domain.doctor.findings import CheckCode
from everbeat.embedded.server import EmbeddedServer
from everbeat.examination import Examination
from everbeat.store import migrating, workers
from everbeat.store.database import Database
from everbeat.store.session import Session
from everbeat.store.target import Target, atransaction, is_pooled, transaction
from tests.architecture.source_tree import PACKAGE, functions, modules
from tests.conftest import NewServer
from tests.store.conftest import StoreHarness
from tests.store.programs.in_transaction import KINDS
from tests.stories.pooler import pooled

WITHIN_S = 15.0
MIGRATION = "store/migrating.py _create"


def openers() -> set[str]:
    """Return the functions of the source that open a transaction of everbeat."""
    return {
        f"{module.name} {function.name}"
        for module in modules(PACKAGE)
        for function in functions(module.tree)
        for node in ast.walk(function)
        if module.name
        not in ("store/target.py", "store/reading.py")  # transactions that only read lock no row
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("transaction", "atransaction")
    }


def test_the_frozen_programs_cover_every_function_that_opens_a_transaction() -> None:  # J14
    assert openers() == set(KINDS)


@contextmanager
def waiting_in(
    kind: str, target: Target, worker_id: str, *, observer: Connection[Any]
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that waits for a lock in a transaction of this kind. The test freezes it. It continues after the block."""
    command = [sys.executable, "-m", "tests.store.programs.in_transaction"]
    process = subprocess.Popen(
        [*command, kind, target.url, target.schema, worker_id], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            waits = (
                "select 1 from pg_stat_activity where application_name like %s and wait_event_type = 'Lock'"
            )
            give_up_at = time.monotonic() + 30
            while observer.execute(waits, [f"frozen {worker_id}%"]).fetchone() is None:
                assert time.monotonic() < give_up_at, f"{kind} waits for no lock"
                assert process.poll() is None
                time.sleep(0.02)  # polls from outside until the process waits
            yield process
            process.send_signal(signal.SIGCONT)
            output, _ = process.communicate(timeout=30)
            told = "not migrated\n" if kind == MIGRATION else "True\n"
            assert (output, process.returncode) == (told, 0), f"{kind} did not go on when it was thawed"
        finally:
            process.kill()


@pytest.mark.long
def test_a_process_frozen_in_any_kind_of_transaction_blocks_others_for_a_bounded_time_and_the_doctor_names_it(
    db: StoreHarness, schema: str
) -> None:  # J14
    kinds = {kind: f"w{number}" for number, kind in enumerate(KINDS)}
    db.supervisor("s9", *[name for name in kinds.values() if name not in ("w1", "w2")])
    empty = Target.parse(db.target.url, schema=f"{schema}_m")
    with ExitStack() as stack, ThreadPoolExecutor(len(kinds)) as threads:
        locks: list[Connection[Any]] = []
        processes: list[subprocess.Popen[str]] = []
        for kind, worker_id in kinds.items():
            lock = stack.enter_context(psycopg.connect(db.target.url, autocommit=True))
            lock.execute("begin")
            if kind == MIGRATION:
                lock.execute("select pg_advisory_xact_lock(%s)", [empty.lock_key("migrations")])
            else:
                row = sql.SQL("select from {}.workers where id = %s for update")
                lock.execute(row.format(sql.Identifier(schema)), [worker_id])
            locks.append(lock)
            target = empty if kind == MIGRATION else db.target
            waiting = waiting_in(kind, target, worker_id, observer=db.connection)
            processes.append(stack.enter_context(waiting))
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        frozen_at = time.monotonic()
        for lock in locks:
            lock.execute("commit")

        def waited(kind: str) -> float:
            if kind == MIGRATION:
                with empty.connect("everbeat test") as connection:
                    assert migrating.migrate(connection, empty) != ()
                    connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(empty.schema)))
            else:
                assert Database(db.target).run(workers.beat_worker(kinds[kind])) is True
            return time.monotonic() - frozen_at

        waits = threads.map(waited, kinds)  # starts now
        holders = {f"frozen {name}" for name in kinds.values()}
        app = stack.enter_context(app_on(db.target))
        doctor = Examination(app, long_transaction_s=300)
        seen: set[str] = set()
        give_up_at = time.monotonic() + WITHIN_S
        while seen != holders:
            assert time.monotonic() < give_up_at, f"doctor names only {sorted(seen)}"
            (check,) = [each for each in doctor.checks() if each.code == CheckCode.LOCKS]
            seen |= {name for name in holders if name in check.text}
        for kind, took in zip(kinds, waits, strict=True):
            print(f"{kind}: {took:.2f} s")
            assert 5 < took < WITHIN_S, kind


@contextmanager
def app_on(target: Target) -> Iterator[App]:
    app = App(target.url, schema=target.schema)
    try:
        yield app
    finally:
        app.close()


SETTINGS = "select array_agg(setting::integer order by name) from pg_settings where name ~ %s"
BOUNDS = "^(client_connection_check_interval|idle_in_transaction_session_timeout|tcp_keepalives|tcp_user)"
PROMPT, PATIENT = [2_000, 10_000, 3, 5, 2, 10_000], [2_000, 10_000, 127, 60, 120, 0]


@pytest.fixture
def tcp_server(new_server: NewServer) -> EmbeddedServer:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return new_server(tcp_port=port)


async def test_sessions_have_short_network_timeouts_except_the_session_that_holds_the_lock(
    tcp_server: EmbeddedServer,
) -> None:  # J14
    target = Target.parse(tcp_server.tcp_url)
    for patient, expected in ((False, PROMPT), (True, PATIENT)):
        session = Session(target, "everbeat test", patient=patient)
        connection = await session.connection()
        assert await (await connection.execute(SETTINGS, [BOUNDS])).fetchone() == (expected,)
        await session.drop()
    with target.connect("everbeat test") as threads:
        assert threads.execute(SETTINGS, [BOUNDS]).fetchone() == (PROMPT,)
    loops = await target.aconnect("everbeat test")
    assert await (await loops.execute(SETTINGS, [BOUNDS])).fetchone() == (PROMPT,)
    await loops.close()


async def test_a_transaction_behind_a_pooler_sets_its_own_timeout_and_leaves_no_setting(
    tcp_server: EmbeddedServer,
) -> None:  # J14
    bound = "select current_setting('idle_in_transaction_session_timeout')"
    with pooled(tcp_server.tcp_url) as url:
        target = Target.parse(url)
        with target.connect("everbeat test") as connection:
            assert is_pooled(connection)
            with transaction(connection):
                assert connection.execute(bound).fetchone() == ("10s",)
            assert connection.execute(bound).fetchone() == ("0",)
        loops = await target.aconnect("everbeat test")
        async with atransaction(loops):
            assert await (await loops.execute(bound)).fetchone() == ("10s",)
        await loops.close()
