"""Test how commands show a task that no live worker can run with its arguments, as text and as JSON."""

from __future__ import annotations

from uuid import UUID

from everbeat import App
from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.client.test_explaining import join
from tests.client.test_explaining_needs import OLD, marked, registers, replace_workers
from tests.store.conftest import StoreHarness

__all__ = ["app", "db"]


def stuck(app: App, db: StoreHarness) -> UUID:
    """Return a task with an argument that the only live worker does not take."""
    replace_workers(app, db, v1=registers(OLD))
    return marked(db, "locale", "user_id")


def test_tasks_show_names_the_arguments_that_a_task_needs(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J2
    task, plain = stuck(app, db), db.send("other")
    page = everbeat("tasks", "show", str(task)).assert_code(0).out
    assert "code that takes the arguments locale, user_id" in page
    assert "does not take 'locale'" in " ".join(page.split())
    document = everbeat("tasks", "show", str(task), "--json").assert_code(0).document
    assert document["needs"] == {"arguments": ["locale", "user_id"], "other": []}
    assert "NEEDS_OTHER_CODE" in everbeat("explain", str(task)).assert_code(0).out
    assert "needs" not in everbeat("tasks", "show", str(plain)).assert_code(0).out
    assert everbeat("tasks", "show", str(plain), "--json").document["needs"] is None


def test_doctor_warns_about_tasks_that_need_other_code(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J2
    stuck(app, db)
    page = everbeat("doctor").assert_code(0)
    assert "WARN NEEDS" in page.out
    assert "work (1 in queue default): 1 live worker does not take 'locale'" in " ".join(page.out.split())
    assert "try: deploy the version that takes 'locale'" in " ".join(page.out.split())
    join(db, "v2", metadata=registers({"takes": ["locale", "user_id"], "requires": []}))
    assert "OK   NEEDS" in everbeat("doctor").assert_code(0).out


def test_only_the_json_of_workers_has_the_parameters_of_their_tasks(
    everbeat: Command, app: App, db: StoreHarness
) -> None:  # J2
    stuck(app, db)
    assert "parameters" not in everbeat("workers").assert_code(0).out
    (worker,) = everbeat("workers", "--json").assert_code(0).document["workers"]
    assert worker["metadata"]["parameters"] == {"work": OLD}
