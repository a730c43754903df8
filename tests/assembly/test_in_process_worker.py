"""Test a worker inside another program, on its event loop or in a thread."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from everbeat import App, Cancel, Context, Failed, RecoveryConfig, TaskState
from everbeat.client.database_access import database_of
from everbeat.errors import ConfigurationError, DatabaseUnreachable, WorkerError
from everbeat.recovery import RecoveryContext, Reschedule, SweepSummary
from everbeat.store import claims, workers
from everbeat.store.address import DatabaseAddress, OpenDatabase
from everbeat.store.database import Database
from tests.variants import long_except

pytestmark = pytest.mark.usefixtures("migrated")
FAST = RecoveryConfig(
    runner_heartbeat_interval_ms=1_000,
    claimer_heartbeat_interval_ms=1_000,
    claimed_stale_threshold_ms=2_000,
    running_stale_threshold_ms=2_000,
    check_interval_ms=1_000,
)


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema, recovery=FAST)
    yield opened
    opened.close()


def until(truth: Callable[[], object], *, within: float = 30) -> None:
    end = time.monotonic() + within
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.02)  # only the database shows the awaited change


def test_code_that_outlasts_its_in_process_worker_and_raises_cancel_cancels_its_children(app: App) -> None:
    running, release = threading.Event(), threading.Event()

    @app.task(queue="never-served")
    def child() -> None: ...

    @app.task(on_crash="retry")
    def withdraw(ctx: Context) -> None:
        ctx.send(child.call())
        running.set()
        release.wait(60)
        raise Cancel("too late")

    settings = {"grace": 0.1, "process_concurrency": 0, "queues": ["default"]}
    thread = threading.Thread(target=app.run_worker, kwargs=settings)
    thread.start()
    handle = withdraw.send()
    assert running.wait(30)
    app.stop_worker()
    thread.join(30)
    release.set()
    outcome = handle.outcome(timeout=30)
    assert isinstance(outcome, Failed)
    assert outcome.error.message == "too late"
    (sent,) = app.list_tasks(name="child")
    assert sent.state == TaskState.CANCELLED
    until(lambda: app.list_active_workers() == [])


async def test_an_in_process_worker_on_an_event_loop_drains_when_cancelled(app: App) -> None:  # D7
    started, release = asyncio.Event(), asyncio.Event()

    @app.task
    async def slow() -> str:
        started.set()
        await release.wait()
        return "done"

    @app.task
    def threaded(n: int) -> int:
        return n + 1

    working = asyncio.ensure_future(app.arun_worker(process_concurrency=0))
    assert await (await threaded.asend(1)).aresult(timeout=30) == 2
    handle = await slow.asend()
    await asyncio.wait_for(started.wait(), 30)
    working.cancel()
    late = await threaded.asend(5)
    asyncio.get_running_loop().call_later(0.3, release.set)  # after the drain began
    with pytest.raises(asyncio.CancelledError):
        await working
    assert await handle.aresult(timeout=10) == "done"
    assert (await late.ainfo()).state is TaskState.PENDING
    (worker,) = await app.alist_workers()
    (supervisor,) = await app.alist_supervisors()
    assert (worker.ended_how, supervisor.ended_how) == ("left", "left")
    await app.aclose()


def test_an_in_process_worker_in_a_thread_is_stopped_from_another_thread(app: App) -> None:  # D7
    @app.task
    async def hello(n: int) -> int:
        return n

    thread = threading.Thread(target=app.run_worker)
    thread.start()
    assert [hello.send(n).result(timeout=30) for n in range(3)] == [0, 1, 2]
    (worker,) = app.list_active_workers()
    assert worker.tasks == ("hello",)
    app.stop_worker()
    thread.join(30)
    assert not thread.is_alive()
    assert app.list_active_workers() == []


def test_a_quiet_in_process_worker_claims_nothing_until_it_is_resumed(app: App) -> None:  # J1 D7
    @app.task
    async def hello(n: int) -> int:
        return n

    thread = threading.Thread(target=app.run_worker, kwargs={"process_concurrency": 0})
    thread.start()
    assert hello.send(1).result(timeout=30) == 1
    (tree,) = app.quiet_workers(everyone=True)
    assert tree.quiet_since is not None
    sent = [hello.send(2)]

    def one_waits() -> bool:
        time.sleep(1)  # longer than a claiming worker needs for a task
        if sent[-1].info().state is not TaskState.PENDING:
            sent.append(hello.send(2))  # the worker had not received the request yet
            return False
        return True

    until(one_waits)
    waits = sent[-1]
    assert [reason.code for reason in app.explain(waits.id).reasons] == ["WORKERS_QUIET"]
    app.resume_workers(everyone=True)
    assert waits.result(timeout=30) == 2
    app.stop_worker()
    thread.join(30)
    assert not thread.is_alive()


def test_a_second_stop_of_an_in_process_worker_ends_the_grace_period(app: App) -> None:
    running = threading.Event()

    @app.task(on_crash="retry")
    async def slow() -> None:
        running.set()
        await asyncio.sleep(600)  # until it is cancelled

    thread = threading.Thread(target=app.run_worker, kwargs={"grace": "10m"})
    thread.start()
    handle = slow.send()
    assert running.wait(30)
    app.stop_worker()
    app.stop_worker()
    thread.join(30)
    assert not thread.is_alive()
    info = handle.info()
    assert (info.state, info.retry_count, info.attempts[0].outcome) == (TaskState.PENDING, 0, "RELEASED")


def test_a_stopped_in_process_worker_fails_running_threads_with_on_stop_fail(app: App) -> None:  # J1
    running, release = threading.Barrier(3), threading.Event()

    @app.task(on_crash="retry", on_stop="fail")
    def never_again() -> None:
        running.wait(30)
        release.wait(60)

    @app.task(on_crash="retry")
    def again() -> None:
        running.wait(30)
        release.wait(60)

    thread = threading.Thread(target=app.run_worker, kwargs={"grace": 0.1, "process_concurrency": 0})
    thread.start()
    failed, left = never_again.send(), again.send()
    running.wait(30)
    app.stop_worker()
    thread.join(30)
    assert not thread.is_alive()
    info = failed.info()
    assert info.error is not None
    assert (info.state, info.error.code) == (TaskState.FAILED, "WORKER_STOPPED")
    assert left.info().state is TaskState.RUNNING  # its next run must wait for a recovery
    release.set()


@pytest.mark.parametrize("ends", long_except(["done", "stopped"], "stopped"))
def test_a_task_of_a_stopped_in_process_worker_runs_again_only_after_its_code_ended(
    app: App, database_url: str, schema: str, ends: str
) -> None:  # J1
    """The worker keeps the lease and its heartbeats; a late result counts, and code without a result is released."""
    running, release, moments = threading.Event(), threading.Event(), list[str]()

    def code(ctx: Context) -> str:
        moments.append(f"begins {ctx.attempt}")
        running.set()
        release.wait(60)
        moments.append(f"ends {ctx.attempt}")
        if ends == "stopped":
            ctx.check_cancelled()
        return f"attempt {ctx.attempt}"

    again = app.task(name="again", on_crash="retry")(code)
    thread = threading.Thread(target=app.run_worker, kwargs={"grace": 0.1, "process_concurrency": 0})
    thread.start()
    handle = again.send()
    assert running.wait(30)
    app.stop_worker()
    thread.join(30)
    assert not thread.is_alive()
    other = App(database_url, schema=schema, recovery=FAST)
    other.task(name="again", on_crash="retry")(code)
    second = threading.Thread(target=other.run_worker, kwargs={"process_concurrency": 0})
    second.start()
    time.sleep(5)  # more than two thresholds, after which a tree without a supervisor would be recovered
    assert (handle.info().state, moments) == (TaskState.RUNNING, ["begins 1"])
    release.set()
    runs = 1 if ends == "done" else 2
    assert handle.result(timeout=30) == f"attempt {runs}"
    assert moments == [f"{what} {number}" for number in range(1, runs + 1) for what in ("begins", "ends")]
    assert (handle.info().retry_count, handle.info().recoveries) == (0, ())
    other.stop_worker()
    second.join(30)
    until(lambda: app.list_active_workers() == [])
    other.close()


def test_an_in_process_worker_whose_event_loop_is_blocked_is_not_declared_dead(  # D4, D7
    app: App, database_url: str, schema: str
) -> None:
    @app.task
    async def blocking() -> str:
        time.sleep(6)  # blocks the loop for three thresholds: the mistake under test
        return "alive"

    observer = App(database_url, schema=schema, recovery=FAST.replace(detect_session_loss=False))

    @observer.task
    async def nothing() -> None: ...

    threads = [threading.Thread(target=each.run_worker) for each in (app, observer)]
    for thread in threads:
        thread.start()
    handle = blocking.send()
    assert handle.result(timeout=60) == "alive"
    assert handle.info().recoveries == ()
    assert [supervisor.ended_how for supervisor in app.list_supervisors()] == [None, None]
    for each in (app, observer):
        each.stop_worker()
    for thread in threads:
        thread.join(30)
    observer.close()


def test_an_in_process_worker_supports_cancels_and_progress(app: App) -> None:
    @app.task
    async def slow(context: Context) -> None:
        context.progress("waiting", 0.5, "for the end")
        await asyncio.Event().wait()

    thread = threading.Thread(target=app.run_worker)
    thread.start()
    handle = slow.send()
    until(lambda: (progress := handle.info().progress) is not None and progress.stage == "waiting")
    handle.cancel()
    outcome = handle.outcome(timeout=30)
    assert isinstance(outcome, Failed)
    assert outcome.error.code == "TASK_CANCELLED"
    app.stop_worker()
    thread.join(30)


def test_an_in_process_worker_refuses_several_processes(app: App) -> None:
    settings: Any = {"processes": 2}
    with pytest.raises(ConfigurationError, match=r"processes = 2: cannot be set for an in-process worker"):
        app.run_worker(**settings)


def test_an_in_process_worker_that_cannot_work_fails_at_once(app: App) -> None:
    with pytest.raises(WorkerError, match="no tasks"):
        app.run_worker()

    @app.task(run_in="process")
    def processed() -> None: ...

    with pytest.raises(WorkerError, match=r"run_in='process'.*cannot find this app"):
        app.run_worker()
    nowhere = App("postgresql://postgres@127.0.0.1:1/nowhere")

    @nowhere.task
    def work() -> None: ...

    with pytest.raises(DatabaseUnreachable):
        nowhere.run_worker()


PROGRAM = """
import os, sys
from everbeat import App

