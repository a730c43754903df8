"""Calls that must type-check, with their types; both checkers read this file, and it never runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type
from uuid import UUID, uuid4

from everbeat import (
    AsyncTask,
    Batch,
    Call,
    Completed,
    Completion,
    Context,
    Failed,
    Handle,
    NamedStep,
    Node,
    RetryPolicy,
    Schedule,
    SyncTask,
    Task,
    TaskError,
    TaskState,
    WorkflowHandle,
)
from everbeat.domain.workflow.graph import Graph
from everbeat.inspection import BatchInfo, Pause, QuietTree, ScheduleInfo, SweepResult, TickInfo
from everbeat.middleware import Resource
from everbeat.recovery import Default, FailWithBackoff, RecoveryContext, Reschedule, Skip, SweepSummary
from everbeat.workflows import Nodes, WorkflowCall, WorkflowDefinition, first, results
from everbeat.workflows import outcomes as outcomes_of
from tests.typing.declared import (
    Order,
    Payment,
    Receipt,
    alternatives,
    any_first,
    any_first_async,
    app,
    charge,
    context_async,
    context_only,
    decorated,
    decorated_async,
    dict_first,
    floating,
    is_fragile,
    list_orders,
    managed,
    managed_async,
    many,
    named_like_options,
    nothing,
    object_first,
    optional_context,
    pack,
    parcel,
    perhaps,
    plain,
    positional_only,
    price_list,
    read_all,
    render,
    report,
    scheduled,
    scheduled_async,
    ship,
    silent,
    sockets,
    sum_all,
    surround,
    surround_async,
    surround_managed,
    two,
    variadic,
    variadic_any,
    welcome,
    wide,
)


def sending() -> None:
    handle = welcome.send(42)
    assert_type(handle, Handle[Receipt])
    assert_type([item.value for item in handle.stream("tokens", type=str)], list[str])
    assert_type(handle.result(timeout=30), Receipt)
    assert_type(handle.outcome(timeout="5s"), Completed[Receipt] | Failed)
    assert_type(welcome.send(42, locale="de"), Handle[Receipt])
    assert_type(welcome.send(user_id=1), Handle[Receipt])
    assert_type(render.send(uuid4()), Handle[str])
    assert_type(render.send(film=uuid4()), Handle[str])
    assert_type(context_async.send(1, fast=True), Handle[list[str]])
    assert_type(plain.send(1), Handle[int])
    assert_type(context_only.send(), Handle[None])
    assert_type(optional_context.send(1), Handle[int])
    assert_type(nothing.send(), Handle[int])
    assert_type(positional_only.send(1, y=2), Handle[int])
    assert_type(variadic.send(1, 2, a="x"), Handle[int])
    assert_type(decorated.send(1), Handle[int])
    assert_type(decorated_async.send(n=1), Handle[int])
    assert_type(report.send(Completed(Payment(1))), Handle[str])
    assert_type(report.send(Failed(TaskError("DECLINED"))), Handle[str])


def first_parameters_that_take_anything() -> None:
    # Without a check of the result: where Any matches two overloads, mypy infers Any and pyright the first.
    any_first.send({"a": 1}, 2)
    any_first.send({"a": 1}, n=2)
    any_first_async.send({"a": 1}, 2)
    assert_type(object_first.send(1, 2), Handle[int])
    assert_type(dict_first.send({"a": [1]}), Handle[int])
    assert_type(variadic_any.send(), Handle[int])


def kinds() -> None:
    assert_type(welcome(1), Coroutine[Any, Any, Receipt]).close()
    assert_type(decorated_async(1), Coroutine[Any, Any, int]).close()
    assert_type(plain(1), int)
    assert_type(render(uuid4()), str)
    some: list[Task[..., Any]] = [welcome, plain]
    assert_type(some[0].name, str)


def options() -> None:
    later = welcome.with_options(good_until=datetime.now(UTC), priority=10, key="u42")
    assert_type(later.send(42), Handle[Receipt])
    assert_type(plain.with_options(timeout="5s", retry=RetryPolicy(), queue="slow").send(1), Handle[int])
    assert_type(plain.with_options(timeout=None, retry=None).send(1), Handle[int])
    assert_type(welcome.schedule(timedelta(minutes=5), 42), Handle[Receipt])
    assert_type(welcome.schedule(datetime.now(UTC), user_id=42), Handle[Receipt])
    named_like_options.send(self=1, task="x", when=1, queue="q", name="n", priority=2, function=3)
    named_like_options.schedule(
        timedelta(1), self=1, task="x", when=1, queue="q", name="n", priority=2, function=3
    )


def in_batches() -> None:
    assert_type(welcome.call(1), Call[Receipt])
    assert_type(app.send_many([welcome.call(1), welcome.call(2, "x")]), list[Handle[Receipt]])
    assert_type(welcome.send_many(welcome.call(n) for n in range(3)), list[Handle[Receipt]])
    assert_type(welcome.send_many([welcome.with_options(priority=3).call(1)]), list[Handle[Receipt]])


def gathers(ctx: Context) -> None:
    assert_type(ctx.gather(welcome.call(1)), tuple[Receipt])
    assert_type(ctx.gather(welcome.call(1), plain.call(1)), tuple[Receipt, int])
    assert_type(ctx.gather(plain.call(1), welcome.call(1), plain.call(2)), tuple[int, Receipt, int])
    assert_type(ctx.gather(*(plain.call(n) for n in range(9))), tuple[int, ...])
    assert_type(
        ctx.gather_outcomes(*[welcome.call(n) for n in range(9)]), tuple[Completed[Receipt] | Failed, ...]
    )
    assert_type(ctx.batch.send(welcome.call(1)), Handle[Receipt])


async def gathers_async(ctx: Context) -> None:
    assert_type(await ctx.agather(welcome.call(1), plain.call(1)), tuple[Receipt, int])
    assert_type(await ctx.agather(*[plain.call(n) for n in range(9)]), tuple[int, ...])
    found = await ctx.agather_outcomes(*[plain.call(n) for n in range(9)])
    assert_type(found, tuple[Completed[int] | Failed, ...])
    assert_type(await ctx.batch.asend(welcome.call(1)), Handle[Receipt])


def batches() -> None:
    with app.batch("import", on_end=welcome.call(1), on_success=plain.call(2)) as batch:
        assert_type(batch, Batch)
        assert_type(batch.send(welcome.call(1)), Handle[Receipt])
        assert_type(batch.send_many(plain.call(n) for n in range(9)), list[Handle[int]])
    assert_type(batch.status(), BatchInfo)
    assert_type(app.open_batch(batch.id).wait_end(timeout="1m"), BatchInfo)


async def batches_async() -> None:
    async with app.batch("import") as batch:
        assert_type(await batch.asend(welcome.call(1)), Handle[Receipt])
    assert_type(await batch.await_end(), BatchInfo)


def outcomes(handle: Handle[Receipt]) -> int:
    match handle.outcome():
        case Completed(value):
            return assert_type(value, Receipt).id
        case Failed(error):
            assert_type(error, TaskError)
            return len(error.code)


def widened(completed: Completed[bool], handle: Handle[bool]) -> tuple[Completed[int], Handle[int]]:
    return completed, handle


async def awaiting() -> None:
    handle = await welcome.asend(1)
    assert_type(await handle.aresult(), Receipt)
    assert_type(await handle.aoutcome(), Completed[Receipt] | Failed)
    assert_type(await welcome(1), Receipt)
    assert_type(await plain.asend(1), Handle[int])
    assert_type(await plain.aschedule(timedelta(seconds=1), 1), Handle[int])
    assert_type(await plain.asend_many([plain.call(1)]), list[Handle[int]])


def inside_a_task() -> None:
    context = Context.current()
    assert_type(context.task_id, UUID)
    assert_type(context.fence, int)
    assert_type(context.attempt, int)
    assert_type(context.deadline, datetime | None)
    assert_type(context.cancelled, bool)
    context.progress("resize", 0.5, message="frame 1")
    context.check_cancelled()


def partial_work(context: Context) -> None:
    context.checkpoint({"page": 3, "word": "frame"})
    for frame in context.resume("frame", range(1000)):
        assert_type(frame, int)
    for word in context.resume("word", ["a"]):
        assert_type(word, str)
    with context.commit(object()) as completion:
        assert_type(completion, Completion)
        completion.result = Receipt(1)
    print(context.last_checkpoint["page"])


async def partial_work_on_a_loop(context: Context, pages: AsyncIterator[bytes]) -> None:
    await context.acheckpoint([1, 2])
    async for item in context.aresume("item", ["a"]):
        assert_type(item, str)
    async for page in context.aresume("page", pages):
        assert_type(page, bytes)
    async with context.commit(object()) as completion:
        completion.result = None


def bill(amount: int, currency: str = "EUR") -> Payment:
    return Payment(amount + len(currency))


async def abill(amount: int, name: str) -> bytes:
    return name.encode() * amount


def durable(context: Context, film: UUID) -> None:
    assert_type(context.step(bill, 1), Payment)
    assert_type(context.step(bill, 1, currency="USD"), Payment)
    assert_type(context.named("deposit").step(bill, 1, currency="USD"), Payment)
    assert_type(context.named("deposit"), NamedStep)
    assert_type(context.with_options(retry=RetryPolicy(), timeout="5s").step(bill, 1), Payment)
    context.sleep("3d")
    context.sleep(timedelta(days=3))
    assert_type(context.wait_event("decided", timeout="7d", type=bool), bool)
    assert_type(context.wait_event("decided", type=dict[str, int]), dict[str, int])
    print(context.wait_event("decided")["any"])
    assert_type(context.ask("Refund?", type=bool, timeout="2d"), bool)
    assert_type(context.emit("tokens", "a"), int)
    assert_type(context.send(plain.call(1)), Handle[int])
    assert_type(context.send(render.call(film)), Handle[str])
    app.signal(film, "decided")
    app.signal(str(film), "decided", {"by": "ann"})
    app.signal(plain.send(1), "decided", True)
    app.signal(app.workflow_handle(film), "decided", True)


async def durable_on_a_loop(context: Context) -> None:
    assert_type(await context.astep(abill, 1, name="x"), bytes)
    assert_type(await context.astep(bill, 1), Payment)
    assert_type(await context.named("n").astep(abill, 1, "x"), bytes)
    assert_type(await context.named("n").astep(bill, 1), Payment)
    assert_type(await context.with_options(name="n", timeout=5).astep(abill, 1, "x"), bytes)
    await context.asleep(3)
    assert_type(await context.await_event("decided", type=Payment), Payment)
    assert_type(await context.aask("Who?", type=str, choices=["ann", "bob"]), str)
    assert_type(await context.aemit("tokens", "a"), int)
    assert_type(await context.asend(welcome.call(1)), Handle[Receipt])
    assert_type(await app.asignal(UUID(int=1), "decided"), None)


def keeps_its_kind(one: SyncTask[[int], int], other: AsyncTask[[int], int]) -> None:
    assert_type(one.with_options(priority=1), SyncTask[[int], int])
    assert_type(other.with_options(priority=1), AsyncTask[[int], int])


@app.on_recovery
def decide(context: RecoveryContext) -> Reschedule | Skip:
    return Skip() if context.flags.get("by_hand") else Reschedule(timedelta(minutes=1), attempts=0)


@app.on_recovery(task="render")
async def decide_render(context: RecoveryContext) -> FailWithBackoff | Default:
    return Default() if context.state is TaskState.CLAIMED else FailWithBackoff()


@app.on_interrupted
async def interrupted(context: RecoveryContext) -> None:
    print(context.previous_worker_id)


@app.on_recovered
def recovered(summary: SweepSummary) -> None:
    print(summary.recovered_count)


def operating() -> None:
    assert_type(decide(context_of()), Reschedule | Skip)
    assert_type(app.sweep_stale_workers(dry_run=True), SweepResult)
    assert_type(app.release_workers(["web-1"]), SweepResult)
    assert_type(app.quiet_workers(["web-1"]), list[QuietTree])
    assert_type(app.resume_workers(host="web-1"), list[QuietTree])
    assert_type(app.pause_task("render", reason="a bad deploy"), Pause)
    assert_type(app.resume_queue("mail"), Pause)
    assert_type(app.list_pauses(), list[Pause])


async def operating_on_a_loop() -> None:
    assert_type(await decide_render(context_of()), FailWithBackoff | Default)
    assert_type(await app.arelease_workers(["web-1"]), SweepResult)
    assert_type(await app.aquiet_workers(everyone=True), list[QuietTree])
    assert_type(await app.apause_queue("mail"), Pause)


def context_of() -> RecoveryContext:
    raise NotImplementedError


def workflows() -> None:
    wf = app.workflow("order", on_error="fail")
    paid = wf.add(charge, Order(1))
    assert_type(paid, Node[Payment])
    assert_type(paid.result, Payment)
    assert_type(paid.outcome, Completed[Payment] | Failed)
    packed = wf.add(pack, paid.result, fragile=True)
    assert_type(packed, Node[str])
    assert_type(wf.add(ship, packed.result, after="x"), Node[None])
    mapped = wf.map(charge, [Order(1)])
    assert_type(wf.add(ship, packed.result, after="x").after(paid, mapped, join="any"), Node[None])
    assert_type(wf.add(ship, packed.result, after="x").after(paid, *mapped, join=2), Node[None])
    assert_type(wf.add(report, paid.outcome), Node[str])
    assert_type(wf.add(plain, paid.result.amount), Node[int])
    later = charge.with_options(queue="pay", good_until=datetime.now(UTC))
    assert_type(wf.add(later, Order(1)), Node[Payment])
    nodes = [wf.add(charge, Order(i)) for i in range(3)]
    assert_type(results(nodes), list[Payment])
    assert_type(outcomes_of(nodes), list[Completed[Payment] | Failed])
    assert_type(wf.add(sum_all, results(nodes)), Node[int])
    assert_type(wf.add(sum_all, [each.result for each in nodes]), Node[int])
    assert_type(wf.add(read_all, outcomes_of(nodes)), Node[int])
    assert_type(first(nodes), Payment)
    assert_type(wf.add(pack, first([paid, nodes[0]])).when_failed(packed, *nodes).delayed("1h"), Node[str])
    fragile = wf.add(is_fragile, Order(1))
    packed.named("pack").allow_failed().when(fragile.result).unless(fragile.result)
    wf.succeeds_when(packed, mapped)
    assert_type(wf.graph(packed), Graph)
    assert_type(wf.graph(), Graph)


def maps() -> None:
    wf = app.workflow("order")
    mapped = wf.map(charge, [Order(1)])
    assert_type(mapped, Nodes[Payment])
    assert_type(mapped[0], Node[Payment])
    assert_type(mapped.results, list[Payment])
    assert_type(mapped.outcomes, list[Completed[Payment] | Failed])
    assert_type(results(mapped), list[Payment])
    assert_type(mapped.named("all").after(wf.add(nothing)), Nodes[Payment])
    assert_type(wf.map(charge, wf.add(list_orders).result), Nodes[Payment])
    assert_type(wf.map(welcome, [1, 2]), Nodes[Receipt])
    assert_type(wf.map(welcome, (1, 2), locale="de"), Nodes[Receipt])
    assert_type(wf.map(pack, [Payment(1)], fragile=True), Nodes[str])
    assert_type(wf.map(two, [1, 2], "shared"), Nodes[str])
    assert_type(wf.map(two, [1, 2], b=wf.add(pack, Payment(1)).result), Nodes[str])
    assert_type(wf.map(wide, [[1], [2]]), Nodes[str])
    assert_type(wf.map(floating, [1, 2]), Nodes[str])
    assert_type(wf.map(floating, range(3)), Nodes[str])
    assert_type(wf.map(alternatives, [1, 2]), Nodes[str])
    assert_type(wf.add(sum_all, mapped.results), Node[int])
    assert_type(wf.map(parcel, [Order(1)]), Nodes[str])
    assert_type(wf.map(parcel, wf.add(list_orders).result, "y"), Nodes[str])
    assert_type(wf.map(parcel, (Order(1),), label="y")[0].result, str)
    assert_type(wf.map(perhaps, [Order(1)]), Nodes[Payment])
    assert_type(wf.map(many, [[Order(1)]]).results, list[list[Payment]])


def starts(ctx: Context) -> None:
    wf = app.workflow("order")
    paid, mapped = wf.add(charge, Order(1)), wf.map(charge, [Order(1)])
    assert_type(ctx.start(wf), WorkflowHandle[None])
    assert_type(ctx.start(wf.call()), WorkflowHandle[None])
    assert_type(ctx.start(wf.call(output=paid, key="k")), WorkflowHandle[Payment])
    assert_type(ctx.start(wf.call(output=mapped)), WorkflowHandle[list[Payment]])
    assert_type(parcel.call(Order(1), label="y"), WorkflowCall[str])
    assert_type(ctx.start(parcel.call(Order(1))).result(), str)
    assert_type(ctx.named("own").start(parcel.call(Order(1))), WorkflowHandle[str])


async def starts_to_await(ctx: Context) -> None:
    assert_type(await ctx.astart(parcel.call(Order(1))), WorkflowHandle[str])
    assert_type(await ctx.named("own").astart(silent.call()), WorkflowHandle[None])


def definitions() -> None:
    anything: WorkflowDefinition[..., str] = parcel
    assert_type(anything.name, str)
    assert_type(parcel.build(Order(1), label="y"), Graph)
    assert_type(silent.build(), Graph)
    wf = app.workflow("orders")
    assert_type(wf.add(parcel, Order(1)), Node[str])
    assert_type(wf.add(perhaps, order=Order(1)), Node[Payment])
    assert_type(wf.add(silent), Node[None])
    assert_type(wf.add(many, wf.add(list_orders).result), Node[list[Payment]])
    assert_type(wf.add(many, [Order(1)]).outcome, Completed[list[Payment]] | Failed)


def schedules() -> None:
    assert_type(scheduled_async.send(kind="x"), Handle[Receipt])
    assert_type(scheduled_async(), Coroutine[Any, Any, Receipt]).close()
    assert_type(scheduled("x"), int)
    assert_type(app.schedule("one", plain.call(1), at=datetime.now(UTC)), Schedule)
    assert_type(app.put_schedule(Schedule("digest", welcome.call(1), every=timedelta(hours=1))), ScheduleInfo)
    assert_type(app.next_ticks("digest", 5), list[datetime])
    assert_type(app.list_schedules(state="PAUSED"), list[ScheduleInfo])
    assert_type(app.list_ticks("digest"), list[TickInfo])
    assert_type(app.run_schedule("digest"), Handle[Any])
    assert_type(
        app.backfill("digest", since=datetime.now(UTC), until=datetime.now(UTC), overlap="allow"),
        list[datetime],
    )


async def schedules_to_await() -> None:
    assert_type(await app.aput_schedule(Schedule("digest", welcome.call(1), every="1h")), ScheduleInfo)
    assert_type(await app.arun_schedule("digest"), Handle[Any])


def resources() -> None:
    assert_type(price_list, Resource[dict[str, int]])
    assert_type(price_list.value["pear"], int)
    assert_type(sockets.value, list[int])
    assert_type(managed.value, str)
    assert_type(managed_async.value, bytes)
    wider: Resource[object] = price_list
    with app.resources():
        print(wider.value)


async def resources_to_await() -> None:
    async with app.aresources():
        assert_type(sockets.value[0], int)


def middleware(ctx: Context) -> None:
    assert_type(surround(ctx), Iterator[None])
    assert_type(surround_async(ctx), AsyncIterator[None])
    with surround_managed(ctx):
        pass
