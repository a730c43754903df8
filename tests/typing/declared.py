"""Tasks of every kind, as users write them, for `accepted` and `refused`; type checkers read all three."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from everbeat import WORKER_CRASHED, App, Context, Node, RetryPolicy, TaskResult, Workflow
from everbeat.middleware import SendCall
from everbeat.workflows import Nodes

P = ParamSpec("P")
R = TypeVar("R")


app = App()


@app.resource
def price_list() -> Iterator[dict[str, int]]:
    yield {"pear": 1}


@app.resource
async def sockets() -> AsyncIterator[list[int]]:
    yield [1]


@app.resource
@contextmanager
def managed() -> Generator[str, None, None]:
    yield "managed"


@app.resource
@asynccontextmanager
async def managed_async() -> AsyncGenerator[bytes, None]:
    yield b"managed"


@app.around_run
def surround(ctx: Context) -> Iterator[None]:
    yield


@app.around_run
async def surround_async(ctx: Context) -> AsyncIterator[None]:
    yield


@app.around_run
@contextmanager
def surround_managed(ctx: Context) -> Generator[None, None, None]:
    yield


@app.around_send
def route(call: SendCall) -> SendCall | None:
    return call.with_options(queue="eu", priority=call.priority - 1) if call.arguments else None


@app.around_send
def observe(call: SendCall) -> None: ...


@dataclass
class Receipt:
    id: int


@dataclass
class Payment:
    amount: int


@app.task(
    queue="mail",
    timeout="30s",
    retry=RetryPolicy(
        max_retries=3,
        backoff_strategy="exponential",
        intervals=[1],
        auto_retry_for=[WORKER_CRASHED, "SMTP_DOWN", TimeoutError],
    ),
)
async def welcome(user_id: int, locale: str = "en") -> Receipt:
    return Receipt(user_id)


@app.task(run_in="process", on_crash="retry", max_crashes=3, stall_timeout="5m", flags=["resilient"])
def render(context: Context, film: UUID) -> str:
    context.progress("frame", 0.5)
    return str(film)


@app.task
async def context_async(context: Context, n: int, *, fast: bool = False) -> list[str]:
    return [str(n)] if fast else []


@app.task
def plain(n: int) -> int:
    return n


@app.task()
def context_only(context: Context) -> None: ...


@app.task
def optional_context(context: Context | None, n: int) -> int:
    return n


@app.task
def any_first(payload: Any, n: int) -> int:
    return n


@app.task
def object_first(payload: object, n: int) -> int:
    return n


@app.task(queue="x")
async def any_first_async(payload: Any, n: int) -> int:
    return n


@app.task
def dict_first(payload: dict[str, Any]) -> int:
    return len(payload)


@app.task
def named_like_options(
    self: int, task: str, when: int, queue: str, name: str, priority: int, function: int
) -> int:
    return self


@app.task
def variadic(*xs: int, **kw: str) -> int:
    return len(xs)


@app.task
def variadic_any(*xs: Any) -> int:
    return len(xs)


@app.task
def nothing() -> int:
    return 1


@app.task
def positional_only(x: int, /, y: int = 1) -> int:
    return x + y


@app.task
def report(paid: TaskResult[Payment]) -> str:
    return str(paid)


def logged(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return inner


@app.task
@logged
def decorated(n: int) -> int:
    return n


@app.task
@logged
async def decorated_async(n: int) -> int:
    return n


@dataclass
class Order:
    id: int


@app.task
def charge(order: Order) -> Payment:
    return Payment(order.id)


@app.task
async def pack(context: Context, payment: Payment, fragile: bool = False) -> str:
    return str(payment.amount)


@app.task
def ship(label: str, after: str) -> None: ...


@app.task
def sum_all(payments: list[Payment]) -> int:
    return sum(each.amount for each in payments)


@app.task
def read_all(reports: list[TaskResult[Payment]]) -> int:
    return len(reports)


@app.task
def list_orders() -> list[Order]:
    return []


@app.task
def two(a: int, b: str) -> str:
    return b * a


@app.task
def wide(a: Sequence[int]) -> str:
    return str(a)


@app.task
def floating(a: float) -> str:
    return str(a)


@app.task
def alternatives(a: int | str | None) -> str:
    return str(a)


@app.task
def is_fragile(order: Order) -> bool:
    return order.id > 1


@app.define_workflow("parcel", on_error="pause")
def parcel(wf: Workflow, order: Order, label: str = "x") -> Node[str]:
    return wf.add(pack, wf.add(charge, order).result)


@app.define_workflow("perhaps")
def perhaps(wf: Workflow, order: Order) -> Node[Payment] | None:
    return wf.add(charge, order) if order.id else None


@app.define_workflow("silent")
def silent(wf: Workflow) -> None:
    wf.add(nothing)


@app.define_workflow("many")
def many(wf: Workflow, orders: list[Order]) -> Nodes[Payment]:
    return wf.map(charge, orders)


@app.schedule("nightly", cron="30 2 * * *", timezone="Europe/Berlin", missed="latest", overlap="skip")
@app.schedule("hourly", every="1h", jitter="5m")
@app.task
async def scheduled_async(context: Context, kind: str = "sales") -> Receipt:
    return Receipt(len(kind))


@app.schedule("weekly", cron=["@weekly", "0 5 * * 3"])
@app.task(queue="slow")
def scheduled(kind: str = "sales") -> int:
    return len(kind)
