"""Test resources and middleware of a worker inside another program."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from everbeat import App, Context, Failed, RetryLater, RetryPolicy
from everbeat.errors import MIDDLEWARE_FAILED, ResourceFailed
from everbeat.logging import TaskFilter, task_fields
from everbeat.worker.messages import AttemptEnded, WorkerMessage
from everbeat.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("migrated")
SETTINGS = {"process_concurrency": 0}


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema)
    yield opened
    opened.close()


async def test_the_worker_opens_the_resources_on_the_programs_loop_and_closes_them_last(app: App) -> None:
    log: list[str] = []
    started = asyncio.Event()

    @app.resource
    async def pool() -> AsyncIterator[asyncio.AbstractEventLoop]:
        log.append("opened")
        yield asyncio.get_running_loop()
        log.append("closed")

    @app.task
    async def use() -> bool:
        started.set()
        await asyncio.sleep(0.2)  # the worker is stopped meanwhile
        log.append("used")
        return pool.value is asyncio.get_running_loop()

    worker = asyncio.create_task(app.arun_worker(**SETTINGS))
    handle = await use.asend()
    await started.wait()
    app.stop_worker()
    await worker
    assert await handle.aresult(timeout=30) is True
    assert log == ["opened", "used", "closed"]


def test_resources_stay_open_until_the_worker_has_drained_when_asyncio_run_ends(app: App) -> None:
    log: list[str] = []

    @app.resource
    async def pool() -> AsyncIterator[str]:
        yield "pool"
        log.append("closed")

    @app.task(on_stop="retry")
    async def use() -> None:
        started.set()
        try:
            await asyncio.sleep(60)  # the end of the program stops it
        finally:
            log.append(f"stopped with {pool.value}")

    started = asyncio.Event()

    async def main() -> None:
        task = asyncio.create_task(app.arun_worker(**SETTINGS))
        await use.asend()
        await started.wait()
        del task

    asyncio.run(main())
    assert log == ["stopped with pool", "closed"]


def test_resources_stay_open_for_code_that_outlasts_the_worker_until_the_loop_ends(app: App) -> None:
    log: list[str] = []
    running, release = threading.Event(), threading.Event()

    @app.resource
    async def pool() -> AsyncIterator[str]:
        yield "pool"
        log.append("closed")

    @app.task(on_crash="retry")
    def stuck() -> None:
        running.set()
        release.wait(60)

    async def main() -> None:
        task = asyncio.create_task(app.arun_worker(grace=0.1, **SETTINGS))
        await stuck.asend()
        await asyncio.to_thread(running.wait, 30)
        app.stop_worker()
        await task
        log.append(f"worker ended with {pool.value}")

    asyncio.run(main())
    release.set()
    assert log == ["worker ended with pool", "closed"]


async def test_a_program_that_has_opened_the_resources_shares_them_with_its_worker(app: App) -> None:
    log: list[str] = []

    @app.resource
    def pool() -> Iterator[str]:
        log.append("opened")
        yield "pool"
        log.append("closed")

    @app.task
    def use() -> str:
        return pool.value

    async with app.aresources():
        worker = asyncio.create_task(app.arun_worker(**SETTINGS))
        handle = await use.asend()
        assert await handle.aresult(timeout=30) == "pool"
        app.stop_worker()
        await worker
        assert log == ["opened"]
    assert log == ["opened", "closed"]


async def test_a_worker_whose_resource_fails_raises_the_reason_and_takes_no_task(app: App) -> None:
    @app.resource
    def pool() -> Iterator[None]:
        raise ConnectionError("no broker")
        yield

    @app.task
    def use() -> None: ...

    await use.asend()
    with pytest.raises(ResourceFailed, match="Resource 'pool'"):
        await app.arun_worker(**SETTINGS)
    assert await app.alist_active_workers() == []
    (task,) = await app.alist_tasks()
    assert task.state == "PENDING"


@pytest.mark.parametrize("listed", [MIDDLEWARE_FAILED, "NO_BROKER", OSError])
async def test_a_failed_middleware_is_retried_by_its_code_and_by_the_class_that_it_raised(
    app: App, listed: str | type[BaseException]
) -> None:
    app.exception_codes = {ConnectionError: "NO_BROKER"}

    @app.around_run
    def connect(ctx: Context) -> Iterator[None]:
        if ctx.attempt == 1:
            raise ConnectionError("no broker")
        yield

    @app.task(retry=RetryPolicy(max_retries=1, intervals=[1], auto_retry_for=[listed]))
    async def again() -> int:
        return Context.current().attempt

    @app.task
    def once() -> None: ...

    worker = asyncio.create_task(app.arun_worker(**SETTINGS))
    handle = await again.asend()
    outcome = await (await once.asend()).aoutcome(timeout=30)
    assert isinstance(outcome, Failed)
    error = outcome.error
    assert (error.code, error.type) == (MIDDLEWARE_FAILED, "ConnectionError")
    assert error.data == {"middleware": "connect", "where": error.data["where"], "phase": "before"}
    assert 'raise ConnectionError("no broker")' in error.traceback
    assert await handle.aresult(timeout=30) == 2
    app.stop_worker()
    await worker


async def test_a_postponed_attempt_passes_through_middleware_and_is_postponed(app: App) -> None:
    seen: list[str] = []

    @app.around_run
    def watch(ctx: Context) -> Iterator[None]:
        try:
            yield
        except RetryLater as later:
            seen.append(str(later.reason))
            raise

    @app.task
    def busy(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise RetryLater("0.1s", reason="busy")
        return ctx.attempt

    worker = asyncio.create_task(app.arun_worker(**SETTINGS))
    assert await (await busy.asend()).aresult(timeout=30) == 2
    assert seen == ["busy"]
    app.stop_worker()
    await worker


async def test_only_the_log_lines_of_code_belong_to_its_attempt(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.addFilter(TaskFilter())

    @app.task
    async def pack() -> str:
        logging.getLogger("shop").warning("packing")
        logging.getLogger("shop").warning("by hand", extra={"attempt": "third"})
        return str(Context.current().task_id)

    logging.getLogger("shop").warning("outside")
    worker = asyncio.create_task(app.arun_worker(**SETTINGS))
    with caplog.at_level(logging.DEBUG):
        task_id = await (await pack.asend()).aresult(timeout=30)
        app.stop_worker()
        await worker
    records = {record.getMessage(): vars(record) for record in caplog.records}
    assert (records["packing"]["task_id"], records["packing"]["task_name"]) == (task_id, "pack")
    assert records["packing"]["attempt"] == 1
    assert records["packing"]["worker_id"]
    assert records["by hand"]["attempt"] == "third"
    of_attempt = [each.getMessage() for each in caplog.records if vars(each)["task_id"] == task_id]
    assert of_attempt == ["packing", "by hand"]
    assert records["outside"]["task_id"] == records["outside"]["attempt"] == ""
    assert task_fields() == {}
    caplog.handler.filters.clear()


async def test_what_the_worker_does_after_an_attempt_does_not_belong_to_the_attempt(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    dispatch = Worker._dispatch

    def observed(worker: Worker, message: WorkerMessage) -> None:
        if isinstance(message, AttemptEnded):
            found.append(
                Context.current_or_none()
            )  # tasks that start here inherit it, and so do their log lines
        dispatch(worker, message)

    monkeypatch.setattr(Worker, "_dispatch", observed)

    @app.task
    async def pack() -> None: ...

    @app.task
    def send() -> None: ...

    worker = asyncio.create_task(app.arun_worker(**SETTINGS))
    for task in (pack, send):
        await (await task.asend()).aresult(timeout=30)
    app.stop_worker()
    await worker
    assert found == [None, None]
