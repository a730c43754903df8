"""Test the commands that act on single tasks and on all that match, and the audit log that they write."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from everbeat import App
from tests.cli.conftest import Command
from tests.maintenance.acting import Carrier, app_of, store
from tests.store.conftest import StoreHarness, db

__all__ = ["db"]


@pytest.fixture
def app(db: StoreHarness) -> Iterator[App]:
    own = app_of(db)
    yield own
    own.close()


def entries(everbeat: Command, *options: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = everbeat("audit", "--json", *options).assert_code(0).document["entries"]
    return found


def test_all_matching_tasks_are_counted_retried_and_shown(everbeat: Command, db: StoreHarness) -> None:
    store(db, 30)
    counted = everbeat("tasks", "retry", "--all", "--name", "work", "--dry-run").assert_code(0)
    assert counted.out == "retry  would change 30 tasks\n"
    everbeat("tasks", "retry", "--all", "--name", "work").assert_code(2)
    everbeat("tasks", "retry", "--all", "--yes").assert_code(2)
    everbeat("tasks", "retry").assert_code(2)
    everbeat("tasks", "retry", "1234", "--all").assert_code(2)
    requested = (
        everbeat(
            "tasks", "retry", "--all", "--name", "work", "--yes", "--as", "ann", "--reason", "fixed", "--json"
        )
        .assert_code(0)
        .document
    )
    joined = everbeat("tasks", "retry", "--all", "--name", "work", "--yes").assert_code(0)
    assert joined.out.startswith(requested["id"])
    assert "joined" in joined.out
    assert requested["id"] in everbeat("bulk", "show", requested["id"][:13]).assert_code(0).out
    db.connection.execute(db.plain("update {schema}.supervisors set ended_at = now()"))
    assert "No supervisor is alive" in everbeat("bulk", "show", requested["id"]).err
    db.connection.execute(db.plain("update {schema}.supervisors set ended_at = null"))
    Carrier(db).run()
    assert "done            30 tasks" in everbeat("bulk", "show", requested["id"]).assert_code(0).out
    assert [each["done"] for each in everbeat("bulk", "--json").document["bulk_actions"]] == [30]
    noted = entries(everbeat, "--actor", "ann")
    assert [(each["action"], each["origin"], each["outcome"], each["note"]) for each in noted] == [
        ("retry_all", "cli", "completed", None),
        ("retry_all", "cli", "requested", "fixed"),
    ]
    assert "retry_all" in everbeat("audit", "--since", "1h").assert_code(0).out


def test_the_filters_of_an_action_are_shown_as_options(everbeat: Command, db: StoreHarness, app: App) -> None:
    labels = {"tenant": "4 2", "team": None}
    action = app.retry_all(state="FAILED", name="work", labels=labels, arguments_contain="it's")
    options = (
        """--state failed --label 'tenant=4 2' --label team --arguments-contain 'it'"'"'s' --name work"""
    )
    assert sorted(action.info.filters) == ["arguments_contain", "label_keys", "labels", "name", "states"]
    shown = everbeat("bulk", "show", str(action.id)).assert_code(0).out.splitlines()[3]
    assert shown == f"filters    {options}"
    assert options in everbeat("bulk").assert_code(0).out
    assert options in everbeat("audit").assert_code(0).out
    mixed = app.retry_all(state=["retrying", "FAILED"])
    assert "--state failed --state retrying\n" in everbeat("bulk", "show", str(mixed.id)).assert_code(0).out
    all_of_them = app.retry_all(everything=True)
    assert "--everything\n" in everbeat("bulk", "show", str(all_of_them.id)).assert_code(0).out


def test_an_action_without_a_filter_is_refused_in_the_words_of_a_shell(everbeat: Command) -> None:
    refused = everbeat("tasks", "retry", "--all", "--dry-run").assert_code(2)
    assert "needs --everything" in refused.err
    assert "everything=True" not in refused.err


def test_each_change_of_a_single_task_has_its_row_in_the_audit_log(
    everbeat: Command, db: StoreHarness
) -> None:
    later, ended = str(db.send(delay_ms=3_600_000)), str(db.send())
    everbeat("tasks", "move", later, "--to", "big").assert_code(0)
    everbeat("tasks", "reprioritise", later, "--to", "5").assert_code(0)
    assert "is due now" in everbeat("tasks", "run-now", later, EVERBEAT_ACTOR="ben").assert_code(0).out
    refused = everbeat("tasks", "run-now", later, "--json").assert_code(1)
    assert refused.document["tasks"][0]["error"]["code"] == "ACTION_REFUSED"
    everbeat("tasks", "cancel", ended).assert_code(0)
    everbeat("tasks", "retry", ended).assert_code(0)
    everbeat("tasks", "delete", ended).assert_code(1)
    me = f"{getpass.getuser()}@{socket.gethostname()}"
    assert [(each["action"], each["target"], each["actor"]) for each in entries(everbeat)] == [
        ("retry", ended, me),
        ("cancel", ended, me),
        ("run_now", later, "ben"),
        ("reprioritise", later, me),
        ("move", later, me),
    ]


def test_pauses_limits_schedules_and_workers_are_noted(everbeat: Command, db: StoreHarness) -> None:
    db.send()
    everbeat("queues", "pause", "default", "--reason", "the bank is down").assert_code(0)
    everbeat("queues", "pause", "default").assert_code(0)
    everbeat("queues", "resume", "default").assert_code(0)
    everbeat("pause", "--all").assert_code(0)
    everbeat("resume", "--all").assert_code(0)
    everbeat("workers", "quiet", "--all").assert_code(0)
    everbeat("workers", "release", "w1").assert_code(0)
    found = [(each["action"], each["target"], each["note"]) for each in entries(everbeat)]
    assert found == [
        ("bury_workers", "w1", None),
        ("quiet_workers", "everyone", None),
        ("resume", "everything", None),
        ("pause", "everything", None),
        ("resume", "queue default", None),
        ("pause", "queue default", "the bank is down"),
    ]


def test_an_action_and_its_note_are_stored_together_or_not_at_all(
    everbeat: Command, db: StoreHarness
) -> None:
    task_id = str(db.send(delay_ms=3_600_000))
    db.connection.execute(
        db.plain("alter table {schema}.audit_log add constraint never check (affected is null)")
    )
    everbeat("tasks", "cancel", task_id)
    everbeat("tasks", "run-now", task_id)
    assert db.row(task_id, "state, enqueued_at > now()") == ("PENDING", True)  # type: ignore[arg-type]


def test_a_bulk_action_is_cancelled(everbeat: Command, db: StoreHarness, app: App) -> None:
    store(db, 30)
    action = app.retry_all(name="work")
    Carrier(db, portion=10).run(portions=1)
    everbeat("bulk", "cancel", str(action.id), "--as", "ann").assert_code(0)
    Carrier(db, portion=10).run()
    assert action.refresh().done == 10
    assert "had already ended" in everbeat("bulk", "cancel", str(action.id)).out
    everbeat("bulk", "show", "01234567-0123-4567-8901-012345678901").assert_code(4)


def test_the_doctor_reports_actions_that_make_no_progress_or_failed(
    everbeat: Command, db: StoreHarness, app: App
) -> None:
    def check() -> dict[str, Any]:
        checks = everbeat("doctor", "--json").document["checks"]
        (found,) = [each for each in checks if each["code"] == "BULK_ACTIONS"]
        return dict(found)

    action = app.retry_all(name="work")
    assert check()["verdict"] == "OK"
    db.connection.execute(
        db.plain(
            "update {schema}.bulk_actions set next_at = now() - interval '2 minutes', changed_at = next_at - interval '2 minutes'"
        )
    )
    assert check()["verdict"] == "FAIL"
    assert str(action.id) in check()["text"]
    db.connection.execute(
        db.plain("update {schema}.bulk_actions set state = 'FAILED', ended_at = now(), problem = 'it broke'")
    )
    assert check()["verdict"] == "WARN"
    assert "it broke" in check()["text"]
    db.connection.execute(db.plain("delete from {schema}.bulk_actions"))  # its end is not in the audit log
