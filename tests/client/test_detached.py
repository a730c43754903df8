"""Test direct calls of task functions: their Context works and no stored task changes."""

from __future__ import annotations

import asyncio
import time
from uuid import UUID, uuid4

import psycopg
import pytest

from everbeat import App, Context, RetryPolicy
from everbeat.errors import BlockingCallInLoop, CommitRefused, OutsideWorker

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


def test_a_detached_context_has_default_values_and_never_asks_to_stop() -> None:
    assert look() == (1, 0, "")


def test_checkpoints_of_a_direct_call_last_as_long_as_the_call() -> None:
    assert remember(["a", "b"]) == ["a", "b"]
    assert remember(["a", "b"]) == ["a", "b"]


async def test_a_direct_call_refuses_a_blocking_checkpoint_on_an_event_loop() -> None:
    with pytest.raises(BlockingCallInLoop, match=r"await Context\.acheckpoint"):
        await remember_badly()


def test_commit_with_of_a_direct_call_is_only_the_users_transaction(database_url: str) -> None:
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


def test_commit_with_of_a_direct_call_refuses_an_object_that_is_not_a_connection() -> None:
    with pytest.raises(CommitRefused, match="which it does not support"):
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
def send_child(ctx: Context) -> None:
    ctx.send(look.call())


async def test_a_direct_call_runs_steps_as_function_calls_and_really_sleeps() -> None:
    assert await asyncio.to_thread(take_steps) == [2, 4, 6]
    assert await take_steps_on_a_loop() == [8, 1.5]
    with pytest.raises(BlockingCallInLoop, match=r"await Context.astep\(...\)"):
        await step_badly()


def test_a_direct_call_cannot_wait_for_events_or_send_children() -> None:
    with pytest.raises(OutsideWorker, match=r"Context.wait_event needs a task that a worker runs"):
        wait()
    with pytest.raises(OutsideWorker, match=r"Context.send needs a task"):
        send_child()


@app.task
async def step_with_retries(ctx: Context) -> list[str]:
    tries: list[str] = []

    async def reach() -> str:
        tries.append("try")
        if len(tries) == 1:
            await asyncio.Event().wait()
        return "reached"

    again = RetryPolicy(max_retries=1, intervals=["1s"], jitter=0, auto_retry_for=[TimeoutError])
    return [await ctx.with_options(retry=again, timeout="100ms").astep(reach), *tries]


async def test_a_step_of_a_direct_call_keeps_its_timeout_and_its_retries() -> None:
    since = time.monotonic()
    assert await step_with_retries() == ["reached", "try", "try"]
    assert time.monotonic() - since > 1
