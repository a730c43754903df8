"""Define an app whose tasks the tests build workflows from; its database does not exist, because building needs none."""

from __future__ import annotations

from dataclasses import dataclass

from everbeat import App, Context, RetryPolicy, TaskResult
from everbeat.config import QueueConfig

app = App(
    "postgresql://nobody@nowhere.invalid/none", queues=[QueueConfig("mail"), QueueConfig("line", serial=True)]
)


@dataclass
class Order:
    id: int


@dataclass
class Payment:
    amount: int
    is_paid: bool = True


@app.task
def charge(order: Order) -> Payment:
    return Payment(order.id)


@app.task(
    queue="mail", priority=3, timeout="30s", retry=RetryPolicy(auto_retry_for=["X"]), flags=["resilient"]
)
async def pack(context: Context, payment: Payment, fragile: bool = False) -> str:
    return str(payment.amount)


@app.task
def ship(label: str, weight: int = 1) -> None: ...


@app.task
def report(paid: TaskResult[Payment], others: list[TaskResult[Payment]] | None = None) -> str:
    return str(paid)


@app.task
def total(payments: list[Payment]) -> int:
    return sum(each.amount for each in payments)


@app.task
def list_orders() -> list[Order]:
    return []


@app.task
def is_open() -> bool:
    return True


@app.task
def flags() -> tuple[bool, bool]:
    return True, False


@app.task
def anything(value=None):
    return value


@app.task(name="mail.welcome!")
def welcome(user_id: int, locale: str = "en") -> None: ...