app = App({url!r}, schema={schema!r})

@app.task(run_in="process")
def where() -> int:
    return os.getpid()

if __name__ == "__main__":
    print("ready", flush=True)
    app.run_worker()
    print("left", flush=True)
"""


@pytest.mark.story
def test_a_program_with_a_worker_runs_until_sigterm_and_starts_task_processes(  # D7, B12
    app: App, database_url: str, schema: str, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(url=database_url, schema=schema))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        handle = app.send_by_name("where")
        assert handle.result(timeout=60) not in (process.pid, None)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output.split()) == (0, ["ready", "left"])
    assert app.list_active_workers() == []


SHOP = """
from everbeat import App

app = App({url!r}, schema={schema!r})
"""

DEEDS = """
import os
from shop import app

@app.task(run_in="process")
def where() -> int:
    return os.getpid()
"""


@pytest.mark.parametrize("place", long_except(["sample_tasks.py", "program.py"], "sample_tasks.py"))
def test_task_processes_of_an_in_process_worker_import_the_modules_of_its_tasks(
    app: App, database_url: str, schema: str, tmp_path: Path, place: str
) -> None:  # D7
    """One module makes the app and another registers the task. A task in the program's own file is refused: an import would run it."""
    app.migrate()
    run = "\nif __name__ == '__main__':\n    app.run_worker()\n"
    (tmp_path / "shop.py").write_text(SHOP.format(url=database_url, schema=schema))
    (tmp_path / "program.py").write_text("from sample_tasks import app\n" + run)
    (tmp_path / place).write_text(DEEDS + (run if place == "program.py" else ""))
    handle = app.send_by_name("where")
    process = subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        if place == "program.py":
            assert "are registered in the program's main file" in process.communicate(timeout=60)[1]
            return
        assert handle.result(timeout=60) not in (process.pid, None)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()


