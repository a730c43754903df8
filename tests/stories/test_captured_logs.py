"""The log of an attempt whose worker was killed can be read up to its last second or two. The next attempt has its own log."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.stories.scenario import BY_AGE, FAST, Scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 2, "thread_concurrency": 2}
MODES = ("async", "in_thread", "in_process")
LOST_LINES = 150
"""About how many lines the code writes in 3 s, on a slow machine. The last write was at most a second old, and the statement takes some time."""


@pytest.fixture
def logging_tasks(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "logging_tasks") as program:
        yield program


def logged(scenario: Scenario, task: Any, attempt: int) -> list[int]:
    """Return the numbers that the code of an attempt has logged, according to its effects."""
    return [
        each["n"] for each in scenario.effects() if each["task"] == str(task.id) and each["attempt"] == attempt
    ]  # fmt: skip


def test_the_log_of_a_killed_attempt_has_its_last_lines_and_the_second_attempt_has_its_own(
    scenario: Scenario, logging_tasks: ModuleType
) -> None:
    doomed = scenario.ready_tree(program="logging_tasks", worker=ALONE, options=("--log-format", "json"))
    tasks = {mode: getattr(logging_tasks, f"pack_{mode}").send() for mode in MODES}
    scenario.until(
        lambda: all(len(logged(scenario, task, 1)) >= 150 for task in tasks.values()),
        within=60,
        what="each attempt has logged 150 lines",
    )
    doomed.kill()
    scenario.ready_tree(program="logging_tasks", worker=ALONE)
    for mode, task in tasks.items():
        assert task.result(timeout=60) == "done"
        scenario.until(
            lambda task=task: len(task.logs()) == 2 and len(task.logs()[1].lines) == 3,
            within=20,
            what="both logs are stored",
        )
        first, second = task.logs()
        written = logged(scenario, task, 1)
        numbers = [int(line.message.rpartition(" ")[2]) for line in first.lines]
        print(f"{mode}: {len(written) - numbers[-1] - 1} of {len(written)} lines were lost with the worker")
        assert (first.attempt, first.dropped) == (1, 0)
        assert numbers == [*range(len(numbers))]
        assert len(written) - len(numbers) <= LOST_LINES
        assert [line.message for line in second.lines] == [f"attempt 2, item {n}" for n in range(3)]
        assert {(line.level, line.logger) for line in (*first.lines, *second.lines)} == {
            ("INFO", "shop.orders")
        }
    messages = [
        each for each in map(json.loads, doomed.output().splitlines()) if each["logger"] == "shop.orders"
    ]
    assert {each["fields"]["task_name"] for each in messages} == {f"pack_{mode}" for mode in MODES}, (
        "the log itself is unchanged"
    )


@pytest.mark.long
def test_a_worker_that_was_declared_dead_logs_only_under_its_own_claim(
    scenario: Scenario, logging_tasks: ModuleType
) -> None:
    frozen = scenario.ready_tree(program="logging_tasks", worker=ALONE, recovery=FAST | BY_AGE)
    task = logging_tasks.pack_in_thread.send()
    scenario.until(lambda: bool(task.logs()), within=30, what="the first lines are stored")
    frozen.freeze()
    scenario.ready_tree(program="logging_tasks", worker=ALONE, recovery=FAST | BY_AGE)
    assert task.result(timeout=60) == "done"
    scenario.until(
        lambda: [len(each.lines) for each in task.logs()[1:]] == [3],
        within=20,
        what="the second log is stored",
    )
    before = task.logs()
    frozen.thaw()
    scenario.until(
        lambda: task.logs()[0].lines[-1].number > before[0].lines[-1].number + 20,
        within=30,
        what="the zombie's thread logs on",
        tree=frozen,
    )
    first, second = task.logs()
    assert second == before[1]
    assert (first.attempt, first.claim_id) == (1, before[0].claim_id)
    assert {line.message.partition(",")[0] for line in first.lines} == {"attempt 1"}
    assert task.info().state == "COMPLETED"
    frozen.kill()


def test_the_command_follows_the_log_through_a_kill_until_the_task_has_ended(
    scenario: Scenario, logging_tasks: ModuleType
) -> None:
    doomed = scenario.ready_tree(program="logging_tasks", worker=ALONE)
    task = logging_tasks.pack_async.send()
    scenario.until(lambda: bool(task.logs()), within=30, what="the first lines are stored")
    argv = [
        sys.executable,
        "-m",
        "everbeat",
        "logs",
        str(task.id),
        "--follow",
        "--json",
        "--url",
        scenario.url,
        "--schema",
        scenario.schema,
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["number"] == 1
        doomed.kill()
        scenario.ready_tree(program="logging_tasks", worker=ALONE)
        rest = follower.stdout.read()
    assert follower.returncode == 0
    lines = [json.loads(each) for each in rest.splitlines()]
    assert [each["number"] for each in lines if each["attempt"] == 1] == [
        line.number for line in task.logs(attempt=1)[0].lines[1:]
    ]
    assert [each["message"] for each in lines if each["attempt"] == 2] == [
        f"attempt 2, item {n}" for n in range(3)
    ]
