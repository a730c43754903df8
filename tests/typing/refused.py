"""Deliberate mistakes: both checkers must refuse each marked line, and no other; never run."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from everbeat import Completed, Context, Failed, RecoveryContext, Reschedule, RetryPolicy, Skip, Task
from tests.typing.declared import (
    app,
    context_async,
    context_only,
    nothing,
    plain,
    positional_only,
    render,
    report,
    welcome,
)


def arguments(context: Context) -> None:
    welcome.send("x")  # mistake 1: wrong type
    welcome.send()  # mistake 2: missing
    welcome.send(1, 2)  # mistake 3: wrong type of the second
    welcome.send(1, lang="x")  # mistake 4: unknown name
    welcome.send(1, "en", 3)  # mistake 5: too many
    render.send("no uuid")  # mistake 6: wrong type after a Context
    render.send(context, uuid4())  # mistake 7: a Context is not sent
    context_async.send(1, True)  # mistake 8: keyword-only
    context_only.send(1)  # mistake 9: nothing to send
    nothing.send(1)  # mistake 10: nothing to send
    positional_only.send(x=1)  # mistake 11: positional-only
    welcome.call(user_id="x")  # mistake 12: wrong type in a call
    report.send("paid")  # mistake 13: a value where an outcome is wanted


def options() -> None:
    welcome.with_options(prioriti=1)  # mistake 14: unknown option
    welcome.with_options(priority="high")  # mistake 15: wrong type of an option
    welcome.with_options(retry=3)  # mistake 16: a number is no policy
    welcome.schedule(5, 1)  # mistake 17: a number is no moment
    welcome.schedule(timedelta(1), "x")  # mistake 18: wrong type after the moment
    RetryPolicy(backoff_strategy="linear")  # mistake 19: unknown strategy
    app.task(run_in="fork")  # mistake 20: unknown place
    app.task(queu="mail")  # mistake 21: misspelt option


def results() -> None:
    text: str = welcome.send(1).result()  # mistake 22: wrong type of the result
    number: int = plain.send(1).outcome()  # mistake 23: an outcome is no value
    print(text, number)
    welcome.send_many([welcome.call("x")])  # mistake 24: wrong type in a batch
    welcome.send_many([plain.call(1)])  # mistake 25: another task's call in a batch


async def asynchronous() -> None:
    await plain(1)  # mistake 26: a sync task gives no awaitable
    receipt: int = await welcome(1)  # mistake 27: wrong type of an awaited result
    handle = welcome.asend(1)
    handle.result()  # mistake 28: not awaited
    print(receipt)


def frozen(context: Context, completed: Completed[int], failed: Failed) -> None:
    context.fence = 2  # mistake 29: a Context is read-only
    completed.value = 2  # mistake 30: an outcome is read-only
    print(failed.value)  # mistake 31: a failure has no value
    context.progress(0.5)  # mistake 32: the stage comes first


def exact(task: Task[[int], str]) -> None:
    other: Task[[str], str] = task  # mistake 33: other parameters
    print(other)


async def partial_work(context: Context) -> None:
    context.resume(range(3), "frame")  # mistake 34: the name comes first
    for _ in context.resume("frame", 3):  # mistake 35: a number is no items
        pass
    async for _ in context.resume("item", [1]):  # mistake 36: a blocking loop
        pass
    for _ in context.aresume("page", [1]):  # mistake 37: an async loop
        pass
    context.last_checkpoint = 1  # mistake 38: it is read, checkpoint() writes it
    context.acheckpoint()  # mistake 39: nothing to store
    with context.commit():  # mistake 40: no connection
        pass
    with context.commit(object()) as completion:
        completion.value = 1  # mistake 41: misspelt


@app.on_recovery  # mistake 42: a str is no answer
def wrong_answer(context: RecoveryContext) -> str:
    return "skip"


@app.on_recovery(task=3)  # mistake 43: a task is named by its name
def wrong_scope(context: RecoveryContext) -> Skip:
    return Skip()


def operating() -> None:
    Reschedule(3)  # mistake 44: a number is no moment
    app.release_workers([1])  # mistake 45: workers have names
    app.resume_task("render", reason="fixed")  # mistake 46: a resume has no reason


def amount(number: int, currency: str = "EUR") -> int:
    return number + len(currency)


async def name(number: int, text: str) -> str:
    return text * number


async def durable(context: Context) -> None:
    context.step(amount, "x")  # mistake 47: wrong type of an argument
    context.step(amount)  # mistake 48: missing
    context.step(amount, 1, curency="EUR")  # mistake 49: misspelt
    context.named("n").step(amount, "x")  # mistake 50: wrong type under a name
    await context.astep(name, "x", "y")  # mistake 51: wrong type of an async step
    text: str = context.step(amount, 1)  # mistake 52: wrong type of the result
    context.named(1)  # mistake 53: a number is no name
    context.sleep(None)  # mistake 54: no length of time
    flag: bool = context.wait_event("decided", type=int)  # mistake 55: wrong type of the value
    context.send(welcome.send(1))  # mistake 56: a handle is no call
    context.send(welcome)  # mistake 57: a task is no call
    app.signal(1, "decided")  # mistake 58: a number is no id
    app.signal(welcome.send(1))  # mistake 59: an event has a name
    print(text, flag)
