"""A task that no live worker can run with its arguments, as the commands show it to people and to programs."""

from __future__ import annotations

from uuid import UUID

from everbeat import App
from tests.cli.conftest import Command
from tests.client.conftest import app, hands
from tests.client.test_explaining import join
from tests.client.test_explaining_needs import OLD, marked, only, registers
from tests.store.conftest import Hands

__all__ = ["app", "hands"]


def stuck(app: App, hands: Hands) -> UUID:
    """A task with an argument that the only live worker does not take."""
    only(app, hands, v1=registers(OLD))
    return marked(hands, "locale", "user_id")


def test_the_page_and_the_document_of_a_task_say_what_it_needs(
    everbeat: Command, app: App, hands: Hands
) -> None:  # J2
    task, plain = stuck(app, hands), hands.send("other")
    page = everbeat("tasks", "show", str(task)).assert_code(0).out
    assert "code that takes the arguments locale, user_id" in page
    assert "does not take 'locale'" in " ".join(page.split())
    document = everbeat("tasks", "show", str(task), "--json").assert_code(0).document
    assert document["needs"] == {"arguments": ["locale", "user_id"], "other": []}
    assert "NEEDS_OTHER_CODE" in everbeat("explain", str(task)).assert_code(0).out
    assert "needs" not in everbeat("tasks", "show", str(plain)).assert_code(0).out
    assert everbeat("tasks", "show", str(plain), "--json").document["needs"] is None


def test_doctor_counts_such_tasks_and_warns(everbeat: Command, app: App, hands: Hands) -> None:  # J2
    stuck(app, hands)
    page = everbeat("doctor").assert_code(0)
    assert "WARN NEEDS" in page.out
    assert "work (1 in queue default): 1 live worker does not take 'locale'" in " ".join(page.out.split())
    assert "try: deploy the version that takes 'locale'" in " ".join(page.out.split())
    join(hands, "v2", metadata=registers({"takes": ["locale", "user_id"], "requires": []}))
    assert "OK   NEEDS" in everbeat("doctor").assert_code(0).out


def test_the_list_of_workers_stays_readable_and_its_document_has_the_parameters(
    everbeat: Command, app: App, hands: Hands
) -> None:  # J2
    stuck(app, hands)
    assert "parameters" not in everbeat("workers").assert_code(0).out
    (worker,) = everbeat("workers", "--json").assert_code(0).document["workers"]
    assert worker["metadata"]["parameters"] == {"work": OLD}
