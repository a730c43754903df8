"""A tree has one LISTEN session. With several worker processes, the supervisor listens and passes hints on."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import psutil
import pytest

from everbeat.hints.topics import TasksReady, encode
from everbeat.supervisor.hint_relay import MOST_AT_ONCE
from tests.stories.scenario import FAST, SLACK, Scenario, Tree

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

RARE = {"poll_interval": 300, "async_concurrency": 1}
"""Workers that run one task at a time, and that only hints can wake within the time of a story."""
THREE = RARE | {"processes": 3}
SOON_S = 3.0 * SLACK
MOST_GROWTH_MB = 8.0
"""Of the supervisor's memory. 20,000 hints of 2,000 bytes have 40 MB."""


def listeners(scenario: Scenario, tree: Tree, *, executed: str = "%") -> list[int]:
    """Return the backends in which a tree listens, by their names and statements, if their last statement is `executed`."""
    found = """select a.pid from pg_stat_activity a
        join {schema}.supervisors s on s.session_name = split_part(a.application_name, ' ', 1)
        where s.pid = %s and (a.application_name like '%% listen' or a.query like 'LISTEN%%') and a.query like %s"""
    return [row["pid"] for row in scenario.query(found, tree.pid, executed)]


def listening_tree(scenario: Scenario, **options: Any) -> Tree:
    """Start a tree, and wait until it listens and its workers are idle."""
    tree = scenario.ready_tree(**options)
    scenario.until(
        lambda: listeners(scenario, tree, executed="LISTEN%"), within=30, what="it listens", tree=tree
    )
    for row in scenario.workers(tree):
        until_idle(scenario, tree, row["pid"])
    return tree


def until_idle(scenario: Scenario, tree: Tree, pid: int) -> None:
    """Wait until a worker has sent no statement for longer than a worker without hints does."""
    quiet = """select count(*) = 2 and max(state_change) < clock_timestamp() - interval '2.5 s' as is_idle
        from pg_stat_activity where application_name like %s"""
    name = f"% worker {pid}.%"
    scenario.until(lambda: scenario.query(quiet, name)[0]["is_idle"], within=30, what="it is idle", tree=tree)


def processes_of(scenario: Scenario, *handles: Any) -> set[int]:
    """Return the processes in which these tasks have started."""
    return {line["pid"] for handle in handles for line in scenario.effects("start", handle.id)}