@pytest.mark.parametrize("settings", [{"max_rss": "512MB"}, {"max_tasks_per_process": 10}])
def test_an_in_process_worker_refuses_recycling_limits(app: App, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigurationError, match=f"pass {name}=None to run_worker, or run 'everbeat worker'"):
        app.run_worker(**settings)
    app.worker = app.worker.replace(**settings)
    with pytest.raises(ConfigurationError, match="no supervisor can replace"):
        app.run_worker()
    with pytest.raises(WorkerError, match="no tasks"):
        app.run_worker(**{name: None})


async def test_recovery_hooks_of_an_in_process_worker_run_in_its_program(app: App) -> None:  # F7
    loops: list[object] = []
    threads: list[int] = []
    told = asyncio.Event()

    @app.task(run_in="thread")
    def doomed() -> None: ...

    @app.on_recovery
    async def decide(context: RecoveryContext) -> Reschedule:
        loops.append(asyncio.get_running_loop())
        return Reschedule(timedelta(seconds=0))

    @app.on_interrupted
    def note(context: RecoveryContext) -> None:
        threads.append(threading.get_ident())

    @app.on_recovered
    async def recovered(summary: SweepSummary) -> None:
        told.set()

    handle = await doomed.asend()
    leave_behind(app)
    working = asyncio.ensure_future(app.arun_worker(process_concurrency=0))
    await handle.aresult(timeout=30)
    await asyncio.wait_for(told.wait(), 20)
    assert loops == [asyncio.get_running_loop()], "async hooks run on the program's loop"
    assert threads
    assert threading.main_thread().ident not in threads
    app.stop_worker()
    await working
    await app.aclose()


