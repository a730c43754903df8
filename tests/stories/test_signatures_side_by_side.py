"""Two versions of a program run side by side: a task waits for code that accepts its arguments, and runs there once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.stories.scenario import SLACK, Scenario, Tree

pytestmark = pytest.mark.story

LANES = ("async", "thread", "process")
WITHIN_S = 3.0 * SLACK
"""How soon an available worker that understands a task runs it."""


def runs_of(scenario: Scenario, handle: Any) -> list[str]:
    """Return the versions that ran the code of a task."""
    return [line["version"] for line in scenario.effects("start", handle.id)]


def untouched(scenario: Scenario, handle: Any) -> bool:
    """Whether the task waits with a mark, otherwise as if no worker had claimed it."""
    row = scenario.task(handle.id)
    return row["needs"] is not None and (
        row["state"], row["attempt"], row["policy"], row["started_at"], row["claimed_at"], row["error"], row["retry_count"],
    ) == ("PENDING", 0, None, None, None, None, 0)  # fmt: skip


def ran_once_in_new(scenario: Scenario, handle: Any) -> bool:
    """Whether only the new code ran it, once, under the new policy."""
    row = scenario.task(handle.id)
    (attempt,) = scenario.attempts(handle.id)
    return runs_of(scenario, handle) == ["new"] and (row["attempt"], attempt["outcome"], row["policy"]["timeout_ms"]) == (
        1, "COMPLETED", 60_000,
    )  # fmt: skip


def test_tasks_with_a_new_argument_wait_for_new_code_and_run_there_once(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J2
    old = scenario.ready_tree(program="signatures_old")
    sent = [sample_tasks.app.send_by_name(f"greet_{lane}", {"who": "you", "locale": "de"}) for lane in LANES]
    required = [
        sample_tasks.app.send_by_name(f"pay_{lane}", {"amount": 1, "currency": "EUR"}) for lane in LANES
    ]
    everything = [*sent, *required]
    scenario.until(
        lambda: all(untouched(scenario, each) for each in everything),
        within=20,
        what="all declined",
        tree=old,
    )
    assert (
        sample_tasks.app.send_by_name("greet_thread", {"who": "you"}).result(timeout=20) == "hello you"
    )  # the old worker runs its own tasks
    assert [untouched(scenario, each) for each in everything] == [True] * 6
    assert old.output().count("task_declined") == 6
    scenario.ready_tree(program="signatures_new")
    scenario.until(
        lambda: all(scenario.task(each.id)["state"] == "COMPLETED" for each in everything), within=WITHIN_S, what="new code runs them",
    )  # fmt: skip
    assert [each.result(timeout=1) for each in sent] == ["de: you"] * 3
    assert [ran_once_in_new(scenario, each) for each in everything] == [True] * 6
    assert scenario.query("select from {schema}.attempts where outcome <> 'COMPLETED'") == []


@pytest.mark.long
def test_tasks_of_an_old_sender_run_in_old_code_while_new_code_requires_more(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J2
    new = scenario.ready_tree(program="signatures_new")
    sent = [sample_tasks.app.send_by_name(f"pay_{lane}", {"amount": 1}) for lane in LANES]
    scenario.until(
        lambda: all(untouched(scenario, each) for each in sent), within=20, what="all declined", tree=new
    )
    scenario.ready_tree(program="signatures_old")
    for each in sent:
        assert each.result(timeout=WITHIN_S) == "1"
        assert runs_of(scenario, each) == ["old"]


@pytest.mark.long
def test_two_versions_run_all_tasks_and_decline_none_twice(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J2
    trees: list[Tree] = [scenario.ready_tree(program=f"signatures_{version}") for version in ("old", "new")]
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("greet", {"who": "a"}), ("greet", {"who": "a", "locale": "de"}), ("pay", {"amount": 1}), ("pay", {"amount": 1, "currency": "EUR"}),
    ]  # fmt: skip
    sent = [
        (sample_tasks.app.send_by_name(f"{name}_{lane}", given), name, given)
        for _ in range(5)
        for lane in LANES
        for name, given in kinds
    ]
    for handle, name, given in sent:
        handle.result(timeout=30)
        versions = runs_of(scenario, handle)
        assert len(versions) == 1
        if name == "pay" or "locale" in given:
            assert versions == ["new" if "currency" in given or "locale" in given else "old"]
    rows = scenario.query("select fence, attempt, needs_id is not null as was_declined from {schema}.tasks")
    assert [row["attempt"] for row in rows] == [1] * len(sent)
    # Every claim of a task except the last one ended in a decline.
    assert all(row["fence"] == 1 + row["was_declined"] for row in rows)
    assert scenario.query("select from {schema}.recoveries") == []
    for tree in trees:
        assert tree.stop() == 0, tree.output()


@pytest.mark.long
def test_a_marked_head_keeps_its_serial_line_in_order_until_new_code_arrives(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J2
    old = scenario.ready_tree(program="signatures_old")
    first = sample_tasks.app.send_by_name("greet_thread", {"who": "1", "locale": "de"}, serial="line")
    second = sample_tasks.app.send_by_name("greet_thread", {"who": "2"}, serial="line")
    scenario.until(lambda: untouched(scenario, first), within=20, what="declined", tree=old)
    assert sample_tasks.app.send_by_name("pay_async", {"amount": 2}).result(timeout=20) == "2"
    assert scenario.task(second.id)["fence"] == 0
    scenario.ready_tree(program="signatures_new")
    for each in (first, second):
        each.result(timeout=WITHIN_S)
    began = [line["task"] for line in scenario.effects("start") if line["name"] == "greet_thread"]
    assert began == [str(first.id), str(second.id)]


def test_wrong_types_and_damaged_arguments_still_fail(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J2
    old = scenario.ready_tree(program="signatures_old")
    wrong = sample_tasks.app.send_by_name("pay_thread", {"amount": "much"})
    both = sample_tasks.app.send_by_name("pay_thread", {"amount": "much", "currency": "EUR"})
    scenario.until(scenario.state_is(wrong.id, "FAILED"), within=20, what="a wrong type fails", tree=old)
    assert scenario.task(wrong.id)["error"]["code"] == "ARGUMENTS_INVALID"
    scenario.until(
        lambda: untouched(scenario, both), within=20, what="another version may know the type", tree=old
    )
    twice = sample_tasks.app.send_by_name("pay_thread", {f"name_{n}": n for n in range(1_000)})
    scenario.until(
        scenario.state_is(twice.id, "FAILED"), within=20, what="names that no mark can hold", tree=old
    )
    assert scenario.task(twice.id)["error"]["code"] == "ARGUMENTS_INVALID"
    assert [each["outcome"] for each in scenario.attempts(twice.id)] == ["FAILED"]


@pytest.mark.long
def test_a_workflow_node_waits_for_code_that_accepts_its_arguments(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J2
    old = scenario.ready_tree(program="signatures_old")
    workflow = sample_tasks.app.workflow("two_versions")
    first = workflow.add(sample_tasks.quick, 1).named("first")
    workflow.add(sample_tasks.app.task(name="greet_async")(_greet), "you", locale="fr").after(first).named(
        "second"
    )
    handle = workflow.start()
    scenario.until(
        lambda: scenario.query("select from {schema}.tasks where needs is not null and state = 'PENDING'"), within=20, what="declined", tree=old,
    )  # fmt: skip
    scenario.ready_tree(program="signatures_new")
    handle.result(timeout=WITHIN_S)
    assert {line["version"] for line in scenario.effects("start") if line["name"] == "greet_async"} == {"new"}


async def _greet(who: str, locale: str = "en") -> str:
    return f"{locale}: {who}"
