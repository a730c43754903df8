"""Test starting and inspecting workflows through the app, with a worker in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from uuid import uuid4

import psycopg
import pytest

from everbeat import App, Failed, Node, TaskError, Workflow
from everbeat.domain.workflow.states import WorkflowState
from everbeat.errors import (
    BlockingCallInLoop,
    ConfigurationError,
    NodeNotEnded,
    RegistrationError,
    TaskFailed,
    TaskNotRetryable,
    UnknownName,
    WaitTimeout,
    WorkflowNotFound,
    WorkflowNotRetryable,
)
from everbeat.workflows import Nodes
from tests.client.blocking import wait_until_blocked_by

pytestmark = pytest.mark.usefixtures("migrated")


@dataclass
class Payment:
    amount: int


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    made = App(database_url, schema=schema)

    @made.task
    async def charge(order: int) -> Payment:
        if order < 0:
            raise TaskError("DECLINED", f"order {order}")
        return Payment(order)

    @made.task
    async def pack(payment: Payment) -> str:
        return f"packed for {payment.amount}"

    @made.define_workflow("order")
    def order(wf: Workflow, number: int) -> Node[str]:
        return wf.add(pack, wf.add(charge, number).named("paid").result).named("packed")

    yield made
    made.close()


@pytest.fixture
def working(app: App) -> Iterator[None]:
    thread = threading.Thread(target=app.run_worker)
    thread.start()
    yield
    app.stop_worker()
    thread.join(30)


@pytest.mark.usefixtures("working")
def test_a_started_workflow_returns_its_result(app: App) -> None:
    handle = app.workflows["order"].start(17)
    assert handle.result(timeout=30) == "packed for 17"
    assert handle.status() is WorkflowState.COMPLETED
    info = handle.info()
    assert (info.name, info.output, info.result, info.counts) == (
        "order",
        "packed",
        "packed for 17",
        {"COMPLETED": 2},
    )
    paid, packed = handle.nodes()
    assert (paid.name, paid.task, paid.needs, packed.needs) == ("paid", "charge", (), ("paid",))
    assert packed.duration_s is not None
    assert handle.result_of("paid") == {"amount": 17}
    again = app.workflow_handle(str(handle.id))
    assert again.result(timeout=1) == "packed for 17"


@pytest.mark.usefixtures("working")
def test_result_of_decodes_the_types_of_nodes(app: App) -> None:
    wf = app.workflow("typed")

    @app.task
    async def double(order: int) -> Payment:
        return Payment(2 * order)

    each: Nodes[Payment] = wf.map(double, [1, 2])
    handle = wf.start(output=each)
    assert handle.result(timeout=30) == [Payment(2), Payment(4)]
    assert handle.result_of(each) == [Payment(2), Payment(4)]
    assert handle.result_of(each[1]) == Payment(4)


@pytest.mark.usefixtures("working")
def test_a_workflow_whose_output_was_skipped_says_why(app: App) -> None:
    @app.task
    async def no() -> bool:
        return False

    workflow = app.workflow("without")
    asked = workflow.add(no).named("asked")
    answer = workflow.add(no).when(asked.result).named("answer")
    handle = workflow.start(output=answer)
    outcome = handle.outcome(timeout=30)
    assert isinstance(outcome, Failed)
    assert outcome.error.code == "UPSTREAM_SKIPPED"
    assert handle.status() is WorkflowState.COMPLETED
    with pytest.raises(TaskFailed, match="node answer ended SKIPPED"):
        handle.result(timeout=30)


def test_a_workflow_start_with_connection_none_is_refused(app: App) -> None:
    workflow = app.workflow("w")
    workflow.add(app.workflows["order"], 1)
    for start in (
        lambda: workflow.start(connection=None),
        lambda: app.workflows["order"].with_options(connection=None),
    ):
        with pytest.raises(ConfigurationError, match="outside your transaction"):
            start()


def test_define_workflow_checks_the_decorator_call_and_the_annotated_output(app: App) -> None:
    with pytest.raises(RegistrationError, match="without parentheses"):
        app.define_workflow(lambda wf: None)  # type: ignore[arg-type]

    @app.define_workflow("promises")
    def promises(wf: Workflow) -> Node[str]:
        wf.add(app.workflows["order"], 1)  # type: ignore[return]

    with pytest.raises(ConfigurationError, match="is not of the annotated type"):
        promises.start()
    around = app.workflow("around")
    with pytest.raises(ConfigurationError, match="is not of the annotated type"):
        around.add(promises)


@pytest.mark.usefixtures("working")
def test_a_failed_workflow_names_its_node_and_can_be_retried(app: App) -> None:
    handle = app.workflows["order"].start(-1)
    outcome = handle.outcome(timeout=30)
    assert isinstance(outcome, Failed)
    assert (outcome.error.code, outcome.error.data["node"]) == ("DECLINED", "paid")
    with pytest.raises(TaskFailed, match=f"Workflow {handle.id} ended without a result"):
        handle.result(timeout=30)
    with pytest.raises(TaskFailed, match="order -1"):
        handle.result_of("paid")
    with pytest.raises(TaskFailed, match="it needs paid, which ended FAILED"):
        handle.result_of("packed")
    (paid, _) = handle.nodes()
    assert paid.task_id is not None
    with pytest.raises(TaskNotRetryable, match="retry the workflow"):
        app.retry(paid.task_id)
    # The retry starts both nodes again; on a slow machine they have already failed again when it returns.
    assert handle.retry().again == ("paid", "packed")
    assert isinstance(handle.outcome(timeout=30), Failed)
    assert [each.attempt for each in handle.nodes()] == [1, None]


def test_a_start_with_the_key_of_a_live_workflow_returns_that_workflow(app: App) -> None:
    order = app.workflows["order"]
    first = order.with_options(key="order-1").start(1)
    assert order.with_options(key="order-1").start(1).id == first.id
    assert order.with_options(key="order-2").start(1).id != first.id
    assert first.cancel() is WorkflowState.CANCELLED
    assert order.with_options(key="order-1").start(1).id != first.id
    with pytest.raises(ConfigurationError, match="key of the workflow"):
        order.with_options(key="")


def test_a_retry_names_the_workflow_that_takes_its_key_at_the_same_moment(
    app: App, database_url: str
) -> None:  # B11
    order = app.workflows["order"]
    ended = order.with_options(key="order-1").start(1)
    ended.cancel()
    with psycopg.connect(database_url) as sender, ThreadPoolExecutor(1) as threads:
        live = order.with_options(key="order-1", connection=sender).start(1)
        refused = threads.submit(ended.retry)
        wait_until_blocked_by(sender, database_url)
        sender.commit()
        with pytest.raises(WorkflowNotRetryable, match=f"the key of the live workflow {live.id}"):
            refused.result(timeout=30)


def test_a_workflow_started_in_the_callers_transaction_is_rolled_back_with_it(
    app: App, database_url: str
) -> None:
    app.migrate()
    with psycopg.connect(database_url) as connection:
        handle = app.workflows["order"].with_options(connection=connection).start(1)
        with pytest.raises(WorkflowNotFound):
            handle.status()
        connection.rollback()
        with pytest.raises(WorkflowNotFound):
            handle.status()
        handle = app.workflows["order"].with_options(connection=connection).start(1)
        connection.commit()
        assert handle.status() is WorkflowState.RUNNING


def test_a_workflow_can_be_paused_and_inspected_without_a_worker(app: App) -> None:
    handle = app.workflows["order"].start(1)
    assert handle.pause() is WorkflowState.PAUSED
    assert [node.state for node in handle.nodes()] == ["READY", "PENDING"]
    with pytest.raises(NodeNotEnded, match="is READY"):
        handle.result_of("paid")
    assert handle.resume() is WorkflowState.RUNNING
    assert [node.state for node in handle.nodes()] == ["ENQUEUED", "PENDING"]
    with pytest.raises(WaitTimeout):
        handle.result(timeout=0.1)
    assert handle.cancel() is WorkflowState.CANCELLED
    assert [node.state for node in handle.nodes()] == ["CANCELLED", "SKIPPED"]
    assert handle.cancel() is WorkflowState.CANCELLED
    assert handle.resume() is WorkflowState.CANCELLED


def test_a_node_reports_the_condition_that_decides_whether_it_runs(app: App) -> None:
    @app.task
    async def is_large(number: int) -> bool:
        return number > 1

    @app.task
    async def insure() -> None:
        return None

    workflow = app.workflow("conditions")
    asked = [workflow.add(is_large, number).named(f"asked-{number}") for number in range(3)]
    workflow.add(insure).after(*asked, join=2).when(asked[0].result).unless(asked[1].result)
    (insured,) = (node for node in workflow.start().nodes() if node.name == "insure")
    assert insured.conditions == ("2 of asked-0, asked-1, asked-2", "if asked-0", "unless asked-1")
    assert set(insured.needs) == {"asked-0", "asked-1", "asked-2"}


def test_workflow_handles_refuse_unknown_nodes_and_unknown_ids(app: App) -> None:
    handle = app.workflows["order"].start(1)
    with pytest.raises(UnknownName, match="did you mean 'packed'"):
        handle.result_of("packd")
    unknown = app.workflow_handle(uuid4())
    for question in (
        unknown.status,
        unknown.info,
        unknown.nodes,
        unknown.pause,
        unknown.cancel,
        unknown.retry,
    ):
        with pytest.raises(WorkflowNotFound):
            question()
    with pytest.raises(WorkflowNotFound):
        unknown.result(timeout=5)
    with pytest.raises(WorkflowNotRetryable, match="is RUNNING"):
        handle.retry()
    with pytest.raises(ConfigurationError, match="workflow_id"):
        app.workflow_handle("x")
    with pytest.raises(ConfigurationError, match="nothing"):
        app.workflow("nothing").start()
    assert app.recover_stuck_workflows(dry_run=True) == []


async def test_workflow_handles_refuse_blocking_calls_on_an_event_loop(app: App) -> None:
    with pytest.raises(BlockingCallInLoop, match="astart"):
        app.workflows["order"].start(1)
    handle = await app.workflows["order"].astart(1)
    with pytest.raises(BlockingCallInLoop, match="astatus"):
        handle.status()
    assert await handle.astatus() is WorkflowState.RUNNING
    assert [info.id for info in await app.alist_workflows(name="order")] == [handle.id]
    assert await app.alist_workflows(state="FAILED") == []
    assert await handle.acancel() is WorkflowState.CANCELLED
    await app.aclose()
