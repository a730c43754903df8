from __future__ import annotations

import asyncio
import gc
import subprocess
import sys

import pytest

from everbeat.runtime.nursery import EXIT_SOFTWARE, CriticalEnded, Nursery
from everbeat.testing.clock import settle
from tests.runtime.programs.start import environment


async def for_ever() -> None:
    await asyncio.Event().wait()


async def crash() -> None:
    raise ValueError("no luck")


async def nothing() -> None:
    return


async def test_what_was_started_is_held_although_nobody_else_refers_to_it() -> None:
    done = asyncio.Event()
    nursery = Nursery(name="test")

    async def wait_then_say() -> None:
        # A future that only the coroutine knows: without a holder the collector would take both.
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.02, future.set_result, None)
        await future
        done.set()

    nursery.start(wait_then_say(), name="held")
    gc.collect()
    async with asyncio.timeout(5):
        await done.wait()
    await settle()
    assert len(nursery) == 0


async def test_closing_cancels_and_awaits_everything_even_what_swallows_one_cancel() -> None:
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

    nursery = Nursery(name="test", on_fatal=lambda name, error: pytest.fail(f"{name} {error!r}"))
    nursery.start(stubborn(), name="stubborn")
    nursery.start(polite(), name="polite", critical=True)
    await settle()
    async with asyncio.timeout(10):
        await nursery.close()
        await nursery.close()
    assert sorted(ended) == ["polite", "stubborn"]
    with pytest.raises(RuntimeError, match="is closing and starts nothing new; 'late' was not started"):
        nursery.start(for_ever(), name="late")


async def test_a_crash_is_logged_with_its_traceback_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Nursery(name="test") as nursery:
        other = nursery.start(for_ever(), name="other")
        nursery.start(crash(), name="crasher")
        await settle()
        assert not other.done()
    assert "name=crasher" in caplog.text
    assert "ValueError: no luck" in caplog.text


@pytest.mark.parametrize(("coroutine", "kind"), [(crash, ValueError), (nothing, CriticalEnded)])
async def test_a_critical_one_that_crashes_or_returns_is_fatal_once(
    coroutine: object, kind: type[Exception]
) -> None:
    fatal: list[tuple[str, BaseException]] = []
    nursery = Nursery(name="test", on_fatal=lambda name, error: fatal.append((name, error)))
    assert callable(coroutine)
    nursery.start(coroutine(), name="heart", critical=True)
    nursery.start(coroutine(), name="second", critical=True)
    await settle()
    assert [(name, type(error)) for name, error in fatal] == [("heart", kind)]
    await nursery.close()


async def test_a_critical_one_that_fails_while_it_is_closed_is_not_fatal() -> None:
    fatal: list[str] = []

    async def fails_to_close() -> None:
        try:
            await for_ever()
        finally:
            raise OSError("connection lost")

    nursery = Nursery(name="test", on_fatal=lambda name, error: fatal.append(name))
    nursery.start(fails_to_close(), name="heart", critical=True)
    await settle()
    await nursery.close()
    assert fatal == []


def test_what_is_sheltered_outlives_the_end_of_asyncio_run_until_its_owner_closes() -> None:
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
                told.append("timed out")  # a cancellation by itself still works

    async def own() -> None:
        nursery = Nursery(
            name="test",
            on_fatal=lambda name, _: told.append(f"{name} is fatal"),
            on_loop_ending=on_loop_ending,
        )
        nursery.start(times_out_now_and_then(), name="heart", critical=True)
        try:
            await for_ever()
        finally:
            await leave.wait()
            told.clear()
            await asyncio.sleep(0.05)  # only time can show that it goes on
            await nursery.close()

    async def main() -> None:
        ending.append(asyncio.get_running_loop())
        owner = asyncio.ensure_future(own())
        await settle()
        assert not owner.done()

    leave = asyncio.Event()
    asyncio.run(main())
    assert set(told) == {"timed out"}


