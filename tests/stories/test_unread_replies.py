"""A worker does not read a reply of PostgreSQL: the waiting transaction ends, others wait a bounded time, and no task is lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import psutil
import psycopg
import pytest
from psycopg import sql

from tests.stories.scenario import FAST, SLACK, Scenario, Tree
from tests.worker.proxy import statement_marker

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

WITHIN_S = 15.0
PARCEL = "x" * 400_000
"""Several of these exceed the buffer of a socket without a reader."""


def unread(scenario: Scenario, like: str = "% worker %") -> list[str]:
    """Return the names of the trees' sessions that send a reply."""
    found = "select application_name from pg_stat_activity where wait_event = 'ClientWrite' and application_name like %s"
    return [row["application_name"] for row in scenario.query(found, like)]


def worker_of(scenario: Scenario, tree: Tree) -> psutil.Process:
    (row,) = scenario.workers(tree)
    return psutil.Process(row["pid"])


@contextmanager
def claims_wait(scenario: Scenario, tree: Tree) -> Iterator[None]:
    """Block the claims of a worker until the block ends: each locks the row of its worker."""
    (row,) = scenario.workers(tree)
    lock = sql.SQL("select from {}.workers where id = %s for update").format(sql.Identifier(scenario.schema))
    with psycopg.connect(scenario.url) as other:
        other.execute(lock, [row["id"]])
        yield


def at_work(scenario: Scenario) -> bool:
    """Whether a session of a worker executes a statement. A frozen worker might have sent only a part of one."""
    active = "select from pg_stat_activity where state = 'active' and wait_event is distinct from 'ClientRead' and application_name like %s"
    return bool(scenario.query(active, "% worker %"))


def is_waiting(scenario: Scenario) -> bool:
    """Whether a claim waits for the row of its worker."""
    waits = "select from pg_stat_activity where wait_event_type = 'Lock' and query like %s and application_name like %s"
    return bool(scenario.query(waits, f"{statement_marker('task/claim_tasks').decode()}%", "% worker %"))


@contextmanager
def timed(act: Callable[[], object]) -> Iterator[list[float]]:
    """Run it in a thread; the list contains its seconds after the block."""
    took: list[float] = []

    def run() -> None:
        began_at = time.monotonic()
        act()
        took.append(time.monotonic() - began_at)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield took
    thread.join(WITHIN_S * SLACK)


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("worker process", marks=pytest.mark.alone),
        pytest.param("whole tree", marks=pytest.mark.long),
    ],
)
def test_tasks_of_a_claim_whose_reply_a_frozen_worker_does_not_read_become_free_in_time(
    scenario: Scenario, sample_tasks: ModuleType, what: str
) -> None:  # J14
    frozen = scenario.ready_tree()
    worker = worker_of(scenario, frozen)
    first = sample_tasks.weigh.send("x")
    scenario.until(scenario.state_is(first.id, "COMPLETED"), within=30, what="it claims", tree=frozen)
    # The statement that records it would wait for the row of the worker, and the claim for this statement.
    scenario.until(lambda: scenario.workers(frozen)[0]["listens"], within=20, what="it listens", tree=frozen)
    worker.send_signal(signal.SIGSTOP)
    scenario.until(lambda: not at_work(scenario), within=30, what="none of its statements began earlier")
    handles = sample_tasks.app.send_many([sample_tasks.weigh.call(PARCEL) for _ in range(20)])
    stop, resume = (frozen.freeze, frozen.thaw) if what == "whole tree" else (worker.suspend, worker.resume)
    while not unread(scenario):
        # A claim for another executor brings no tasks, so the worker continues until one does.
        with claims_wait(scenario, frozen):
            resume()
            scenario.until(lambda: is_waiting(scenario), within=30, what="the claim waits", tree=frozen)
            stop()
        scenario.until(
            lambda: unread(scenario) or not at_work(scenario), within=30, what="the claim has its reply"
        )
    began_at = time.monotonic()
    with timed(lambda: sample_tasks.app.cancel(handles[0].id)) as took:
        other = scenario.ready_tree()
    assert took, "the task is locked"
    print(f"{what}: the cancel took {took[0]:.1f} s")
    assert took[0] < WITHIN_S
    assert not unread(scenario)
    scenario.until(
        lambda: scenario.states() == {"COMPLETED": 20, "CANCELLED": 1},
        within=10 * SLACK,
        what="the other tree runs the tasks",
        tree=other,
    )
    print(f"all done after {time.monotonic() - began_at:.1f} s")
    scenario.until(lambda: "answers_unread" in frozen.output() + other.output(), within=20, what="the report")
    other.stop()
    frozen.thaw()
    again = sample_tasks.weigh.send(PARCEL)
    scenario.until(
        scenario.state_is(again.id, "COMPLETED"), within=10 * SLACK, what="it claims again", tree=frozen
    )
    assert worker.is_running()
    assert len(scenario.effects("start")) == 21


