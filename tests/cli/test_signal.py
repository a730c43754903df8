"""Test `everbeat tasks signal` and its errors."""

from __future__ import annotations

from uuid import uuid4

import pytest

from everbeat.cli.failures import ExitCode
from tests.cli.conftest import Command

pytestmark = [pytest.mark.story, pytest.mark.usefixtures("migrated")]


def test_tasks_signal_stores_a_signal(everbeat: Command) -> None:
    task_id = (
        everbeat("send", "shop:app", "welcome", "user_id=42", "--delay", "1h").assert_code(0).out.strip()
    )
    stored = everbeat("tasks", "signal", task_id, "approved", '{"by": "ann"}').assert_code(0)
    assert stored.out == f"{task_id}  approved  stored\n"
    bare = everbeat("tasks", "signal", task_id, "approved", "--json").assert_code(0).document
    assert bare == {"id": task_id, "name": "approved", "value": None}


def test_tasks_signal_refuses_invalid_values_and_unknown_tasks(everbeat: Command) -> None:
    task_id = (
        everbeat("send", "shop:app", "welcome", "user_id=42", "--delay", "1h").assert_code(0).out.strip()
    )
    no_json = everbeat("tasks", "signal", task_id, "approved", "yes").assert_code(ExitCode.USAGE)
    assert "'yes' is not JSON" in " ".join(no_json.err.split())
    unknown = everbeat("tasks", "signal", str(uuid4()), "approved").assert_code(ExitCode.NOT_FOUND)
    assert "does not exist" in unknown.err
    wrong_name = everbeat("tasks", "signal", task_id, "a#2").assert_code(ExitCode.USAGE)
    assert "The name 'a#2' of a signal" in wrong_name.err
    everbeat("tasks", "cancel", task_id).assert_code(0)
    ended = everbeat("tasks", "signal", task_id, "approved").assert_code(ExitCode.FAILED)
    assert f"task {task_id} is CANCELLED" in " ".join(ended.err.split())


def test_tasks_list_filters_by_parent(everbeat: Command) -> None:
    task_id = (
        everbeat("send", "shop:app", "welcome", "user_id=42", "--delay", "1h").assert_code(0).out.strip()
    )
    assert everbeat("tasks", "list", "--parent", task_id, "--json").assert_code(0).document["tasks"] == []
