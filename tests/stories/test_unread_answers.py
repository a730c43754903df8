"""A worker does not read an answer of PostgreSQL: the transaction that waits for it ends, others wait a bounded time, and nothing is lost."""

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

from tests.stories.stage import FAST, SLACK, Stage, Tree

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

WITHIN_S = 15.0
PARCEL = "x" * 400_000
"""Several of these are more than a socket takes without a reader."""


def unread(stage: Stage, like: str = "% worker %") -> list[str]:
    """The sessions of trees that send an answer, by name."""
    found = "select application_name from pg_stat_activity where wait_event = 'ClientWrite' and application_name like %s"
    return [row["application_name"] for row in stage.query(found, like)]


def worker_of(stage: Stage, tree: Tree) -> psutil.Process:
    (row,) = stage.workers(tree)
    return psutil.Process(row["pid"])


@contextmanager
def claims_wait(stage: Stage, tree: Tree) -> Iterator[None]:
    """The claims of a worker wait until the block ends: each locks the row of its worker."""
    (row,) = stage.workers(tree)
    lock = sql.SQL("select from {}.workers where id = %s for update").format(sql.Identifier(stage.schema))
    with psycopg.connect(stage.url) as other:
        other.execute(lock, [row["id"]])
        yield


def at_work(stage: Stage) -> bool:
    """Whether a session of a worker works on a statement."""
    active = "select from pg_stat_activity where state = 'active' and application_name like %s"
    return bool(stage.query(active, "% worker %"))


def is_waiting(stage: Stage) -> bool:
    """Whether a claim waits for the row of its worker."""
    waits = "select from pg_stat_activity where wait_event_type = 'Lock' and query like '-- Claims due %%'"
    return bool(stage.query(waits + " and application_name like %s", "% worker %"))


@contextmanager
def timed(act: Callable[[], object]) -> Iterator[list[float]]:
    """Does it in a thread; the list gets the seconds that it took, when the block has ended."""
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
def test_tasks_of_a_claim_whose_answer_a_frozen_worker_does_not_read_are_free_in_time(
    stage: Stage, deeds: ModuleType, what: str
) -> None:  # J14
    frozen = stage.ready_tree()
    worker = worker_of(stage, frozen)
    first = deeds.weigh.send("x")
    stage.until(stage.state_is(first.id, "COMPLETED"), within=30, what="it claims", tree=frozen)
    worker.send_signal(signal.SIGSTOP)
    stage.until(lambda: not at_work(stage), within=30, what="none of its statements began earlier")
    handles = deeds.app.send_many([deeds.weigh.call(PARCEL) for _ in range(20)])
    with claims_wait(stage, frozen):
        worker.send_signal(signal.SIGCONT)
        stage.until(lambda: is_waiting(stage), within=30, what="the claim waits", tree=frozen)
        if what == "whole tree":
            frozen.freeze()
        else:
            worker.send_signal(signal.SIGSTOP)
    stage.until(lambda: unread(stage), within=30, what="nobody reads the answer")
    began_at = time.monotonic()
    with timed(lambda: deeds.app.cancel(handles[0].id)) as took:
        other = stage.ready_tree()
    assert took, "the task is locked"
    print(f"{what}: the cancel took {took[0]:.1f} s")
    assert took[0] < WITHIN_S
    assert not unread(stage)
    stage.until(
        lambda: stage.states() == {"COMPLETED": 20, "CANCELLED": 1},
        within=10 * SLACK,
        what="the other tree runs the tasks",
        tree=other,
    )
    print(f"all done after {time.monotonic() - began_at:.1f} s")
    assert "answers_unread" in frozen.output() + other.output()
    other.stop()
    frozen.thaw()
    again = deeds.weigh.send(PARCEL)
    stage.until(stage.state_is(again.id, "COMPLETED"), within=10 * SLACK, what="it claims again", tree=frozen)
    assert worker.is_running()
    assert len(stage.effects("start")) == 21


@pytest.mark.long
def test_tasks_of_a_claim_whose_answer_a_blocked_loop_does_not_read_run_elsewhere(
    stage: Stage, deeds: ModuleType
) -> None:  # J14
    blocked = stage.ready_tree(recovery=FAST)
    deeds.app.send_many(
        [
            *[deeds.weigh.call("x") for _ in range(3)],
            deeds.block_the_loop.call(40.0),
            *[deeds.weigh.call("x" * 8_000) for _ in range(2_000)],
        ]
    )
    stage.until(lambda: unread(stage), within=30, what="nobody reads the answer", tree=blocked)
    other = stage.ready_tree(recovery=FAST)
    gone = stage.until(lambda: not unread(stage), within=WITHIN_S * SLACK, what="the session has ended")
    assert gone < WITHIN_S
    pending = "select from {schema}.tasks where state = 'PENDING'"
    stage.until(lambda: not stage.query(pending), within=15 * SLACK, what="all are claimed", tree=other)
    stage.until(
        lambda: stage.states() == {"COMPLETED": 2_004}, within=60 * SLACK, what="all ran", tree=blocked
    )
    assert "answers_unread" in blocked.output() + other.output()


@pytest.mark.long
def test_hints_that_a_frozen_worker_does_not_read_hold_no_transaction_open(
    stage: Stage, deeds: ModuleType
) -> None:  # J14
    tree = stage.ready_tree()
    worker = worker_of(stage, tree)
    listens = "select from pg_stat_activity where application_name like %s and query like 'LISTEN %%' and state = 'idle'"
    stage.until(lambda: stage.query(listens, "% listen"), within=30, what="it listens", tree=tree)
    worker.send_signal(signal.SIGSTOP)
    hints = (
        "select count(pg_notify(%s, 't:' || repeat('q', 90) || n)) from generate_series(%s::int, %s::int) n"
    )
    for number in range(40):
        stage.query(hints, stage.target.channel, number * 1_000, number * 1_000 + 999)
    stage.until(lambda: unread(stage, "% listen"), within=30, what="nobody reads the hints", tree=tree)
    gone = stage.until(lambda: not unread(stage, "% listen"), within=WITHIN_S * SLACK, what="it has ended")
    assert gone < WITHIN_S
    tail = "select pg_notification_queue_usage() as used"
    stage.until(lambda: stage.query(tail)[0]["used"] < 0.01, within=10, what="the queue is empty")
    worker.send_signal(signal.SIGCONT)
    stage.until(
        lambda: stage.query(listens, "% listen"), within=10 * SLACK, what="it listens again", tree=tree
    )
    again = deeds.quick.send()
    stage.until(stage.state_is(again.id, "COMPLETED"), within=10 * SLACK, what="it runs tasks", tree=tree)
    assert worker.is_running()