@pytest.mark.long
def test_tasks_of_a_claim_whose_reply_a_blocked_loop_does_not_read_run_elsewhere(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J14
    blocked = scenario.ready_tree(recovery=FAST, worker={"async_concurrency": 2_000})
    sample_tasks.app.send_many(
        [
            *[sample_tasks.weigh.call("x") for _ in range(3)],
            sample_tasks.block_the_loop.call(40.0),
            *[sample_tasks.weigh.call("x" * 8_000) for _ in range(2_000)],
        ]
    )
    scenario.until(lambda: unread(scenario), within=30, what="nobody reads the answer", tree=blocked)
    other = scenario.ready_tree(recovery=FAST)
    gone = scenario.until(lambda: not unread(scenario), within=WITHIN_S * SLACK, what="the session has ended")
    assert gone < WITHIN_S
    pending = "select from {schema}.tasks where state = 'PENDING'"
    scenario.until(lambda: not scenario.query(pending), within=15 * SLACK, what="all are claimed", tree=other)
    scenario.until(
        lambda: scenario.states() == {"COMPLETED": 2_004}, within=60 * SLACK, what="all ran", tree=blocked
    )
    scenario.until(
        lambda: "answers_unread" in blocked.output() + other.output(), within=20, what="the report"
    )


@pytest.mark.long
def test_hints_that_a_frozen_worker_does_not_read_keep_no_transaction_open(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J14
    tree = scenario.ready_tree()
    worker = worker_of(scenario, tree)
    listens = "select from pg_stat_activity where application_name like %s and query like 'LISTEN %%' and state = 'idle'"
    scenario.until(lambda: scenario.query(listens, "% listen"), within=30, what="it listens", tree=tree)
    worker.send_signal(signal.SIGSTOP)
    hints = (
        "select count(pg_notify(%s, 't:' || repeat('q', 90) || n)) from generate_series(%s::int, %s::int) n"
    )
    for number in range(40):
        scenario.query(hints, scenario.target.channel, number * 1_000, number * 1_000 + 999)
    scenario.until(lambda: unread(scenario, "% listen"), within=30, what="nobody reads the hints", tree=tree)
    gone = scenario.until(
        lambda: not unread(scenario, "% listen"), within=WITHIN_S * SLACK, what="it has ended"
    )
    assert gone < WITHIN_S
    tail = "select pg_notification_queue_usage() as used"
    scenario.until(lambda: scenario.query(tail)[0]["used"] < 0.01, within=10, what="the queue is empty")
    worker.send_signal(signal.SIGCONT)
    scenario.until(
        lambda: scenario.query(listens, "% listen"), within=10 * SLACK, what="it listens again", tree=tree
    )
    again = sample_tasks.quick.send()
    scenario.until(
        scenario.state_is(again.id, "COMPLETED"), within=10 * SLACK, what="it runs tasks", tree=tree
    )
    assert worker.is_running()
