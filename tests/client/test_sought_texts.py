"""Test that names and filters that PostgreSQL cannot take are refused with a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from everbeat import App
from everbeat.errors import ConfigurationError

CALLS: dict[str, Callable[[App, Any], object]] = {
    "set_limit.name": lambda app, text: app.set_limit(text, concurrency=1),
    "clear_limit.name": lambda app, text: app.clear_limit(text),
    "limit_info.name": lambda app, text: app.limit_info(text),
    "list_schedules.prefix": lambda app, text: app.list_schedules(prefix=text),
    "list_schedules.task": lambda app, text: app.list_schedules(task=text),
    "list_schedules.owner": lambda app, text: app.list_schedules(owner=text),
    "list_schedules.after": lambda app, text: app.list_schedules(after=text),
    "schedule_info.name": lambda app, text: app.schedule_info(text),
    "name": lambda app, text: app.list_tasks(name=text),
    "queue": lambda app, text: app.list_tasks(queue=text),
    "key": lambda app, text: app.list_tasks(key=text),
    "error": lambda app, text: app.list_tasks(error=text),
    "worker": lambda app, text: app.list_tasks(worker=text),
    "worker of recoveries": lambda app, text: app.recoveries(worker=text),
    "worker_id": lambda app, text: app.worker_states(text),
    "list_workflows.name": lambda app, text: app.list_workflows(name=text),
    "list_workflows.key": lambda app, text: app.list_workflows(key=text),
    "node": lambda app, text: app.workflow_handle(uuid4()).result_of(text),
    "find.key": lambda app, text: app.find("work", key=text),
    "release_workers.worker_ids[0]": lambda app, text: app.release_workers([text]),
    "quiet_workers.ids[0]": lambda app, text: app.quiet_workers([text]),
    "quiet_workers.host": lambda app, text: app.quiet_workers(host=text),
    "resume_task.name": lambda app, text: app.resume_task(text),
    "resume_queue.name": lambda app, text: app.resume_queue(text),
}


@pytest.mark.parametrize("subject", CALLS)
def test_a_text_that_postgresql_cannot_take_is_refused(app: App, subject: str) -> None:
    for wrong in ("\ud800", "a\x00b", 1):
        with pytest.raises(ConfigurationError) as error:
            CALLS[subject](app, wrong)
        (problem,) = error.value.problems
        assert problem.subject == subject.partition(" of ")[0]
        assert problem.fix