def test_by_default_a_fatal_crash_ends_the_process_loudly() -> None:
    program = """
import asyncio
from everbeat.runtime.nursery import Nursery

async def crash():
    raise ValueError("no luck")

async def main():
    Nursery(name="worker").start(crash(), name="heart", critical=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, env=environment()
    )
    assert ended.returncode == EXIT_SOFTWARE
    assert "ValueError: no luck" in ended.stderr
    assert "process_ended because=heart" in ended.stderr


async def test_what_is_lent_is_held_until_it_is_given_back_and_cancelled_by_closing() -> None:
    ended: list[str] = []
    nursery = Nursery(name="test")

    async def short() -> None:
        nursery.give_back(tasks["short"])

    async def long() -> None:
        try:
            await for_ever()
        finally:
            ended.append("long")

    tasks = {
        each.__name__: nursery.lend(each(), name=each.__name__, on_cancelled=lambda task: ended.append(task.get_name()))
        for each in (short, long)
    }  # fmt: skip
    assert len(nursery) == 2
    await settle()
    assert len(nursery) == 1
    await nursery.close()
    await settle()
    assert ended == ["long", "long"]
    with pytest.raises(RuntimeError, match="closing"):
        nursery.lend(for_ever(), name="late", on_cancelled=lambda _: None)


async def test_the_owner_hears_of_what_was_cancelled_before_its_first_step() -> None:
    nursery, heard = Nursery(name="test"), asyncio.Event()
    task = nursery.lend(nothing(), name="never begun", on_cancelled=lambda _: heard.set())
    task.cancel()
    async with asyncio.timeout(5):
        await heard.wait()
    nursery.give_back(task)
    assert task.cancelled()
    assert len(nursery) == 0


async def test_what_runs_beside_begins_first_and_its_result_is_awaited() -> None:
    said: list[str] = []
    nursery, gate = Nursery(name="test"), asyncio.Event()

    async def ask() -> str:
        said.append("asked")
        await gate.wait()
        return "answer"

    def act() -> None:
        said.append("acted")
        gate.set()

    assert await nursery.beside(ask(), act, name="ask") == "answer"
    assert said == ["asked", "acted"]
    await settle()
    assert len(nursery) == 0


async def test_an_act_that_fails_leaves_what_is_under_way_alone_for_no_moment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nursery = Nursery(name="test")

    async def ask() -> str:
        await asyncio.sleep(0.01)  # a turn of the loop and more: what it stands for takes time
        return "answer"

    def act() -> None:
        raise ValueError("no luck")

    assert await nursery.beside(ask(), act, name="ask") == "answer"
    assert "no luck" in caplog.text
    with pytest.raises(ValueError, match="no luck"):
        await nursery.beside(crash(), lambda: None, name="crash")


async def test_the_act_is_not_lost_when_its_caller_is_cancelled() -> None:
    acted, cancelled = asyncio.Event(), asyncio.Event()
    nursery = Nursery(name="test")

    async def ask() -> None:
        try:
            await for_ever()
        finally:
            cancelled.set()

    caller = nursery.start(nursery.beside(ask(), acted.set, name="ask"), name="caller")
    await asyncio.sleep(0)  # its first step
    caller.cancel()
    await nursery.close()
    assert acted.is_set()
    assert len(nursery) == 0


def test_the_end_of_asyncio_run_cancels_nothing_beside_a_guest() -> None:
    """It cancels every task of the loop, twice where a task began another one."""
    told: list[str] = []
    go_on = asyncio.Event()

    async def ask() -> str:
        await go_on.wait()
        return "answer"

    async def work(nursery: Nursery) -> None:
        told.append(await nursery.beside(ask(), lambda: told.append("acted"), name="ask"))

    async def program() -> None:
        nursery = Nursery(name="guest", on_loop_ending=go_on.set)
        nursery.start(work(nursery), name="work")
        await asyncio.sleep(0.01)  # a turn of the loop and more: what it stands for takes time

    asyncio.run(program())
    assert told == ["acted", "answer"]
