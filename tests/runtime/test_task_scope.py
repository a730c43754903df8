from __future__ import annotations

import asyncio
import gc
import subprocess
import sys

import pytest

from everbeat.runtime.task_scope import EXIT_SOFTWARE, CriticalEnded, TaskScope
from everbeat.testing.clock import settle
from tests.runtime.programs.start import environment


async def for_ever() -> None:
    await asyncio.Event().wait()


async def crash() -> None:
    raise ValueError("no luck")


async def nothing() -> None:
    return


async def test_a_task_scope_keeps_a_reference_to_each_task() -> None:
    done = asyncio.Event()
    scope = TaskScope(name="test")

    async def wait_then_say() -> None:
        # Only the coroutine refers to this future: without another reference the garbage collector would delete both.
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.02, future.set_result, None)
        await future
        done.set()

    scope.start(wait_then_say(), name="held")
    gc.collect()
    async with asyncio.timeout(5):
        await done.wait()
    await settle()
    assert len(scope) == 0


async def test_closing_a_task_scope_also_ends_a_task_that_catches_one_cancellation() -> None:
    ended: list[str] = []

    async def stubborn() -> None:
        try:
            await for_ever()
        except asyncio.CancelledError:
            try:
                await for_ever()
            finally:
                ended.append("stubborn")

    async def polite() -> None:
        try:
            await for_ever()
        finally:
            await settle()
            ended.append("polite")

    scope = TaskScope(name="test", on_fatal=lambda name, error: pytest.fail(f"{name} {error!r}"))
    scope.start(stubborn(), name="stubborn")
    scope.start(polite(), name="polite", critical=True)
    await settle()
    async with asyncio.timeout(10):
        await scope.close()
        await scope.close()
    assert sorted(ended) == ["polite", "stubborn"]
    with pytest.raises(RuntimeError, match="is closing and starts nothing new; 'late' was not started"):
        scope.start(for_ever(), name="late")


async def test_a_crashed_task_of_a_scope_is_logged_and_the_others_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with TaskScope(name="test") as scope:
        other = scope.start(for_ever(), name="other")
        scope.start(crash(), name="crasher")
        await settle()
        assert not other.done()
    assert "name=crasher" in caplog.text
    assert "ValueError: no luck" in caplog.text


@pytest.mark.parametrize(("coroutine", "kind"), [(crash, ValueError), (nothing, CriticalEnded)])
async def test_a_critical_task_that_crashes_or_returns_is_fatal_once(
    coroutine: object, kind: type[Exception]
) -> None:
    fatal: list[tuple[str, BaseException]] = []
    scope = TaskScope(name="test", on_fatal=lambda name, error: fatal.append((name, error)))
    assert callable(coroutine)
    scope.start(coroutine(), name="heart", critical=True)
    scope.start(coroutine(), name="second", critical=True)
    await settle()
    assert [(name, type(error)) for name, error in fatal] == [("heart", kind)]
    await scope.close()


async def test_a_critical_task_that_fails_during_the_close_is_not_fatal() -> None:
    fatal: list[str] = []

    async def fails_to_close() -> None:
        try:
            await for_ever()
        finally:
            raise OSError("connection lost")

    scope = TaskScope(name="test", on_fatal=lambda name, error: fatal.append(name))
    scope.start(fails_to_close(), name="heart", critical=True)
    await settle()
    await scope.close()
    assert fatal == []


def test_sheltered_tasks_outlive_asyncio_run_until_their_owner_closes() -> None:
    told: list[str] = []
    ending: list[asyncio.AbstractEventLoop] = []

    def on_loop_ending() -> None:
        told.append("the loop ends")
        ending[0].call_soon(leave.set)

    async def times_out_now_and_then() -> None:
        while True:
            try:
                async with asyncio.timeout(0.001):
                    await for_ever()
            except TimeoutError:
                told.append("timed out")  # an ordinary cancellation still works

    async def own() -> None:
        scope = TaskScope(
            name="test",
            on_fatal=lambda name, _: told.append(f"{name} is fatal"),
            on_loop_ending=on_loop_ending,
        )
        scope.start(times_out_now_and_then(), name="heart", critical=True)
        try:
            await for_ever()
        finally:
            await leave.wait()
            told.clear()
            await asyncio.sleep(0.05)  # time in which the task must continue
            await scope.close()

    async def main() -> None:
        ending.append(asyncio.get_running_loop())
        owner = asyncio.ensure_future(own())
        await settle()
        assert not owner.done()

    leave = asyncio.Event()
    asyncio.run(main())
    assert set(told) == {"timed out"}


