"""Each command and each method that changes something writes its row of the audit log, and a new one cannot be forgotten."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from inspect import getsource
from io import StringIO
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest
import typer

from everbeat import App, WorkflowHandle
from everbeat.cli.main import COMMANDS, application, load_command
from everbeat.client.batches import Batch
from everbeat.client.bulk_methods import BulkAction
from everbeat.client.handle import Handle
from everbeat.errors import ConfigurationError
from everbeat.store.target import Target
from tests.cli.audit_cases import CASES, Act, World, prune
from tests.migrated import MigratedSchemas

READING = {
    "metrics", "top", "web",
    "audit", "batches list", "batches show", "bulk list", "bulk show", "check", "dead list", "doctor", "explain", "failures", "inbox list",
    "limits list", "limits show", "logs", "queues list", "recoveries list", "recoveries show", "schedules list", "schedules next", "schedules show",
    "schedules ticks", "tasks list", "tasks pauses", "tasks show", "tasks stream", "workers list", "workflows list", "workflows show",
}  # fmt: skip
"""The commands that only read."""
NOT_NOTED = {
    "bench": "it works in a schema of its own",
    "db keep": "it acts on a server", "db psql": "psql notes nothing", "db start": "it acts on a server", "db status": "it reads",
    "db stop": "it acts on a server", "db url": "it reads",
    "demo": "it works in a schema of its own",
    "migrate": "the table might not exist yet, and the versions are noted in the schema",
    "send": "the new task is the record",
    "worker": "its rows in workers and supervisors are the record",
    "workflows reconcile": "it does what each supervisor does by itself",
}  # fmt: skip
"""The commands that change something that the audit log does not contain, each with the reason."""
NOT_NOTED_METHODS: dict[type[Any], set[str]] = {
    App: {
        "acting_as", "around_run", "around_send", "batch", "close", "define_workflow", "handle", "migrate", "on_failure", "on_interrupted",
        "on_recovered", "on_recovery", "open_batch", "patience", "recover_stuck_workflows", "resource", "resources", "run_worker", "schedule",
        "send_by_name", "send_many", "stop_worker", "task", "workflow", "workflow_handle",
    },
    Handle: set(), WorkflowHandle: set(), Batch: {"open", "send", "send_many", "wait_end"}, BulkAction: set(),
}  # fmt: skip
"""The methods that declare or send something, or that only affect this process."""
READING_METHODS: dict[type[Any], set[str]] = {
    App: {
        "audit_log", "bulk_action", "bulk_actions", "dead", "explain", "explain_schedule", "failures", "find", "heartbeats", "inbox", "info",
        "limit_info", "limits", "list_active_workers", "list_batches", "list_pauses", "list_schedules", "list_supervisors", "list_tasks",
        "list_ticks", "list_workers", "list_workflows", "metrics_text", "next_ticks", "outcomes", "queues", "recoveries", "results", "schedule_info",
        "schema_status", "worker_states",
    },
    Handle: {"info", "logs", "outcome", "result", "stream", "streams"},
    WorkflowHandle: {"explain", "info", "nodes", "outcome", "result", "result_of", "status"},
    Batch: {"status"}, BulkAction: {"outcome", "refresh"},
}  # fmt: skip
CHANGING_METHODS: dict[type[Any], set[str]] = {
    App: {
        "answer", "backfill", "cancel", "cancel_all", "clear_limit", "delete", "delete_all", "delete_schedule", "move", "move_all",
        "pause_all", "pause_queue", "pause_schedule", "pause_task", "put_schedule", "quiet_workers", "release_workers", "reprioritise",
        "reprioritise_all", "resume_all", "resume_queue", "resume_schedule", "resume_task", "resume_workers", "retry", "retry_all",
        "run_all_now", "run_now", "run_schedule", "set_limit", "signal", "sweep_stale_workers",
    },
    Handle: {"answer", "cancel", "retry"}, WorkflowHandle: {"cancel", "pause", "resume", "retry"}, Batch: {"cancel", "seal"},
    BulkAction: {"cancel"},
}  # fmt: skip
"""The methods that leave a row. Each is called by a case."""


@pytest.fixture(scope="module")
def world(database_url: str, migrated_schemas: MigratedSchemas) -> Iterator[World]:
    schema = migrated_schemas.take()
    made = World(Target.parse(database_url, schema=schema))
    yield made
    made.close()
    migrated_schemas.give_back(schema, is_reusable=True)


def run(w: World, *words: object) -> None:
    """Run a command in this process, as ann."""
    own = {
        "EVERBEAT_DATABASE_URL": w.db.target.url, "EVERBEAT_SCHEMA": w.db.target.schema, "EVERBEAT_ACTOR": "ann",
    }  # fmt: skip
    shown = StringIO()
    with patch.dict(os.environ, own), redirect_stdout(shown), redirect_stderr(shown):
        command = typer.main.get_command(application)
        code = command.main(args=[*map(str, words)], prog_name="everbeat", standalone_mode=False)
    assert code in (0, None), shown.getvalue()


def assert_noted(w: World, act: Act, do: Callable[[], object], *, origin: str) -> None:
    before = w.app.audit_log(limit=1)
    do()
    found = [each for each in w.app.audit_log(limit=5) if not before or each.id > before[0].id]
    (row,) = [each for each in found if each.action == act.action][:1] or [None]
    assert row is not None, f"{act.action} left no row, but {[each.action for each in found]}"
    assert (row.actor, row.origin, row.outcome) == ("ann", origin, act.outcome)
    if act.target is not None:
        assert row.target == str(act.target)
    if act.outcome == "done" or act.affected is not None:
        assert row.affected == act.affected
    assert (act.note or "") in (row.note or "")
    assert row in w.app.audit_log(action=act.action, limit=5)
    if act.action.endswith("_all"):
        assert row.filters is not None
        assert str(row.filters["name"]).startswith("many-")
        assert row.target is not None
        assert UUID(row.target) in {each.id for each in w.app.bulk_actions()}
    assert len(found) <= 2, found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_by_a_command_and_by_a_method_leaves_its_row(
    case: Callable[[World], Act], world: World
) -> None:
    act = case(world)
    if act.command:
        assert_noted(world, act, lambda: run(world, *act.command), origin="cli")
    if case is prune:
        return  # only a command prunes
    act = case(world)
    with world.app.acting_as("ann"):
        assert_noted(world, act, act.call, origin="python")


def test_an_unknown_action_is_refused_with_the_nearest_one(world: World) -> None:
    with pytest.raises(ConfigurationError, match="'retry_al'") as refusal:
        world.app.audit_log(action="retry_al")
    assert "retry_all" in str(refusal.value)


def test_an_answer_is_noted_under_the_given_name(world: World) -> None:
    task = world.asking().id
    run(world, "inbox", "answer", task, "yes", "--by", "ben")
    (entry, *_) = world.app.audit_log(action="answer", limit=1)
    assert (entry.actor, entry.target) == ("ben", str(task))


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    below = getattr(command, "commands", {})
    if not below:
        yield " ".join(path)
    for name, each in below.items():
        yield from leaves(each, (*path, name))


def test_each_command_either_reads_or_leaves_a_row_or_has_a_reason_why_not(world: World) -> None:
    commands = {path for name in COMMANDS for path in leaves(load_command(name), (name,))}
    noted = {" ".join(str(word) for word in case(world).command) for case in CASES}
    for command in sorted(commands - READING - {*NOT_NOTED}):
        assert any(f"{each} ".startswith(f"{command} ") for each in noted), (
            f"{command} has no case in this file"
        )
    assert (READING | {*NOT_NOTED}) <= commands


@pytest.mark.parametrize("owner", [App, Handle, WorkflowHandle, Batch, BulkAction])
def test_each_method_either_reads_or_leaves_a_row_or_declares_something(owner: type[Any]) -> None:
    public = {name for name in dir(owner) if not name.startswith("_") and callable(getattr(owner, name))}
    methods = {name for name in public if not (name.startswith("a") and name[1:] in public)}
    changing = CHANGING_METHODS[owner]
    assert methods == READING_METHODS[owner] | NOT_NOTED_METHODS[owner] | changing
    called = "".join(getsource(case) for case in CASES) + "".join(f".{case.__name__} " for case in CASES)
    assert {name for name in changing if not re.search(rf"\.{name}\b", called)} == set()