def leave_behind(app: App) -> None:
    """Let a worker that has ended hold the task that was sent."""
    target = database_of(app).target
    row = workers.SupervisorRow(
        id="gone", hostname="gone", pid=1, boot_id=None, pid_namespace=None, process_started=None, lock_key=1, session_name="gone"
    )  # fmt: skip
    worker = workers.WorkerRow(
        id="gone-w", supervisor_id="gone", hostname="gone", pid=2, process_started=None, queues=None
    )
    database = Database(target)
    database.run(workers.register_supervisor(row))
    database.run(workers.register_worker(worker))
    claim = claims.claim(
        worker_id="gone-w", claim_call=uuid4(), names=["doomed"], limit=1, queues=None, queue_priorities={}
    )
    assert len(database.run(claim)) == 1
    assert database.run(workers.end_supervisor("gone", how="session"))
    database.close()


async def test_a_worker_that_is_cancelled_while_its_database_opens_closes_it(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:  # D7
    @app.task
    def never() -> None: ...

    is_opening, can_open = threading.Event(), threading.Event()
    closed: list[OpenDatabase] = []
    open_now, close_now = DatabaseAddress.open, OpenDatabase.close

    def open_late(address: DatabaseAddress) -> OpenDatabase:
        is_opening.set()
        assert can_open.wait(30)
        return open_now(address)

    def close(opened: OpenDatabase) -> None:
        closed.append(opened)
        close_now(opened)

    monkeypatch.setattr(DatabaseAddress, "open", open_late)
    monkeypatch.setattr(OpenDatabase, "close", close)
    running = asyncio.create_task(app.arun_worker())
    assert await asyncio.to_thread(is_opening.wait, 30)
    running.cancel()
    can_open.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(closed) == 1
