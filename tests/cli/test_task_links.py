"""`App(dashboard_url=...)` links the JSON log lines of a task to its page in the dashboard."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from everbeat import App
from everbeat.cli.logs import JsonFormatter
from everbeat.errors import ConfigurationError
from everbeat.logging import task_url
from everbeat.runtime import task_links

TASK = "019a2f3e-0000-7000-8000-000000000000"


@pytest.fixture(autouse=True)
def unlinked() -> Iterator[None]:
    kept = [*task_links._dashboard]
    task_links._dashboard.clear()
    yield
    task_links._dashboard[:] = kept


def logged(**fields: object) -> dict[str, object]:
    record = logging.makeLogRecord({"name": "orders", "msg": "packing", **fields})
    found: dict[str, object] = json.loads(JsonFormatter().format(record))
    return found


def test_a_line_with_a_task_has_the_address_of_its_page() -> None:
    assert logged(task_id=TASK)["fields"] == {"task_id": TASK}
    assert task_url(TASK) is None
    task_links.link_tasks("https://ops.example.com/everbeat")
    task_links.link_tasks(None)
    url = f"https://ops.example.com/everbeat/tasks/{TASK}"
    assert logged(task_id=TASK)["fields"] == {"task_id": TASK, "task_url": url}
    assert task_url(TASK) == url
    assert "fields" not in logged()


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert App("postgresql://x").dashboard_url is None
    monkeypatch.setenv("EVERBEAT_DASHBOARD_URL", "http://127.0.0.1:8080/")
    assert App("postgresql://x").dashboard_url == "http://127.0.0.1:8080"
    assert App("postgresql://x", dashboard_url="https://a.example/x/").dashboard_url == "https://a.example/x"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (7, "not of type int"),
        ("ops.example.com", "http://"),
        ("ftp://ops.example.com", "http://"),
        ("https:///tasks", "contains a host"),
        ("https://[ops", "must be a URL"),
        ("https://me:secret@ops.example.com", "password"),
        ("https://ops.example.com/?a=b", "query"),
        ("https://ops.example.com/#a", "fragment"),
        ("https://ops.example.com/a b", "without spaces"),
        ("https://ops.example.com/\n", "without spaces"),
        ("https://ops.example.com/" + "a" * 500, "at most 500"),
    ],
)
def test_a_wrong_address_is_refused(given: object, rule: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        App("postgresql://x", dashboard_url=given)  # type: ignore[arg-type]
    (problem,) = refused.value.problems
    assert problem.subject == "App.dashboard_url"
    assert rule in problem.rule


def test_a_wrong_address_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBEAT_DASHBOARD_URL", "nowhere")
    with pytest.raises(ConfigurationError, match="EVERBEAT_DASHBOARD_URL"):
        App("postgresql://x")


@pytest.mark.parametrize("given", ["../../logout", 5, "", ["x"], f"{TASK}\n", TASK.upper() + "?x"])
def test_only_the_id_of_a_task_becomes_a_link(given: object) -> None:
    task_links.link_tasks("https://ops.example.com/everbeat")
    assert "task_url" not in str(logged(task_id=given))
