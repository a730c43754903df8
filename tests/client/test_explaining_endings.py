"""Test `explain` and `info` for tasks whose code raised RetryLater or Cancel."""

from __future__ import annotations

from everbeat import App, Cancel, Completed, Failed, RetryLater, TaskState
from everbeat.domain.explain.reasons import ReasonCode
from tests.client.working import working
from tests.store.conftest import StoreHarness


async def test_explain_states_when_a_postponed_task_runs_again_and_why(app: App, db: StoreHarness) -> None:
    @app.task
    async def call() -> None:
        raise RetryLater("1h", reason="the service is busy")

    async with working(app):
        handle = await call.asend()
        while not (await handle.ainfo()).attempts:
            pass  # the query of each turn is the wait
    info = await handle.ainfo()
    assert info.state is TaskState.PENDING
    assert (info.retry_count, info.next_retry_at) == (0, info.enqueued_at)
    (attempt,) = info.attempts
    assert attempt.outcome == "SUSPENDED"
    assert attempt.error is not None
    assert (attempt.error.code, attempt.error.message) == ("RETRY_LATER", "the service is busy")
    explanation = await app.aexplain(handle.id)
    (reason,) = [each for each in explanation.reasons if each.code is ReasonCode.POSTPONED]
    assert reason.text.startswith("the code of attempt 1 postponed it until ")
    assert reason.text.endswith(": the service is busy")
    assert reason.until == info.enqueued_at
    (again,) = explanation.second_runs
    assert again.code is ReasonCode.POSTPONED
    assert again.text == "the code of attempt 1 postponed the task, which costs no retry: the service is busy"


async def test_explain_states_why_a_task_cannot_run_later(app: App, db: StoreHarness) -> None:
    @app.task(max_retry_later=0)
    async def call() -> None:
        raise RetryLater("1h", reason="the service is busy")

    async with working(app):
        handle = await call.asend()
        outcome = await handle.aoutcome(timeout=30)
    assert isinstance(outcome, Failed)
    assert outcome.error.code == "RETRY_LATER_EXHAUSTED"
    (reason,) = (await app.aexplain(handle.id)).reasons
    assert "the limit that the error names prevents it" in reason.text


async def test_explain_gives_the_reason_of_code_that_cancelled_its_task(app: App, db: StoreHarness) -> None:
    @app.task
    async def call() -> None:
        raise Cancel("the order was withdrawn")

    async with working(app):
        handle = await call.asend()
        outcome = await handle.aoutcome(timeout=30)
    assert isinstance(outcome, Failed)
    assert (outcome.error.code, outcome.error.message) == ("TASK_CANCELLED", "the order was withdrawn")
    (reason,) = (await app.aexplain(handle.id)).reasons
    assert reason.code is ReasonCode.CANCELLED
    assert reason.text.endswith(": the order was withdrawn")


async def test_a_node_whose_code_raises_cancel_is_a_cancelled_node(app: App, db: StoreHarness) -> None:
    @app.task
    async def charge() -> int:
        raise Cancel("the order was withdrawn")

    @app.task
    async def pack(amount: int) -> int:
        return amount

    @app.task
    async def report(outcome: Completed[int] | Failed) -> str:
        return outcome.error.message if isinstance(outcome, Failed) else "paid"

    wf = app.workflow("order")
    charged = wf.add(charge)
    wf.add(pack, charged.result)
    wf.add(report, charged.outcome)
    async with working(app):
        handle = await wf.astart()
        await handle.aoutcome(timeout=30)
        nodes = {each.name: each for each in await handle.anodes()}
    assert nodes["charge"].state == "CANCELLED"
    assert nodes["pack"].state == "SKIPPED"
    assert nodes["report"].state == "COMPLETED"
    assert await app.handle(nodes["report"].task_id).aresult(timeout=5) == "the order was withdrawn"  # type: ignore[arg-type]
