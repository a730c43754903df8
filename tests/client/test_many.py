"""Test calls that take many calls or handles, and their errors for other arguments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from everbeat import App, Call, Handle, SyncTask
from everbeat.errors import ConfigurationError, PayloadError, TaskNotFound, WaitTimeout

pytestmark = pytest.mark.usefixtures("migrated")
Work = SyncTask[[int], None]


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    made = App(database_url, schema=schema)
    yield made
    made.close()


@pytest.fixture
def work(app: App) -> Work:
    @app.task
    def work(number: int) -> None: ...

    return work


def test_send_many_refuses_an_object_that_is_not_an_iterable_of_calls(app: App, work: Work) -> None:
    async def calls() -> AsyncIterator[Call[None]]:
        yield work.call(1)

    wrong: list[tuple[Any, str, str]] = [
        (work.call(1), "type Call", r"write \[task.call\(...\)\]"),
        (None, "None", "task.call"),
        (5, "type int", "task.call"),
        (calls(), "async_generator", "await asend_many"),
    ]
    for given, told, fix in wrong:
        for send in (app.send_many, work.send_many):
            with pytest.raises(PayloadError, match=told) as refusal:
                send(given)
            assert refusal.match(fix)
            assert "send_many()" in str(refusal.value)
    assert app.list_tasks() == []


def test_send_many_names_the_position_of_an_entry_that_is_not_a_call(app: App, work: Work) -> None:
    with pytest.raises(PayloadError, match=r"Entry 2 of the calls to send, .*, is not a call"):
        app.send_many([work.call(1), work.call(2), work, work.call(4)])  # type: ignore[list-item]
    assert app.list_tasks() == []


def test_send_many_raises_an_error_of_the_callers_generator_unchanged(app: App, work: Work) -> None:
    def calls() -> Iterator[Call[None]]:
        yield work.call(1)
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        app.send_many(calls())


@pytest.mark.parametrize("name", ["results", "outcomes"])
def test_results_and_outcomes_refuse_an_object_that_is_not_an_iterable_of_handles(
    app: App, work: Work, name: str
) -> None:
    ask: Callable[[Any], object] = getattr(app, name)
    handle = work.send(1)
    wrong: list[tuple[Any, str]] = [
        (None, rf"handles of {name}\(\) = None"),
        (handle, rf"write \[handle\], or call handle.{name.removesuffix('s')}\(\)"),
        ([1], r"handles\[0\] = 1: must be a handle"),
        ([handle, work], r"handles\[1\] = .*SyncTask"),
        ([handle.id], r"handles\[0\] = .*app.handle\(id\)"),
    ]
    for given, told in wrong:
        with pytest.raises(ConfigurationError, match=told):
            ask(given)


async def test_the_async_twins_take_async_iterables(app: App, work: Work) -> None:
    async def calls() -> AsyncIterator[Call[None]]:
        for number in range(3):
            yield work.call(number)

    async def sent() -> AsyncIterator[Handle[None]]:
        for handle in handles:
            yield handle

    handles = await app.asend_many(calls())
    handles += await work.asend_many(calls())
    assert len(await app.alist_tasks()) == 6
    for handle in handles:
        await handle.acancel()
    assert len(await app.aoutcomes(sent())) == 6
    with pytest.raises(PayloadError, match=r"asend_many\(\) takes an iterable of calls"):
        await app.asend_many(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"handles of aresults\(\)"):
        await app.aresults(None)  # type: ignore[arg-type]
    await app.aclose()


def test_results_that_time_out_report_how_many_tasks_have_not_ended(app: App, work: Work) -> None:
    handles = app.send_many(work.call(number) for number in range(5))
    handles[1].cancel()
    handles[3].cancel()
    with pytest.raises(WaitTimeout, match=r"^3 of 5 tasks have not ended. Task .* is still PENDING") as late:
        app.results(handles, timeout="100ms")
    assert (late.value.missing, late.value.waited_for, late.value.task_id) == (3, 5, handles[0].id)
    with pytest.raises(WaitTimeout, match=r"^Task .* is still PENDING"):
        handles[0].result(timeout="100ms")
    with pytest.raises(TaskNotFound):
        app.outcomes([*handles, app.handle(uuid4())], timeout="100ms")


def test_a_send_with_connection_none_is_refused(app: App, work: Work) -> None:
    for send in (
        lambda: work.with_options(connection=None).send(1),
        lambda: app.send_by_name("work", {"number": 1}, connection=None),
        lambda: app.send_by_name("unknown", connection=None),
    ):
        with pytest.raises(ConfigurationError, match=r"connection = None: is not a connection.*leave it out"):
            send()
    assert app.list_tasks() == []
