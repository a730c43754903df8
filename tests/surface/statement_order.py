"""Record the order of statements in the life of a task and in each recovery, as real programs and workers send them.

Periodic statements are omitted: heartbeats, polls, timers, and the queries of a client that waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import Struct

from tests.surface.recorded_trees import Trees, logging_server
from tests.surface.statement_log import Sent

_CLAIM = "task/claim_tasks"
_BRING_WORK = {
    "task/insert_task",
    "task/insert_tasks",
    "task/settle_attempts",
    "task/recover_leases",
    "workflow/enqueue_nodes",
}
_WITHOUT_IDS = {_CLAIM, "pause/pause_crashing_tasks"}
_REPEATED = re.compile(
    r"inspect/|series/|task/(list_outcomes|check_leases)|workflow/(read_workflow|list_nodes|lock_workflows)$"
    r"|worker/(record_|watch_|take_turn|take_watch_turn|end_turn|end_watch_turn|lock_session|list_predecessors|register_supervisor|list_remaining_sessions)"
)
_BY_AGE = {"detect_child_exit": False, "detect_session_loss": False, "startup_reconciliation": False}
_ELSEWHERE: dict[str, Any] = {"queues": ["elsewhere"]}
_FAST = {
    "claimer_heartbeat_interval_ms": 1_000, "runner_heartbeat_interval_ms": 1_000, "claimed_stale_threshold_ms": 3_000,
    "running_stale_threshold_ms": 3_000, "check_interval_ms": 1_000,
}  # fmt: skip


Story = Callable[[Trees], Iterator["Order"]]


class Order(Struct, frozen=True):
    """One action and the statements that followed it."""

    title: str
    lines: Sequence[str]

    def text(self) -> str:
        return "".join(f"{line}\n" for line in (self.title, *(f"  {each}" for each in self.lines)))


def text() -> str:
    """Return the order of each story; the stories run concurrently, each in its own schema."""
    stories: tuple[tuple[Story, dict[str, Any]], ...] = (
        (_of_a_living_tree, {}),
        (_of_a_lost_session, {}),
        (_of_a_start, {}),
        (_of_age, _FAST | _BY_AGE),
    )
    with logging_server() as make, ThreadPoolExecutor(len(stories)) as pool:
        casts = [(story, make(f"recorded{story.__name__}", **recovery)) for story, recovery in stories]
        found = [pool.submit(list, story(trees)) for story, trees in casts]
        return "\n".join(order.text() for each in found for order in each.result())


def essential(sent: Sequence[Sent], ids: Set[str], *, runs_again: bool = True) -> list[str]:
    """Return the names of statements about these ids and of each claim that returned them, without periodic ones.

    `runs_again`: whether a recovered task is claimed again within the story.
    """
    bring_work = _BRING_WORK if runs_again else _BRING_WORK - {"task/recover_leases"}
    wanted = [one for one in _about(sent, ids) if not _REPEATED.match(one.name)]
    while wanted and _named(wanted[-1]) == _CLAIM:
        wanted.pop()
    lines: list[str] = []
    is_work_due = False
    for one in wanted:
        name = _named(one)
        if name == _CLAIM and not is_work_due:
            continue
        is_work_due = name in bring_work or (is_work_due and name != _CLAIM)
        line = f"{name} (in a transaction)" if one.transaction else name
        if lines[-1:] != [line]:
            lines.append(line)
    return lines


def _about(sent: Sequence[Sent], ids: Set[str]) -> Iterator[Sent]:
    mentions = [one for one in sent if any(_plain(each) in _plain(one.parameters) for each in ids)]
    transactions = {one.transaction for one in mentions if one.transaction}
    for one in sent:
        if one in mentions or one.transaction in transactions or _named(one) in _WITHOUT_IDS:
            yield one


def _named(one: Sent) -> str:
    """Return the file of a statement, also if only parts of it were sent."""
    return one.name.partition("-")[0]


def _plain(text: str) -> str:
    """Return the text with ids in both forms."""
    return text.replace("-", "")


def _ids_of(*tasks: Any) -> set[str]:
    """The ids of tasks and of their claims."""
    claims = {str(attempt.claim_id) for task in tasks for attempt in task.info().attempts}
    return {str(task.id) for task in tasks} | claims


def _workers(trees: Trees) -> set[str]:
    """The ids of all workers."""
    return {worker.worker_id for worker in trees.app.list_workers()}


def _task(trees: Trees, title: str, send: Callable[[], Any]) -> Order:
    with trees.watched() as sent:
        task = send()
        trees.until(lambda: task.info().ended_at, title)
    return Order(title, essential(sent, _ids_of(task) | _workers(trees)))


def _of_a_living_tree(trees: Trees) -> Iterator[Order]:
    program = trees.program
    trees.start({"prefetch": 0})
    yield _task(trees, "a task", lambda: program.greet.send("you"))
    yield _task(trees, "a task that fails and is retried", program.refuse_once.send)
    yield _task(trees, "a durable step", program.step.send)
    with trees.watched() as sent:
        started = program.two_greetings.start()
        started.result(timeout=60)
    tasks = [trees.app.handle(node.task_id) for node in started.nodes() if node.task_id]
    yield Order("a workflow of two nodes", essential(sent, {str(started.id)} | _ids_of(*tasks)))
    yield _task(trees, "recovery: a task that makes no progress", program.stall_once.send)
    yield _task(trees, "recovery: a worker process that dies", program.die_once.send)


def _of_a_lost_session(trees: Trees) -> Iterator[Order]:
    yield _death(trees, _ELSEWHERE, noticed_by="session")


def _of_age(trees: Trees) -> Iterator[Order]:
    yield _death(trees, _ELSEWHERE, noticed_by="age")


def _of_a_start(trees: Trees) -> Iterator[Order]:
    yield _death(trees, noticed_by="startup", then=_ELSEWHERE | {"async_concurrency": 3})
    yield _ahead_of_a_slot(trees)


def _ahead_of_a_slot(trees: Trees) -> Order:
    """Send batches until the worker knows that the function is fast and claims ahead; a busy machine might need several."""
    brief = trees.program.brief.with_options(queue="elsewhere")
    found: list[Order] = []

    def send_batch() -> list[Any]:
        with trees.watched() as sent:
            tasks = brief.send_many(brief.call() for _ in range(15))
            for task in tasks:
                task.result(timeout=60)
        starts = [_plain(one.parameters) for one in sent if one.name == "task/start_tasks"]
        ahead = [task for task in tasks if any(_plain(str(task.id)) in one for one in starts)]
        found[:] = [
            Order("a task of a batch, claimed ahead of its slot", essential(sent, _ids_of(*ahead[:1])))
        ]
        return ahead

    trees.until(send_batch, "a task that is claimed ahead")
    return found[-1]


def _death(
    trees: Trees, *observers: dict[str, Any], noticed_by: str, then: dict[str, Any] | None = None
) -> Order:
    """Kill a tree that holds a task; observers run already, or `then` starts a tree."""
    doomed, *_ = trees.start({"queues": ["default"]}, *observers)
    with trees.watched() as sent:
        task = trees.program.wait_once.send()
        trees.until(lambda: task.info().started_at, "a running task")
        holder = task.info().claimed_by_worker_id
        (dead,) = [each.supervisor_id for each in trees.app.list_workers() if each.worker_id == holder]
        trees.kill(doomed)
        if then is not None:
            trees.start(then)
        trees.until(lambda: task.info().recoveries, f"recovery by {noticed_by}")
        trees.until(
            lambda: any(
                each.supervisor_id == dead and each.ended_at for each in trees.app.list_supervisors()
            ),
            "its end",
        )
    (recovery,) = task.info().recoveries
    assert recovery.noticed_by == noticed_by
    return Order(
        f"recovery: a tree that dies, noticed by {noticed_by}",
        essential(sent, _ids_of(task) | {holder, dead}, runs_again=False),
    )
