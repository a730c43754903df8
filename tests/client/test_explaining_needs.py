"""Test tasks that live workers know by name but cannot run with these arguments, in explain and in doctor."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from everbeat import App
from everbeat.domain.doctor.findings import Check, CheckCode, CheckVerdict
from everbeat.domain.explain.reasons import Reason, ReasonCode
from everbeat.domain.task.needs import Needs
from everbeat.examination import Examination
from everbeat.store import workers
from tests.client.test_explaining import change, codes, end_workers, join, pause, the_reason
from tests.store.conftest import StoreHarness
from tests.store.flows import task as node
from tests.workflows.sent import sent

OLD = {"takes": ["user_id"], "requires": ["user_id"]}
NEW = {"takes": ["user_id", "locale"], "requires": ["user_id"]}


def registers(parameters: object, *, name: str = "work") -> str:
    """The metadata of a worker that knows one task function."""
    return msgspec.json.encode({"tasks": [name], "parameters": {name: parameters}}).decode()


def mark(db: StoreHarness, task: UUID, needs: object, *, needs_id: UUID | None = None) -> UUID:
    """Mark a task as `decline` does. Returns the group."""
    group = needs_id or uuid4()
    db.connection.execute(
        db.plain("update {schema}.tasks set needs = %s, needs_id = %s where id = %s"),
        [msgspec.json.encode(needs).decode(), group, task],
    )
    return group


def marked(db: StoreHarness, *arguments: str, needs_id: UUID | None = None, **options: Any) -> UUID:
    task = db.send(**options)
    mark(db, task, {"arguments": sorted(arguments)}, needs_id=needs_id)
    return task


def replace_workers(app: App, db: StoreHarness, **metadata: str) -> None:
    """Replace all workers by these, each with its metadata."""
    end_workers(db, "w1", "w2")
    for name, text in metadata.items():
        join(db, name, metadata=text)


def needs_reason(app: App, task: UUID) -> Reason:
    return the_reason(app, task, ReasonCode.NEEDS_OTHER_CODE)


def needs_check(app: App) -> Check:
    checks = {check.code: check for check in Examination(app, long_transaction_s=300.0).checks()}
    return checks[CheckCode.NEEDS]


class TestExplain:
    def test_a_task_names_the_argument_that_no_live_worker_takes(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(OLD))
        task = marked(db, "locale", "user_id")
        reason = needs_reason(app, task)
        assert codes(app, task) == ["NEEDS_OTHER_CODE"]
        assert reason.text == (
            "no live worker can run it with its arguments: 1 live worker (v1) does not take 'locale';"
            " deploy the version that takes 'locale', or cancel the task"
        )
        assert (reason.blocked_by, reason.command) == ("'locale'", None)
        info = app.info(task)
        assert info.needs == Needs(arguments=("locale", "user_id"))
        assert info.waiting_because == reason.text
        join(db, "v2", metadata=registers(NEW))
        assert codes(app, task) == ["IN_LINE"]
        turn = the_reason(app, task, ReasonCode.IN_LINE).text
        assert turn.endswith("its arguments fit only v2: 1 live worker (v1) does not take 'locale'")
        assert "1 live worker that can run it" in turn
        assert app.info(task).waiting_because is None

    def test_a_task_names_the_required_argument_that_it_lacks(self, app: App, db: StoreHarness) -> None:  # J2
        replace_workers(
            app,
            db,
            a=registers({"takes": ["user_id", "region"], "requires": ["user_id", "region"]}),
            b=registers(OLD),
        )
        task = marked(db, "locale")
        text = needs_reason(app, task).text
        assert (
            "1 live worker (a) does not take 'locale' and requires 'region', 'user_id', which is not among its arguments"
            in text
        )
        assert ", and 1 live worker (b) does not take 'locale' and requires 'user_id'" in text
        assert text.endswith(
            "deploy the version that takes 'locale' and does not require 'region', 'user_id', or cancel the task"
        )

    def test_only_workers_that_fit_the_task_count_for_slots_lag_and_silence(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(OLD), v2=registers(NEW))
        task = marked(db, "locale", "user_id")
        for worker, lag_ms in (("v1", 5_000.0), ("v2", 1.0)):
            state = workers.WorkerState(
                worker_id=worker, running=0, claimed=0, slots=0 if worker == "v2" else 9, rss_bytes=1, cpu_percent=0, loop_lag_ms=lag_ms
            )  # fmt: skip
            db.run(workers.record_states([state]))
        assert codes(app, task) == ["SLOTS_BUSY"]
        text = the_reason(app, task, ReasonCode.SLOTS_BUSY).text
        assert "slots of the 1 live worker that can run it: no slots for its kind" in text
        assert "its arguments fit only v2: 1 live worker (v1) does not take 'locale'" in text
        assert "lag" not in text
        assert "slots of the 2 live workers" not in text
        pause(db, "queue", "default")
        assert codes(app, task) == ["QUEUE_PAUSED"]
        db.connection.execute(db.plain("delete from {schema}.pauses"))
        db.supervisor("s2", "v3")
        change(db, "workers", f"metadata = '{registers(NEW)}', supervisor_id = 's2'", "id in ('v2', 'v3')")
        change(db, "supervisors", "quiet_since = statement_timestamp()", "id = 's2'")
        assert codes(app, task) == ["WORKERS_QUIET"]
        assert "made 2 live workers quiet" in the_reason(app, task, ReasonCode.WORKERS_QUIET).text
        change(db, "supervisors", "quiet_since = null")
        change(db, "supervisors", "quiet_since = statement_timestamp()", "id = 's1'")
        assert codes(app, task) == ["IN_LINE"], "the quiet worker could not run it anyway"

    def test_a_marked_task_is_counted_behind_unmarked_tasks_and_those_of_its_group(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v2=registers(NEW))
        db.send()
        first = marked(db, "locale", "user_id")
        (group,) = [db.row(first, "needs_id")]
        marked(db, "other")
        last = marked(db, "locale", "user_id", needs_id=group)
        assert "1 due task of its queue before it" in the_reason(app, first, ReasonCode.IN_LINE).text
        assert "2 due tasks of its queue before it" in the_reason(app, last, ReasonCode.IN_LINE).text

    def test_a_task_that_no_worker_has_read_is_judged_by_its_stored_arguments(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(OLD))
        task = db.send(delay_ms=3_600_000)
        change(db, "tasks", """args = '{"user_id": 1, "locale": "en"}'""")
        assert codes(app, task) == ["NEEDS_OTHER_CODE", "SCHEDULED"]
        assert app.info(task).needs is None
        join(db, "v2", metadata=registers(NEW))
        assert codes(app, task) == ["SCHEDULED"]
        change(db, "tasks", """args = '{"user_id": 1}'""")
        end_workers(db, "v2")
        assert codes(app, task) == ["SCHEDULED"]

    def test_a_worker_that_registered_no_parameters_is_assumed_to_fit(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(
            app,
            db,
            v1=registers(OLD),
            plain='{"tasks": ["work"]}',
            silent="{}",
            odd=registers({"takes": 7}),
        )
        task = marked(db, "locale", "user_id")
        assert codes(app, task) == ["IN_LINE"]
        assert "3 live workers that can run it" in the_reason(app, task, ReasonCode.IN_LINE).text

    def test_a_requirement_of_another_version_of_everbeat_is_named(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(NEW), plain='{"tasks": ["work"]}')
        task = db.send()
        mark(db, task, {"arguments": ["user_id"], "hardware": "gpu"})
        reason = needs_reason(app, task)
        assert reason.text == (
            "no live worker can run it with its arguments: it needs 'hardware', which this version of everbeat does not know;"
            " start workers with a newer version of everbeat, or cancel the task"
        )
        assert app.info(task).needs == Needs(arguments=("user_id",), other=("hardware",))

    @pytest.mark.parametrize("needs", [[], 7, None, {"arguments": 7}, {"arguments": [1]}, "x" * 1_000_000])
    def test_unreadable_needs_of_a_task_are_reported(
        self, app: App, db: StoreHarness, needs: object
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(NEW))
        task, sound = db.send(), marked(db, "locale", "user_id")
        mark(db, task, needs)
        assert "it needs '(unreadable)'" in needs_reason(app, task).text
        assert codes(app, sound) == ["IN_LINE"]
        assert "(unreadable)" in needs_check(app).text

    def test_a_serial_line_is_explained_by_the_needs_of_its_first_task(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(OLD))
        head = marked(db, "locale", "user_id", serial="key:a")
        behind = db.send(serial="key:a")
        change(db, "tasks", """args = '{"user_id": 1}'""", f"id = '{behind}'")
        assert codes(app, head) == ["NEEDS_OTHER_CODE"]
        assert the_reason(app, behind, ReasonCode.SERIAL_LINE).blocked_by == str(head)

    def test_a_workflow_names_the_node_that_waits_for_other_code(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        handle, _ = sent(app, db, [node("a")])
        (task,) = [each.id for each in app.list_tasks()]
        mark(db, task, {"arguments": ["name"]})
        replace_workers(app, db, v1=registers(OLD))
        (reason,) = handle.explain().reasons
        assert (reason.code, reason.node) == (ReasonCode.NEEDS_OTHER_CODE, "a")
        assert "does not take 'name' and requires 'user_id'" in reason.text


class TestDoctor:
    def test_doctor_counts_tasks_that_no_live_worker_can_run_by_their_needs(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(OLD))
        assert (needs_check(app).verdict, needs_check(app).text) == (
            CheckVerdict.OK,
            "no task waits for workers with other code",
        )
        group = db.row(marked(db, "locale", "user_id"), "needs_id")
        marked(db, "locale", "user_id", needs_id=group)
        alone = marked(db, "locale", "user_id", needs_id=group, queue="mail", serial="key:a")
        marked(db, needs_id=uuid4())
        check = needs_check(app)
        assert check.verdict is CheckVerdict.WARN
        assert check.text == (
            "no live worker can run these waiting tasks with their arguments: work (2 in queue default): 1 live worker does not take 'locale',"
            " work (1 in queue default): 1 live worker requires 'user_id', which is not among its arguments,"
            " work (1 in queue mail): 1 live worker does not take 'locale'"
        )
        assert check.fix == (
            "deploy the version that takes 'locale', or cancel the tasks: everbeat tasks list --state pending --name work."
        )
        app.cancel(alone)
        assert "mail" not in needs_check(app).text
        join(db, "v2", metadata=registers({"takes": ["user_id", "locale"], "requires": []}))
        assert needs_check(app).verdict is CheckVerdict.OK

    def test_doctor_ignores_workers_of_other_queues_when_it_checks_needs(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(OLD))
        marked(db, "locale", "user_id", queue="mail")
        join(db, "v2", queues=["post"], metadata=registers(NEW))
        assert needs_check(app).verdict is CheckVerdict.WARN
        join(db, "v3", queues=["post", "mail"], metadata=registers(NEW))
        assert needs_check(app).verdict is CheckVerdict.OK

    def test_doctor_reports_names_and_queues_without_workers_in_their_own_checks(
        self, app: App, db: StoreHarness
    ) -> None:  # J2
        replace_workers(app, db, v1=registers(OLD, name="other"))
        marked(db, "locale")
        found = {check.code: check for check in Examination(app, long_transaction_s=300.0).checks()}
        assert found[CheckCode.NAMES].text.endswith("waiting tasks: work (1 in queue default)")
        assert found[CheckCode.NEEDS].verdict is CheckVerdict.OK
        end_workers(db, "v1")
        found = {check.code: check for check in Examination(app, long_transaction_s=300.0).checks()}
        assert found[CheckCode.WORKERS].verdict is CheckVerdict.FAIL
