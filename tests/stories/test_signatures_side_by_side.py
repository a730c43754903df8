"""Two versions of a program run side by side: a task waits for the code that understands its arguments, and runs there once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.stories.stage import SLACK, Stage, Tree

pytestmark = pytest.mark.story

LANES = ("async", "thread", "process")
WITHIN_S = 3.0 * SLACK
"""How soon a worker that understands a task runs it, once the worker is there."""


def runs_of(stage: Stage, handle: Any) -> list[str]:
    """Which versions have run its code."""
    return [line["version"] for line in stage.effects("start", handle.id)]


def untouched(stage: Stage, handle: Any) -> bool:
    """Whether it waits with a mark, and looks as if no worker had ever touched it."""
    row = stage.task(handle.id)
    return row["needs"] is not None and (
        row["state"], row["attempt"], row["policy"], row["started_at"], row["claimed_at"], row["error"], row["retry_count"],
    ) == ("PENDING", 0, None, None, None, None, 0)  # fmt: skip


def ran_once_in_new(stage: Stage, handle: Any) -> bool:
    """Whether only the new code ran it, once, under its own policy."""
    row = stage.task(handle.id)
    (attempt,) = stage.attempts(handle.id)
    return runs_of(stage, handle) == ["new"] and (row["attempt"], attempt["outcome"], row["policy"]["timeout_ms"]) == (
        1, "COMPLETED", 60_000,
    )  # fmt: skip


def test_tasks_with_a_new_argument_wait_for_new_code_and_run_there_once(
    stage: Stage, deeds: ModuleType
) -> None:  # J2
    old = stage.ready_tree(program="signatures_old")
    sent = [deeds.app.send_by_name(f"greet_{lane}", {"who": "you", "locale": "de"}) for lane in LANES]
    required = [deeds.app.send_by_name(f"pay_{lane}", {"amount": 1, "currency": "EUR"}) for lane in LANES]
    everything = [*sent, *required]
    stage.until(
        lambda: all(untouched(stage, each) for each in everything), within=20, what="all declined", tree=old
    )
    assert (
        deeds.app.send_by_name("greet_thread", {"who": "you"}).result(timeout=20) == "hello you"
    )  # the old worker serves its own
    assert [untouched(stage, each) for each in everything] == [True] * 6
    assert old.output().count("task_declined") == 6
    stage.ready_tree(program="signatures_new")
    stage.until(
        lambda: all(stage.task(each.id)["state"] == "COMPLETED" for each in everything), within=WITHIN_S, what="new code runs them",
    )  # fmt: skip
    assert [each.result(timeout=1) for each in sent] == ["de: you"] * 3
    assert [ran_once_in_new(stage, each) for each in everything] == [True] * 6
    assert stage.query("select from {schema}.attempts where outcome <> 'COMPLETED'") == []


def test_an_old_sender_reaches_old_code_while_new_code_requires_more(
    stage: Stage, deeds: ModuleType
) -> None:  # J2
    new = stage.ready_tree(program="signatures_new")
    sent = [deeds.app.send_by_name(f"pay_{lane}", {"amount": 1}) for lane in LANES]
    stage.until(
        lambda: all(untouched(stage, each) for each in sent), within=20, what="all declined", tree=new
    )
    stage.ready_tree(program="signatures_old")
    for each in sent:
        assert each.result(timeout=WITHIN_S) == "1"
        assert runs_of(stage, each) == ["old"]


def test_both_versions_run_all_tasks_and_hand_none_back_twice(stage: Stage, deeds: ModuleType) -> None:  # J2
    trees: list[Tree] = [stage.ready_tree(program=f"signatures_{version}") for version in ("old", "new")]
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("greet", {"who": "a"}), ("greet", {"who": "a", "locale": "de"}), ("pay", {"amount": 1}), ("pay", {"amount": 1, "currency": "EUR"}),
    ]  # fmt: skip
    sent = [
        (deeds.app.send_by_name(f"{name}_{lane}", given), name, given)
        for _ in range(5)
        for lane in LANES
        for name, given in kinds
    ]
    for handle, name, given in sent:
        handle.result(timeout=30)
        versions = runs_of(stage, handle)
        assert len(versions) == 1
        if name == "pay" or "locale" in given:
            assert versions == ["new" if "currency" in given or "locale" in given else "old"]
    rows = stage.query("select fence, attempt, needs_id is not null as was_declined from {schema}.tasks")
    assert [row["attempt"] for row in rows] == [1] * len(sent)
    # Every claim but the last one of a task ended in a decline.
    assert all(row["fence"] == 1 + row["was_declined"] for row in rows)
    assert stage.query("select from {schema}.recoveries") == []
    for tree in trees:
        assert tree.stop() == 0, tree.output()


def test_a_marked_head_of_a_serial_line_keeps_the_line_in_order_until_new_code_comes(
    stage: Stage, deeds: ModuleType
) -> None:  # J2
    old = stage.ready_tree(program="signatures_old")
    first = deeds.app.send_by_name("greet_thread", {"who": "1", "locale": "de"}, serial="line")
    second = deeds.app.send_by_name("greet_thread", {"who": "2"}, serial="line")
    stage.until(lambda: untouched(stage, first), within=20, what="declined", tree=old)
    assert deeds.app.send_by_name("pay_async", {"amount": 2}).result(timeout=20) == "2"
    assert stage.task(second.id)["fence"] == 0
    stage.ready_tree(program="signatures_new")
    for each in (first, second):
        each.result(timeout=WITHIN_S)
    began = [line["task"] for line in stage.effects("start") if line["name"] == "greet_thread"]
    assert began == [str(first.id), str(second.id)]


def test_wrong_types_and_damaged_arguments_still_fail(stage: Stage, deeds: ModuleType) -> None:  # J2
    old = stage.ready_tree(program="signatures_old")
    wrong = deeds.app.send_by_name("pay_thread", {"amount": "much"})
    both = deeds.app.send_by_name("pay_thread", {"amount": "much", "currency": "EUR"})
    stage.until(stage.state_is(wrong.id, "FAILED"), within=20, what="a wrong type fails", tree=old)
    assert stage.task(wrong.id)["error"]["code"] == "ARGUMENTS_INVALID"
    stage.until(lambda: untouched(stage, both), within=20, what="another version may know the type", tree=old)
    twice = deeds.app.send_by_name("pay_thread", {f"name_{n}": n for n in range(1_000)})
    stage.until(stage.state_is(twice.id, "FAILED"), within=20, what="names that no mark can hold", tree=old)
    assert stage.task(twice.id)["error"]["code"] == "ARGUMENTS_INVALID"
    assert [each["outcome"] for each in stage.attempts(twice.id)] == ["FAILED"]


def test_a_node_of_a_workflow_waits_for_code_that_understands_it(
    stage: Stage, deeds: ModuleType
) -> None:  # J2
    old = stage.ready_tree(program="signatures_old")
    workflow = deeds.app.workflow("two_versions")
    first = workflow.add(deeds.quick, 1).named("first")
    workflow.add(deeds.app.task(name="greet_async")(_greet), "you", locale="fr").after(first).named("second")
    handle = workflow.start()
    stage.until(
        lambda: stage.query("select from {schema}.tasks where needs is not null and state = 'PENDING'"), within=20, what="declined", tree=old,
    )  # fmt: skip
    stage.ready_tree(program="signatures_new")
    handle.result(timeout=WITHIN_S)
    assert {line["version"] for line in stage.effects("start") if line["name"] == "greet_async"} == {"new"}


async def _greet(who: str, locale: str = "en") -> str:
    return f"{locale}: {who}"
