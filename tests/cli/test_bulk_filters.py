"""Bulk actions take the filters of `everbeat tasks list`, count what it shows, and change exactly that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias
from uuid import UUID

import pytest

from everbeat import App
from everbeat.cli.task_filters import FILTERS
from everbeat.domain.filters import TaskFilters
from tests.cli.conftest import Command
from tests.maintenance.acting import Carrier, app_of, rows
from tests.store.conftest import StoreHarness, db

__all__ = ["db"]

MADE = {
    "retrying": "enqueued_at = now() + interval '1 hour', next_retry_at = now() + interval '1 hour'",
    "scheduled": "enqueued_at = now() + interval '1 hour'",
    "suspended": "enqueued_at = now() + interval '1 hour', wake_at = now() + interval '1 hour', waits_for = 'approved'",
    "suspect": "suspect = true",
    "overdue": "sent_at = now() - interval '3 hours', enqueued_at = now() - interval '3 hours'",
}
"""How a task gets into each virtual state."""
Cases: TypeAlias = Sequence[tuple[tuple[str, ...], str]]
USUAL: Cases = (
    (("--label", "tenant=42", "--label", "team"), "labelled by team"),
    (("--until", "1h"), "overdue"),
    (("--arguments-contain", '"n":7'), "seventh"),
    (("--state", "retrying", "--state", "scheduled", "--label", "tenant=42"), "labelled retries"),
)
OTHERS: Cases = (
    *((("--state", name), name) for name in MADE),
    (("--label", "tenant=42"), "labelled"),
    (("--name", "work", "--state", "pending", "--until", "1h", "--label", "tenant"), "nothing"),
)


@pytest.fixture
def app(db: StoreHarness) -> Iterator[App]:
    own = app_of(db)
    yield own
    own.close()


def stored(app: App, db: StoreHarness) -> dict[str, set[UUID]]:
    """Store two tasks for each filter, and some that no filter matches. Return their ids by what they are."""

    def send(*numbers: int, **labels: str) -> set[UUID]:
        return {app.send_by_name("work", {"n": number}, labels=labels).id for number in numbers}

    found: dict[str, set[UUID]] = {name: send(1, 2) for name in MADE} | {"nothing": set()}
    found["labelled retries"] = send(3, tenant="42")
    found["retrying"] |= found["labelled retries"]
    for name, columns in MADE.items():
        rows(
            db,
            f"update {{schema}}.tasks set {columns} where id = any(%s::uuid[]) returning id",
            [*found[name]],
        )
    found["seventh"] = send(7)
    found["labelled by team"] = send(4, tenant="42", team="billing")
    found["labelled"] = found["labelled by team"] | found["labelled retries"] | send(5, tenant="42")
    send(6, tenant="43")
    return found


@pytest.mark.parametrize(
    "cases", [USUAL, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["usual", "others"]
)
def test_a_bulk_action_counts_and_changes_the_tasks_that_the_list_shows_for_each_filter(
    everbeat: Command, app: App, db: StoreHarness, cases: Cases
) -> None:
    expected = stored(app, db)
    for number, (filters, what) in enumerate(cases):
        listed = everbeat("tasks", "list", *filters, "--json").assert_code(0).document["tasks"]
        assert {UUID(each["id"]) for each in listed} == expected[what], filters
        move = ("tasks", "move", "--all", *filters, "--to", f"to{number}", "--json")
        counted = everbeat(*move, "--dry-run").assert_code(0).document
        assert (counted["state"], counted["done"]) == ("DRY_RUN", len(listed)), filters
        assert rows(db, "select from {schema}.tasks where queue = %s", f"to{number}") == []
        everbeat(*move, "--yes").assert_code(0)
        Carrier(db).run()
        moved = rows(db, "select id from {schema}.tasks where queue = %s", f"to{number}")
        assert {row[0] for row in moved} == expected[what], filters


def test_the_tasks_of_a_batch_are_listed_shown_explained_and_counted(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    @app.task(name="load", labels={"team": "data"})
    async def load(row: int) -> None: ...

    load.send(9)
    with app.batch("import") as batch:
        sent = [str(each.id) for each in batch.send_many(load.call(row) for row in range(2))]
    short = str(batch.id)[:18]
    listed = everbeat("tasks", "list", "--batch", short, "--json").assert_code(0).document["tasks"]
    assert {each["id"] for each in listed} == {*sent}
    assert everbeat("tasks", "show", sent[0], "--json").document["batch_id"] == str(batch.id)
    explained = everbeat("explain", sent[0]).assert_code(0).out
    assert [line.split() for line in explained.splitlines() if line.startswith("labels")] == [
        ["labels", "team=data"]
    ]
    counted = everbeat("tasks", "cancel", "--all", "--batch", short, "--dry-run").assert_code(0)
    assert counted.out == "cancel  would change 2 tasks\n"
    assert everbeat("tasks", "list", "--batch", "nothing").assert_code(2).err.startswith("error")


def test_all_filters_of_python_are_options_of_the_commands() -> None:
    assert {*FILTERS} == {*TaskFilters.__annotations__}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--label", "a=1", "--label", "a=2"), "--label gives the key 'a' twice"),
        (("--label", "a b"), "--label"),
        (("--until", "soon"), "--until"),
        (("--state", "retryin"), "retrying"),
        (("--arguments-contain", ""), "--arguments-contain"),
    ],
)
def test_an_invalid_filter_of_a_bulk_action_names_its_option(
    everbeat: Command, db: StoreHarness, words: tuple[str, ...], said: str
) -> None:
    refused = everbeat("tasks", "cancel", "--all", *words, "--dry-run").assert_code(2)
    assert said in refused.err


def test_a_filter_needs_all_and_is_refused_beside_ids(everbeat: Command, db: StoreHarness) -> None:
    for filters in (
        ("--label", "a=1"),
        ("--until", "1h"),
        ("--state", "overdue"),
        ("--arguments-contain", "7"),
    ):
        refused = everbeat("tasks", "cancel", "0123", *filters).assert_code(2)
        assert "give either the ids of tasks, or --all" in " ".join(refused.err.split())


def test_dead_letters_are_listed_by_the_filters_of_the_task_list(
    everbeat: Command, app: App, db: StoreHarness
) -> None:
    for number, labels in enumerate(({"tenant": "42"}, {"tenant": "43"}, {})):
        app.send_by_name("work", {"n": number}, labels=labels)
    rows(
        db,
        "update {schema}.tasks set state = 'EXPIRED', expired_at = now(), error = '{{\"code\": \"LATE\"}}' returning id",
    )
    found = [
        len(everbeat("dead", *words, "--json").assert_code(0).document["tasks"])
        for words in ((), ("--label", "tenant=42"), ("--arguments-contain", '"n":2'), ("--state", "failed"))
    ]
    assert found == [3, 1, 1, 0]