def test_a_fatal_crash_ends_the_process_with_an_error_by_default() -> None:
    program = """
import asyncio
from everbeat.runtime.task_scope import TaskScope

async def crash():
    raise ValueError("no luck")

async def main():
    TaskScope(name="worker").start(crash(), name="heart", critical=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, env=environment()
    )
    assert ended.returncode == EXIT_SOFTWARE
    assert "ValueError: no luck" in ended.stderr
    assert "process_ended because=heart" in ended.stderr


async def test_a_task_scope_cancels_lent_tasks_that_were_not_given_back() -> None:
    ended: list[str] = []
    scope = TaskScope(name="test")

    async def short() -> None:
        scope.give_back(tasks["short"])

    async def long() -> None:
        try:
            await for_ever()
        finally:
            ended.append("long")

    tasks = {
        each.__name__: scope.lend(each(), name=each.__name__, on_cancelled=lambda task: ended.append(task.get_name()))
        for each in (short, long)
    }  # fmt: skip
    assert len(scope) == 2
    await settle()
    assert len(scope) == 1
    await scope.close()
    await settle()
    assert ended == ["long", "long"]
    with pytest.raises(RuntimeError, match="closing"):
        scope.lend(for_ever(), name="late", on_cancelled=lambda _: None)


async def test_the_first_step_of_a_lent_task_can_run_at_once() -> None:
    scope, said, gate = TaskScope(name="test"), list[str](), asyncio.Event()

    async def waits() -> None:
        said.append("began")
        await gate.wait()
        said.append("ended")
        scope.give_back(task)

    task = scope.lend(waits(), name="waits", on_cancelled=lambda _: None, at_once=True)
    assert said == (["began"] if sys.version_info >= (3, 12) else [])
    assert len(scope) == 1
    gate.set()
    await task
    assert (said, len(scope)) == (["began", "ended"], 0)
    done = scope.lend(nothing(), name="done", on_cancelled=lambda _: None, at_once=True)
    assert done.done() == (sys.version_info >= (3, 12))
    scope.give_back(done)
    await scope.close()
    assert len(scope) == 0


async def test_the_owner_is_notified_of_a_task_cancelled_before_its_first_step() -> None:
    scope, heard = TaskScope(name="test"), asyncio.Event()
    task = scope.lend(nothing(), name="never begun", on_cancelled=lambda _: heard.set())
    task.cancel()
    async with asyncio.timeout(5):
        await heard.wait()
    scope.give_back(task)
    assert task.cancelled()
    assert len(scope) == 0


async def test_a_concurrent_query_starts_before_the_act_and_its_result_is_awaited() -> None:
    said: list[str] = []
    scope, gate = TaskScope(name="test"), asyncio.Event()

    async def ask() -> str:
        said.append("asked")
        await gate.wait()
        return "answer"

    def act() -> None:
        said.append("acted")
        gate.set()

    assert await scope.beside(ask(), act, name="ask") == "answer"
    assert said == ["asked", "acted"]
    await settle()
    assert len(scope) == 0


async def test_a_failing_act_still_awaits_the_concurrent_query(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scope = TaskScope(name="test")

    async def ask() -> str:
        await asyncio.sleep(0.01)  # a turn of the loop and more: what it stands for takes time
        return "answer"

    def act() -> None:
        raise ValueError("no luck")

    assert await scope.beside(ask(), act, name="ask") == "answer"
    assert "no luck" in caplog.text
    with pytest.raises(ValueError, match="no luck"):
        await scope.beside(crash(), lambda: None, name="crash")


async def test_a_cancelled_caller_still_runs_the_act() -> None:
    acted, cancelled = asyncio.Event(), asyncio.Event()
    scope = TaskScope(name="test")

    async def ask() -> None:
        try:
            await for_ever()
        finally:
            cancelled.set()

    caller = scope.start(scope.beside(ask(), acted.set, name="ask"), name="caller")
    await asyncio.sleep(0)  # lets it run its first step
    caller.cancel()
    await scope.close()
    assert acted.is_set()
    assert len(scope) == 0


def test_the_end_of_asyncio_run_does_not_cancel_a_concurrent_query_of_a_worker() -> None:
    """asyncio.run cancels every task of the loop, and a task twice if it began another one."""
    told: list[str] = []
    go_on = asyncio.Event()

    async def ask() -> str:
        await go_on.wait()
        return "answer"

    async def work(scope: TaskScope) -> None:
        told.append(await scope.beside(ask(), lambda: told.append("acted"), name="ask"))

    async def program() -> None:
        scope = TaskScope(name="in-process worker", on_loop_ending=go_on.set)
        scope.start(work(scope), name="work")
        await asyncio.sleep(0.01)  # a turn of the loop and more: what it stands for takes time

    asyncio.run(program())
    assert told == ["acted", "answer"]
