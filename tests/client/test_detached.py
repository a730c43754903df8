"""A task function that is called directly: all of its Context works, and no task is touched."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import psycopg
import pytest

from everbeat import App, BlockingCallInLoop, CommitRefused, Context, OutsideWorker

app = App("postgresql://nowhere.invalid/none")


@app.task
def remember(ctx: Context, words: list[str]) -> list[str]:
    seen = []
    for word in ctx.resume("word", words):
        ctx.checkpoint(word)
        seen.append(ctx.last_checkpoint)
    return seen


@app.task
async def remember_badly(ctx: Context) -> None:
    ctx.checkpoint(1)


@app.task
def look(ctx: Context) -> tuple[int, int, str]:
    ctx.progress("looking", 0.5)
    ctx.check_cancelled()
    assert "backend" not in repr(ctx)
    return ctx.attempt, ctx.fence, ctx.worker_id


@app.task
def store(ctx: Context, url: str, table: str, *, fail: bool = False) -> str:
    with psycopg.connect(url) as connection:
        with ctx.commit(connection) as completion:
            connection.execute(f"insert into {table} values (1)")  # type: ignore[call-overload]
            completion.result = "stored"
            if fail:
                raise LookupError
        return str(completion.result)


def test_a_detached_context_reports_nowhere_and_never_stops() -> None:
    assert look() == (1, 0, "")


def test_checkpoints_live_as_long_as_the_call() -> None:
    assert remember(["a", "b"]) == ["a", "b"]
    assert remember(["a", "b"]) == ["a", "b"]


async def test_a_blocking_checkpoint_on_a_loop_is_found_by_a_test_too() -> None:
    with pytest.raises(BlockingCallInLoop, match=r"await Context\.acheckpoint"):
        await remember_badly()


def test_a_commit_is_the_users_transaction_only(database_url: str) -> None:
    table = f"detached_{uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"create table {table} (n integer)")  # type: ignore[call-overload]
        try:
            assert store(database_url, table) == "stored"
            with pytest.raises(LookupError):
                store(database_url, table, fail=True)
            assert connection.execute(f"select count(*) from {table}").fetchone() == (1,)  # type: ignore[call-overload]
        finally:
            connection.execute(f"drop table {table}")  # type: ignore[call-overload]


def test_a_commit_refuses_what_is_no_connection() -> None:
    with pytest.raises(CommitRefused, match="no connection it knows"):
        store_on(UUID(int=1))


def store_on(thing: object) -> None:
    @app.task(name=f"on_{type(thing).__name__}")
    def work(ctx: Context) -> None:
        with ctx.commit(thing):
            pass

    work()


def double(number: int) -> int:
    return 2 * number


async def halve(number: int) -> float:
    return number / 2


@app.task
def take_steps(ctx: Context) -> list[int]:
    ctx.sleep("10ms")
    return [ctx.step(double, number) for number in (1, 2)] + [ctx.named("again").step(double, 3)]


@app.task
async def take_steps_on_a_loop(ctx: Context) -> list[float]:
    await ctx.asleep("10ms")
    return [await ctx.astep(double, 4), await ctx.named("again").astep(halve, 3)]


@app.task
async def step_badly(ctx: Context) -> None:
    ctx.step(double, 1)


@app.task
def wait(ctx: Context) -> None:
    ctx.wait_event("approved", timeout="1s")


@app.task
def beget(ctx: Context) -> None:
    ctx.send(look.call())


async def test_steps_are_calls_and_a_sleep_is_slept() -> None:
    assert await asyncio.to_thread(take_steps) == [2, 4, 6]
    assert await take_steps_on_a_loop() == [8, 1.5]
    with pytest.raises(BlockingCallInLoop, match=r"await Context.astep\(...\)"):
        await step_badly()


def test_there_are_no_signals_and_no_children() -> None:
    with pytest.raises(OutsideWorker, match=r"Context.wait_event needs a task that a worker runs"):
        wait()
    with pytest.raises(OutsideWorker, match=r"Context.send needs a task"):
        beget()
