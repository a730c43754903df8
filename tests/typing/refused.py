"""Deliberate mistakes: both checkers must refuse each marked line and no other; this file never runs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from uuid import uuid4

from everbeat import Completed, Context, Failed, RetryPolicy, Schedule, Task, Workflow
from everbeat.middleware import SendCall
from everbeat.recovery import RecoveryContext, Reschedule, Skip
from tests.typing.declared import (
    Order,
    app,
    charge,
    context_async,
    context_only,
    nothing,
    pack,
    parcel,
    plain,
    positional_only,
    price_list,
    render,
    report,
    ship,
    silent,
    sockets,
    two,
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
    welcome.with_options(retry=3)  # mistake 16: a number is not a policy
    welcome.schedule(5, 1)  # mistake 17: a number is not a moment
    welcome.schedule(timedelta(1), "x")  # mistake 18: wrong type after the moment
    RetryPolicy(backoff_strategy="linear")  # mistake 19: unknown strategy
    app.task(run_in="fork")  # mistake 20: unknown place
    app.task(queu="mail")  # mistake 21: misspelt option


def results() -> None:
    text: str = welcome.send(1).result()  # mistake 22: wrong type of the result
    number: int = plain.send(1).outcome()  # mistake 23: an outcome is not a value
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
    for _ in context.resume("frame", 3):  # mistake 35: a number is not a list of items
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


@app.on_recovery  # mistake 42: a str is not an answer
def wrong_answer(context: RecoveryContext) -> str:
    return "skip"


@app.on_recovery(task=3)  # mistake 43: a task is named by its name
def wrong_scope(context: RecoveryContext) -> Skip:
    return Skip()


def operating() -> None:
    Reschedule(3)  # mistake 44: a number is not a moment
    app.release_workers([1])  # mistake 45: workers have names
    app.resume_task("render", reason="fixed")  # mistake 46: a resume has no reason


def workflows() -> None:
    wf = app.workflow("order")
    paid = wf.add(charge, Order(1))
    packed = wf.add(pack, paid.result)
    wf.add(pack, paid)  # mistake 47: a node instead of its result
    wf.add(ship, paid.result, "x")  # mistake 48: wrong type of a result
    wf.add(pack, paid.outcome)  # mistake 49: an outcome where a value is wanted
    wf.add(report, paid.result)  # mistake 50: a value where an outcome is wanted
    wf.add(charge)  # mistake 51: missing
    wf.add(charge, Order(1), queue="x")  # mistake 52: an option is not an argument
    wf.map(charge, [1, 2])  # mistake 53: wrong type of the items
    wf.map(charge, paid.result)  # mistake 54: one value is not a list of items
    wf.add(len, [1])  # mistake 55: a function is not a task
    packed.after(charge)  # mistake 56: a task is not a node
    wf.map(two, [1])  # mistake 57: the second argument is missing
    packed.after(paid, join="some")  # mistake 58: unknown join
    packed.when(paid.result)  # mistake 59: not a bool
    packed.when(paid)  # mistake 60: a node is not a bool
    packed.named(1)  # mistake 61: a number is not a name
    print(paid.result.amont)  # mistake 62: misspelt
    app.workflow("order", on_error="skip")  # mistake 63: unknown choice
    wf.graph(paid.result)  # mistake 64: a result is not a node
    wf.succeeds_when(charge)  # mistake 65: a task is not a node


def definitions() -> None:
    wf = app.workflow("order")
    wf.add(parcel, 1)  # mistake 66: wrong type of an argument of a workflow
    wf.add(parcel)  # mistake 67: missing argument of a workflow
    wf.add(silent, 1)  # mistake 68: nothing to give
    wf.map(parcel, [1])  # mistake 69: wrong type of the items of a workflow
    parcel.build("x")  # mistake 70: wrong type
    number: int = wf.add(parcel, Order(1)).result  # mistake 71: wrong type of a workflow's result
    print(number)


@app.define_workflow("wrong")  # mistake 72: a number is not a node
def wrong(wf: Workflow) -> int:
    return 1


@app.define_workflow("lost")  # mistake 73: the workflow comes first
def lost(order_id: int) -> None: ...


def amount(number: int, currency: str = "EUR") -> int:
    return number + len(currency)


async def name(number: int, text: str) -> str:
    return text * number


async def durable(context: Context) -> None:
    context.step(amount, "x")  # mistake 74: wrong type of an argument
    context.step(amount)  # mistake 75: missing
    context.step(amount, 1, curency="EUR")  # mistake 76: misspelt
    context.named("n").step(amount, "x")  # mistake 77: wrong type under a name
    await context.astep(name, "x", "y")  # mistake 78: wrong type of an async step
    text: str = context.step(amount, 1)  # mistake 79: wrong type of the result
    context.named(1)  # mistake 80: a number is not a name
    context.sleep(None)  # mistake 81: not a duration
    flag: bool = context.wait_event("decided", type=int)  # mistake 82: wrong type of the value
    context.send(welcome.send(1))  # mistake 83: a handle is not a call
    context.send(welcome)  # mistake 84: a task is not a call
    context.gather(welcome)  # mistake 93: a task is not a call
    few: tuple[str, ...] = context.gather(plain.call(1))  # mistake 94: wrong type of the results
    context.batch.send(welcome)  # mistake 95: a task is not a call
    app.batch("import", on_end=welcome)  # mistake 96: a task is not a call
    app.signal(1, "decided")  # mistake 85: a number is not an id
    app.signal(welcome.send(1))  # mistake 86: an event has a name
    print(text, flag, few)


def schedules() -> None:
    app.schedule("a", plain.call(1), evry="1h")  # mistake 87: misspelt option
    app.schedule("a", plain.call(1), every="1h", overlap="stop")  # mistake 88: unknown choice
    app.schedule("a", plain, every="1h")  # mistake 89: a task is not a call
    app.put_schedule("a")  # mistake 90: a name is not a schedule
    Schedule("a", plain.call("x"), every="1h")  # mistake 91: wrong type of an argument


@app.schedule("late", every="1h")  # mistake 92: a function is not a task
def late() -> None: ...


def resources() -> None:
    text: str = price_list.value  # mistake 93: wrong type of the value
    sockets.value = [2]  # mistake 94: the value is read only
    print(text, price_list.vlaue)  # mistake 95: misspelt


@app.resource  # mistake 96: a resource is yielded, not returned
def returned() -> int:
    return 1


@app.around_run  # mistake 97: it gets the Context
def without_context() -> Iterator[None]:
    yield


@app.around_run  # mistake 98: it has to yield
def without_yield(ctx: Context) -> None: ...


@app.around_send  # mistake 99: it is not awaited
async def waiting(call: SendCall) -> None: ...


def sends(call: SendCall) -> None:
    call.with_options(prioriti=1)  # mistake 100: misspelt option
    call.queue = "eu"  # mistake 101: a copy is changed, not the call