def notify(scenario: Scenario, count: int) -> None:
    """Send this many different hints of 2,000 bytes, too few at once for the supervisor to replace them by `Everything`."""
    (prefix,) = encode(TasksReady("q" * 1_990))
    statement = "select count(pg_notify(%s, %s::text || n)) from generate_series(%s::int, %s::int) n"
    for first in range(0, count, MOST_AT_ONCE // 2):
        scenario.query(
            statement, scenario.target.channel, prefix, first, min(first + MOST_AT_ONCE // 2, count) - 1
        )


def test_three_worker_processes_share_one_listen_session_and_all_get_a_hint(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = listening_tree(scenario, worker=THREE)
    assert len(listeners(scenario, tree)) == 1
    tasks = [sample_tasks.wait_for.send("end") for _ in range(3)]
    scenario.until(lambda: len(processes_of(scenario, *tasks)) == 3, within=SOON_S, what="all run", tree=tree)
    scenario.open_gate("end")
    assert [task.result(timeout=30) for task in tasks] == ["done"] * 3
    assert tree.stop() == 0


def test_a_tree_with_one_worker_process_gets_hints_without_its_supervisor(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = listening_tree(scenario, worker=RARE)
    assert len(listeners(scenario, tree)) == 1
    psutil.Process(tree.pid).suspend()
    task = sample_tasks.quick.send(1)
    scenario.until(scenario.state_is(task.id, "COMPLETED"), within=SOON_S, what="it ran", tree=tree)


@pytest.mark.long
def test_hints_arrive_again_after_the_listen_session_was_terminated(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = listening_tree(scenario, worker=THREE)
    (before,) = listeners(scenario, tree)
    scenario.query("select pg_terminate_backend(%s)", before)
    scenario.until(
        lambda: listeners(scenario, tree, executed="LISTEN%") not in ([], [before]),
        within=30,
        what="it listens again",
        tree=tree,
    )
    scenario.until(lambda: tree.output().count("hints_heard_again") == 4, within=SOON_S, what="all know it")
    assert tree.output().count("hints_not_heard") == 4  # of the supervisor and of its workers
    for row in scenario.workers(tree):
        until_idle(scenario, tree, row["pid"])
    tasks = [sample_tasks.wait_for.send("end") for _ in range(3)]
    scenario.until(lambda: len(processes_of(scenario, *tasks)) == 3, within=SOON_S, what="all run", tree=tree)
    scenario.open_gate("end")
    assert [task.result(timeout=30) for task in tasks] == ["done"] * 3


@pytest.mark.long
def test_a_frozen_worker_delays_no_hints_of_others_and_its_supervisor_keeps_few_of_its_hints(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = listening_tree(scenario, worker=THREE)
    supervisor = psutil.Process(tree.pid)
    frozen = psutil.Process(scenario.workers(tree)[0]["pid"])
    memory = supervisor.memory_info().rss
    frozen.suspend()
    notify(scenario, 20_000)
    tasks = [sample_tasks.wait_for.send("end") for _ in range(3)]
    took = scenario.until(
        lambda: len(processes_of(scenario, *tasks)) == 2, within=SOON_S, what="the others run", tree=tree
    )
    assert frozen.pid not in processes_of(scenario, *tasks)
    growth_mb = (supervisor.memory_info().rss - memory) / 2**20
    print(f"the others run after {took:.2f} s; the supervisor has grown by {growth_mb:.1f} MB")
    assert growth_mb < MOST_GROWTH_MB
    frozen.resume()
    scenario.until(
        lambda: frozen.pid in processes_of(scenario, *tasks), within=SOON_S, what="it works", tree=tree
    )
    scenario.open_gate("end")
    assert [task.result(timeout=30) for task in tasks] == ["done"] * 3
    last = [sample_tasks.wait_for.send("last") for _ in range(3)]
    scenario.until(
        lambda: frozen.pid in processes_of(scenario, *last), within=SOON_S, what="it gets hints", tree=tree
    )
    scenario.open_gate("last")


def test_a_worker_process_that_replaces_a_killed_one_gets_hints(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = listening_tree(scenario, worker=THREE)
    before = {row["pid"] for row in scenario.workers(tree)}
    psutil.Process(min(before)).kill()

    def is_replaced() -> bool:
        now = {row["pid"] for row in scenario.workers(tree)}
        return len(now) == 3 and min(before) not in now

    scenario.until(is_replaced, within=30, what="it is replaced", tree=tree)
    for row in scenario.workers(tree):
        until_idle(scenario, tree, row["pid"])  # a worker that thinks that no hints arrive polls every second
    tasks = [sample_tasks.wait_for.send("end") for _ in range(3)]
    scenario.until(lambda: len(processes_of(scenario, *tasks)) == 3, within=SOON_S, what="all run", tree=tree)
    assert len(listeners(scenario, tree)) == 1
    scenario.open_gate("end")


def test_a_cancel_arrives_while_only_the_supervisor_is_frozen(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = listening_tree(scenario, worker=THREE, recovery=FAST)
    task = sample_tasks.wait_for.send("end")
    scenario.until(scenario.started(task.id), within=SOON_S, what="it runs", tree=tree)
    supervisor = psutil.Process(tree.pid)
    supervisor.suspend()
    task.cancel()
    took = scenario.until(scenario.state_is(task.id, "CANCELLED"), within=5 * SLACK, what="cancelled")
    assert took < 5 * SLACK
    supervisor.resume()
    scenario.until(
        lambda: tree.output().count("hints_heard_again") >= 3, within=SOON_S, what="all hear again"
    )
