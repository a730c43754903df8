"""Test that every command that takes an id accepts a prefix, and refuses an ambiguous one with the candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from everbeat import App
from everbeat.cli.failures import ExitCode
from everbeat.cli.main import COMMANDS, load_command
from everbeat.domain.identifiers import bounds, shortest_prefix
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.cli.wide_scene import tree
from tests.client.conftest import app
from tests.store.conftest import StoreHarness
from tests.store.flows import task
from tests.workflows.sent import sent

__all__ = ["app"]
BEGIN, OTHER = "aaaa1111", "aaaa2222"
HOST = "web-1"
SUPERVISOR, WORKER, FELLOW = f"{HOST}-100-aaaaaaaa", f"{HOST}-101-bbbbbbbb", f"{HOST}-1012-cccccccc"

ACTING: dict[str, list[str]] = {
    "cancel": ["{task}"],
    "retry": ["{failed}"],
    "run-now": ["{task}"],
    "move": ["{task}", "--to", "default"],
    "reprioritise": ["{task}", "--to", "3"],
    "delete": ["{failed}"],
}
"""The commands that change tasks: by id, or with --all by filters."""
PLACES: dict[tuple[str, ...], list[str]] = {
    ("tasks", "list", "--workflow"): ["tasks", "list", "--workflow", "{workflow}"],
    ("tasks", "list", "--parent"): ["tasks", "list", "--parent", "{task}"],
    ("tasks", "list", "--worker"): ["tasks", "list", "--worker", "{worker}"],
    ("tasks", "list", "--before"): ["tasks", "list", "--before", "{task}"],
    ("tasks", "show", "task_id"): ["tasks", "show", "{task}"],
    ("tasks", "stream", "task_id"): ["tasks", "stream", "{task}", "rows"],
    ("logs", "task_id"): ["logs", "{task}"],
    ("tasks", "signal", "target"): ["tasks", "signal", "{workflow}", "approved"],
    ("workflows", "list", "--parent"): ["workflows", "list", "--parent", "{task}"],
    ("workflows", "list", "--before"): ["workflows", "list", "--before", "{workflow}"],
    ("workflows", "show", "workflow_id"): ["workflows", "show", "{workflow}"],
    ("workflows", "pause", "workflow_ids"): ["workflows", "pause", "{workflow}"],
    ("workflows", "resume", "workflow_ids"): ["workflows", "resume", "{workflow}"],
    ("workflows", "cancel", "workflow_ids"): ["workflows", "cancel", "{workflow}"],
    ("workflows", "retry", "workflow_ids"): ["workflows", "retry", "--dry-run", "{paused}"],
    ("workers", "quiet", "ids"): ["workers", "quiet", "{worker}", "{supervisor}"],
    ("workers", "list", "--history"): ["workers", "list", "--history", "{worker}"],
    ("workers", "release", "worker_ids"): ["workers", "release", "{worker}"],
    ("recoveries", "list", "--task"): ["recoveries", "list", "--task", "{task}"],
    ("recoveries", "list", "--worker"): ["recoveries", "list", "--worker", "{worker}"],
    ("explain", "task_id"): ["explain", "{task}"],
    ("tasks", "list", "--batch"): ["tasks", "list", "--batch", "{batch}"],
    ("dead", "list", "--workflow"): ["dead", "list", "--workflow", "{workflow}"],
    ("dead", "list", "--parent"): ["dead", "list", "--parent", "{task}"],
    ("dead", "list", "--batch"): ["dead", "list", "--batch", "{batch}"],
    ("dead", "list", "--worker"): ["dead", "list", "--worker", "{worker}"],
    ("dead", "list", "--before"): ["dead", "list", "--before", "{task}"],
    ("dead", "redrive", "task_ids"): ["dead", "redrive", "{failed}"],
    ("inbox", "list", "--after"): ["inbox", "list", "--after", "{task}"],
    ("inbox", "answer", "task_id"): ["inbox", "answer", "{task}", "yes"],
    ("batches", "list", "--before"): ["batches", "list", "--before", "{batch}"],
    ("batches", "show", "batch_id"): ["batches", "show", "{batch}"],
    ("batches", "seal", "batch_ids"): ["batches", "seal", "{batch}"],
    ("batches", "cancel", "batch_ids"): ["batches", "cancel", "{batch}"],
    ("bulk", "show", "action_id"): ["bulk", "show", "{action}"],
    ("bulk", "cancel", "action_id"): ["bulk", "cancel", "{action}"],
}
PLACES |= {("tasks", verb, "ids"): ["tasks", verb, *words] for verb, words in ACTING.items()}
PLACES |= {
    ("tasks", verb, f"--{name}"): [
        "tasks",
        verb,
        "--all",
        "--dry-run",
        f"--{name}",
        f"{{{value}}}",
        *words[1:],
    ]
    for verb, words in ACTING.items()
    for name, value in (
        ("workflow", "workflow"),
        ("parent", "task"),
        ("batch", "batch"),
        ("worker", "worker"),
    )
}
"""Where a command takes an id, and how it is given there."""
SHARED = {
    place for place in PLACES if place[-1].startswith("--") and place[:2] in {*(("tasks", verb) for verb in ACTING), ("dead", "list")}
} - {("dead", "list", "--before")}  # fmt: skip
"""The options that commands share with `tasks list`, which reads them for all."""


def places(path: tuple[str, ...], command: Any) -> Iterator[tuple[str, ...]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from places((*path, name), each)
    for parameter in command.params:
        if {"ID", "WORKER", "SUPERVISOR"} & {(parameter.metavar or "").strip("[].")}:
            yield *path, parameter.opts[0]


def test_the_id_prefix_tests_cover_every_command_that_takes_an_id() -> None:  # J10
    found = {place for name in COMMANDS for place in places((name,), load_command(name))}
    assert found == set(PLACES)


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        tree(made, SUPERVISOR, WORKER, FELLOW)
        yield made
        made.database.close()


def renamed(db: StoreHarness, table: str, old: UUID, begin: str) -> UUID:
    """Give the row an id with this prefix and return it."""
    new = UUID(begin + old.hex[len(begin) :])
    columns = {
        "tasks": [("tasks", "id")],
        "workflows": [("workflows", "id"), ("nodes", "workflow_id"), ("tasks", "workflow_id")],
        "batches": [("batches", "id")],
        "bulk_actions": [("bulk_actions", "id")],
    }
    db.connection.execute("set session_replication_role = replica")
    for each, column in columns[table]:
        db.connection.execute(
            db.plain(f"update {{schema}}.{each} set {column} = '{new}' where {column} = '{old}'")
        )
    db.connection.execute("reset session_replication_role")
    return new


def test_every_command_accepts_a_prefix_of_an_id(
    app: App, db: StoreHarness, everbeat: Command
) -> None:  # J10
    for place, words in PLACES.items():
        if place in SHARED and place[1] != "cancel":
            continue
        failed = db.running(WORKER)
        assert db.settle(failed, "FAILED", error=b'{"code": "BROKEN"}') == "FAILED"
        first, second = sent(app, db, [task("a")])[0], sent(app, db, [task("a")])[0]
        second.pause()
        given = {
            "task": renamed(db, "tasks", db.send("unknown"), BEGIN),
            "failed": renamed(db, "tasks", failed.id, OTHER),
            "workflow": renamed(db, "workflows", first.id, "bbbb1111"),
            "paused": renamed(db, "workflows", second.id, "bbbb2222"),
            "batch": renamed(db, "batches", app.batch("import").open().id, "cccc1111"),
            "action": renamed(db, "bulk_actions", app.retry_all(everything=True).id, "dddd1111"),
        }
        texts = {name: f"{str(each)[:8]}-{each.hex[8]}" for name, each in given.items()}
        texts |= {"worker": f"{HOST}-101", "supervisor": SUPERVISOR[:-2]}
        answer = everbeat(*(word.format(**texts) for word in words), "--json")
        whole = [str(given[name]) for name in given if any(f"{{{name}}}" == word for word in words)]
        assert answer.code in (0, ExitCode.FAILED), (place, answer)
        assert "does not exist" not in answer.err, (place, answer)
        said = answer.out + answer.err
        assert all(each in said for each in whole) or place[-1].startswith("--"), (place, answer)
        db.connection.execute(
            db.plain(
                "truncate {schema}.tasks, {schema}.workflows, {schema}.nodes, {schema}.attempts, {schema}.batches,"
                " {schema}.bulk_actions cascade"
            )
        )
        db.connection.execute(db.plain("update {schema}.workers set ended_at = null, ended_how = null"))


def test_an_id_of_other_characters_is_refused_by_each_command(
    app: App, db: StoreHarness, everbeat: Command
) -> None:
    names = ("task", "failed", "workflow", "paused", "batch", "action")
    given = dict.fromkeys(names, "no id") | {"worker": WORKER, "supervisor": SUPERVISOR}
    for place, words in PLACES.items():
        if not any(f"{{{name}}}" in words for name in names):
            continue
        if place[0] == "tasks" and place[1] in ACTING:  # these commands print an error for each id
            continue
        answer = everbeat(*(word.format(**given) for word in words))
        assert answer.code == ExitCode.USAGE, (place, answer)
        assert answer.err.startswith("error: "), (place, answer)
        assert "'no id'" in answer.err, (place, answer)


@pytest.mark.long
def test_an_id_prefix_is_accepted_in_capitals_and_without_hyphens(
    app: App, db: StoreHarness, everbeat: Command
) -> None:
    found = renamed(db, "tasks", db.send("unknown"), BEGIN)
    for given in (str(found)[:13].upper(), found.hex[:12], found.hex[:4]):
        assert everbeat("tasks", "show", given, "--json").assert_code(0).document["id"] == str(found)


def test_an_ambiguous_id_prefix_is_refused_with_five_candidates(
    app: App, db: StoreHarness, everbeat: Command
) -> None:  # J10
    ids = [renamed(db, "tasks", db.send("unknown"), f"{BEGIN}{number}") for number in range(7)]
    answer = everbeat("tasks", "cancel", BEGIN, str(ids[0])).assert_code(ExitCode.USAGE)
    assert answer.err.count("task unknown PENDING") == 5
    assert (
        f"error: Several ids begin with '{BEGIN}', among them:\n    {ids[-1]}  task unknown PENDING"
        in answer.err
    )
    assert answer.out == f"{ids[0]}  CANCELLED  cancelled\n"
    error = everbeat("tasks", "show", BEGIN, "--json").assert_code(ExitCode.USAGE).error
    assert error["code"] == "AMBIGUOUS_ID"
    assert app.info(ids[1]).state == "PENDING"


def test_an_ambiguous_id_prefix_names_both_tasks_and_workflows(
    app: App, db: StoreHarness, everbeat: Command
) -> None:
    one = renamed(db, "tasks", db.send("unknown"), BEGIN)
    other = renamed(db, "workflows", sent(app, db, [task("a")])[0].id, BEGIN)
    answer = everbeat("explain", BEGIN).assert_code(ExitCode.USAGE)
    assert f"{one}  task unknown PENDING" in answer.err
    assert f"{other}  workflow order RUNNING" in answer.err
    everbeat("tasks", "show", BEGIN).assert_code(0)
    everbeat("workflows", "show", BEGIN).assert_code(0)


def test_a_worker_id_prefix_that_ends_at_a_hyphen_takes_precedence(
    db: StoreHarness, everbeat: Command
) -> None:
    answer = everbeat("workers", "release", f"{HOST}-10", "--json").assert_code(ExitCode.USAGE)
    assert answer.error["code"] == "AMBIGUOUS_ID"
    assert WORKER in answer.err
    assert FELLOW in answer.err
    assert SUPERVISOR not in answer.err
    result = everbeat("workers", "release", f"{HOST}-101", "--json").assert_code(0).document
    assert result["worker_ids"] == [WORKER]


def test_an_unknown_id_prefix_is_not_found(app: App, db: StoreHarness, everbeat: Command) -> None:
    assert "Task ffff0000 does not exist" in everbeat("tasks", "show", "ffff0000").assert_code(4).err
    assert "Workflow ffff0000 does not exist" in everbeat("workflows", "show", "ffff0000").assert_code(4).err
    for wrong in ("fff", "first-task"):
        assert "first 4 of its digits" in everbeat("tasks", "show", wrong).assert_code(ExitCode.USAGE).err


def test_the_shortest_id_prefix_is_unique_and_ends_with_a_digit() -> None:
    one = UUID("01a2019e-b0b5-7d53-b2ca-293470d8e590")
    expected = {
        "01a2019e-b0b4-7d53-b2ca-293470d8e590": "01a2019e-b0b5",
        "01a2019e-b0b5-8d53-b2ca-293470d8e590": "01a2019e-b0b5-7",
        "01a2019e-b0b5-7d53-b2ca-293470d8e591": str(one),
        "01a2019e-b0b5-7d53-b2ca-a93470d8e591": "01a2019e-b0b5-7d53-b2ca-2",
        "01a2019e-b0b5-7d53-92ca-a93470d8e591": "01a2019e-b0b5-7d53-b",
    }
    for other, prefix in expected.items():
        assert shortest_prefix(one, [UUID(other)]) == prefix
        found = bounds(prefix)
        assert found is not None
        assert found[0] <= one <= found[1]
        assert not found[0] <= UUID(other) <= found[1]
    assert shortest_prefix(one, [one]) == "01a2019e-b0b5"
