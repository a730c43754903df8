"""Tasks that live workers know by name and cannot run with their arguments: the reason names what their code lacks, and who fits."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from everbeat import App
from everbeat.cli.examination import Examination
from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.domain.explanation import Reason, ReasonCode
from everbeat.domain.needs import Needs
from everbeat.store import workers
from tests.client.test_explaining import change, codes, dismiss, join, pause, the_reason
from tests.store.conftest import Hands
from tests.store.flows import task as node
from tests.workflows.sent import sent

OLD = {"takes": ["user_id"], "requires": ["user_id"]}
NEW = {"takes": ["user_id", "locale"], "requires": ["user_id"]}


def registers(parameters: object, *, name: str = "work") -> str:
    """The metadata of a worker that knows one task function."""
    return msgspec.json.encode({"tasks": [name], "parameters": {name: parameters}}).decode()


def mark(hands: Hands, task: UUID, needs: object, *, needs_id: UUID | None = None) -> UUID:
    """Mark a task as `decline` does. Returns the group."""
    group = needs_id or uuid4()
    hands.connection.execute(
        hands.plain("update {schema}.tasks set needs = %s, needs_id = %s where id = %s"),
        [msgspec.json.encode(needs).decode(), group, task],
    )
    return group


def marked(hands: Hands, *arguments: str, needs_id: UUID | None = None, **options: Any) -> UUID:
    task = hands.send(**options)
    mark(hands, task, {"arguments": sorted(arguments)}, needs_id=needs_id)
    return task


def only(app: App, hands: Hands, **metadata: str) -> None:
    """Replace all workers by these, each with its metadata."""
    dismiss(hands, "w1", "w2")
    for name, text in metadata.items():
        join(hands, name, metadata=text)


def unfit(app: App, task: UUID) -> Reason:
    return the_reason(app, task, ReasonCode.NEEDS_OTHER_CODE)


def needs_check(app: App) -> Check:
    checks = {check.code: check for check in Examination(app, long_transaction_s=300.0).checks()}
    return checks[CheckCode.NEEDS]


class TestExplain:
    def test_no_live_worker_takes_the_argument_until_one_does(self, app: App, hands: Hands) -> None:  # J2
        only(app, hands, v1=registers(OLD))
        task = marked(hands, "locale", "user_id")
        reason = unfit(app, task)
        assert codes(app, task) == ["NEEDS_OTHER_CODE"]
        assert reason.text == (
            "no live worker can run it with its arguments: 1 live worker (v1) does not take 'locale';"
            " deploy the version that takes 'locale', or cancel the task"
        )
        assert (reason.blocked_by, reason.command) == ("'locale'", "everbeat worker MODULE:APP")
        info = app.info(task)
        assert info.needs == Needs(arguments=("locale", "user_id"))
        assert info.waiting_because == reason.text
        join(hands, "v2", metadata=registers(NEW))
        assert codes(app, task) == ["IN_LINE"]
        turn = the_reason(app, task, ReasonCode.IN_LINE).text
        assert turn.endswith("its arguments fit only v2: 1 live worker (v1) does not take 'locale'")
        assert "1 live worker that could run it" in turn
        assert app.info(task).waiting_because is None

    def test_no_live_worker_does_without_an_argument_that_the_task_lacks(
        self, app: App, hands: Hands
    ) -> None:  # J2
        only(
            app,
            hands,
            a=registers({"takes": ["user_id", "region"], "requires": ["user_id", "region"]}),
            b=registers(OLD),
        )
        task = marked(hands, "locale")
        text = unfit(app, task).text
        assert (
            "1 live worker (a) does not take 'locale' and requires 'region', 'user_id', which is not among its arguments"
            in text
        )
        assert ", and 1 live worker (b) does not take 'locale' and requires 'user_id'" in text
        assert text.endswith(
            "deploy the version that takes 'locale' and does not require 'region', 'user_id', or cancel the task"
        )

    def test_only_fitting_workers_count_for_slots_lag_and_quiet(self, app: App, hands: Hands) -> None:  # J2
        only(app, hands, v1=registers(OLD), v2=registers(NEW))
        task = marked(hands, "locale", "user_id")
        for worker, lag_ms in (("v1", 5_000.0), ("v2", 1.0)):
            state = workers.WorkerState(
                worker_id=worker, running=0, claimed=0, slots=0 if worker == "v2" else 9, rss_bytes=1, cpu_percent=0, loop_lag_ms=lag_ms
            )  # fmt: skip
            hands.run(workers.record_states([state]))
        assert codes(app, task) == ["SLOTS_BUSY"]
        text = the_reason(app, task, ReasonCode.SLOTS_BUSY).text
        assert "slots of the 1 live worker that could run it: no slots for its kind" in text
        assert "its arguments fit only v2: 1 live worker (v1) does not take 'locale'" in text
        assert "lag" not in text
        assert "slots of the 2 live workers" not in text
        pause(hands, "queue", "default")
        assert codes(app, task) == ["QUEUE_PAUSED"]
        hands.connection.execute(hands.plain("delete from {schema}.pauses"))
        hands.supervisor("s2", "v3")
        change(hands, "workers", f"metadata = '{registers(NEW)}', supervisor_id = 's2'", "id in ('v2', 'v3')")
        change(hands, "supervisors", "quiet_since = statement_timestamp()", "id = 's2'")
        assert codes(app, task) == ["WORKERS_QUIET"]
        assert "made 2 live workers quiet" in the_reason(app, task, ReasonCode.WORKERS_QUIET).text
        change(hands, "supervisors", "quiet_since = null")
        change(hands, "supervisors", "quiet_since = statement_timestamp()", "id = 's1'")
        assert codes(app, task) == ["IN_LINE"], "the quiet worker could not run it anyway"

    def test_its_place_is_told_among_unmarked_tasks_and_those_of_its_group(
        self, app: App, hands: Hands
    ) -> None:  # J2
        only(app, hands, v2=registers(NEW))
        hands.send()
        first = marked(hands, "locale", "user_id")
        (group,) = [hands.row(first, "needs_id")]
        marked(hands, "other")
        last = marked(hands, "locale", "user_id", needs_id=group)
        assert "1 due task of its queue before it" in the_reason(app, first, ReasonCode.IN_LINE).text
        assert "2 due tasks of its queue before it" in the_reason(app, last, ReasonCode.IN_LINE).text

    def test_a_task_that_no_worker_has_looked_at_is_judged_by_its_stored_arguments(
        self, app: App, hands: Hands
    ) -> None:  # J2
        only(app, hands, v1=registers(OLD))
        task = hands.send(delay_ms=3_600_000)
        change(hands, "tasks", """args = '{"user_id": 1, "locale": "en"}'""")
        assert codes(app, task) == ["NEEDS_OTHER_CODE", "SCHEDULED"]
        assert app.info(task).needs is None
        join(hands, "v2", metadata=registers(NEW))
        assert codes(app, task) == ["SCHEDULED"]
        change(hands, "tasks", """args = '{"user_id": 1}'""")
        dismiss(hands, "v2")
        assert codes(app, task) == ["SCHEDULED"]

    def test_a_worker_that_registered_no_parameters_is_believed_to_fit(
        self, app: App, hands: Hands
    ) -> None:  # J2
        only(
            app,
            hands,
            v1=registers(OLD),
            plain='{"tasks": ["work"]}',
            silent="{}",
            odd=registers({"takes": 7}),
        )
        task = marked(hands, "locale", "user_id")
        assert codes(app, task) == ["IN_LINE"]
        assert "3 live workers that could run it" in the_reason(app, task, ReasonCode.IN_LINE).text

    def test_a_requirement_of_another_version_of_everbeat_is_named(
        self, app: App, hands: Hands
    ) -> None:  # J2
        only(app, hands, v1=registers(NEW), plain='{"tasks": ["work"]}')
        task = hands.send()
        mark(hands, task, {"arguments": ["user_id"], "hardware": "gpu"})
        reason = unfit(app, task)
        assert reason.text == (
            "no live worker can run it with its arguments: it needs 'hardware', which this version of everbeat does not know;"
            " start workers with a newer version of everbeat, or cancel the task"
        )
        assert app.info(task).needs == Needs(arguments=("user_id",), other=("hardware",))

    @pytest.mark.parametrize("needs", [[], 7, None, {"arguments": 7}, {"arguments": [1]}, "x" * 1_000_000])
    def test_a_mark_that_cannot_be_read_is_reported_as_such(
        self, app: App, hands: Hands, needs: object
    ) -> None:  # J2
        only(app, hands, v1=registers(NEW))
        task, sound = hands.send(), marked(hands, "locale", "user_id")
        mark(hands, task, needs)
        assert "it needs '(unreadable)'" in unfit(app, task).text
        assert codes(app, sound) == ["IN_LINE"]
        assert "(unreadable)" in needs_check(app).text

    def test_the_first_of_a_serial_line_says_why_the_line_stands(self, app: App, hands: Hands) -> None:  # J2
        only(app, hands, v1=registers(OLD))
        head = marked(hands, "locale", "user_id", serial="key:a")
        behind = hands.send(serial="key:a")
        change(hands, "tasks", """args = '{"user_id": 1}'""", f"id = '{behind}'")
        assert codes(app, head) == ["NEEDS_OTHER_CODE"]
        assert the_reason(app, behind, ReasonCode.SERIAL_LINE).blocked_by == str(head)

    def test_a_workflow_says_which_node_waits_for_other_code(self, app: App, hands: Hands) -> None:  # J2
        handle, _ = sent(app, hands, [node("a")])
        (task,) = [each.id for each in app.list_tasks()]
        mark(hands, task, {"arguments": ["name"]})
        only(app, hands, v1=registers(OLD))
        (reason,) = handle.explain().reasons
        assert (reason.code, reason.node) == (ReasonCode.NEEDS_OTHER_CODE, "a")
        assert "does not take 'name' and requires 'user_id'" in reason.text


class TestDoctor:
    def test_tasks_that_no_live_worker_can_run_are_counted_by_what_they_need(
        self, app: App, hands: Hands
    ) -> None:  # J2
        only(app, hands, v1=registers(OLD))
        assert (needs_check(app).verdict, needs_check(app).text) == (
            Verdict.OK,
            "no task waits for workers with other code",
        )
        group = hands.row(marked(hands, "locale", "user_id"), "needs_id")
        marked(hands, "locale", "user_id", needs_id=group)
        alone = marked(hands, "locale", "user_id", needs_id=group, queue="mail", serial="key:a")
        marked(hands, needs_id=uuid4())
        check = needs_check(app)
        assert check.verdict is Verdict.WARN
        assert check.text == (
            "tasks wait that no live worker can run with their arguments: work (2 in queue default): 1 live worker does not take 'locale',"
            " work (1 in queue default): 1 live worker requires 'user_id', which is not among its arguments,"
            " work (1 in queue mail): 1 live worker does not take 'locale'"
        )
        assert check.fix == (
            "deploy the version that takes 'locale', or cancel the tasks: everbeat tasks list --state pending --name work."
        )
        app.cancel(alone)
        assert "mail" not in needs_check(app).text
        join(hands, "v2", metadata=registers({"takes": ["user_id", "locale"], "requires": []}))
        assert needs_check(app).verdict is Verdict.OK

    def test_a_worker_of_another_queue_does_not_help(self, app: App, hands: Hands) -> None:  # J2
        only(app, hands, v1=registers(OLD))
        marked(hands, "locale", "user_id", queue="mail")
        join(hands, "v2", queues=["post"], metadata=registers(NEW))
        assert needs_check(app).verdict is Verdict.WARN
        join(hands, "v3", queues=["post", "mail"], metadata=registers(NEW))
        assert needs_check(app).verdict is Verdict.OK

    def test_names_and_queues_without_any_worker_are_reported_by_their_own_checks(
        self, app: App, hands: Hands
    ) -> None:  # J2
        only(app, hands, v1=registers(OLD, name="other"))
        marked(hands, "locale")
        found = {check.code: check for check in Examination(app, long_transaction_s=300.0).checks()}
        assert found[CheckCode.NAMES].text.endswith("knows: work (1 in queue default)")
        assert found[CheckCode.NEEDS].verdict is Verdict.OK
        dismiss(hands, "v1")
        found = {check.code: check for check in Examination(app, long_transaction_s=300.0).checks()}
        assert found[CheckCode.WORKERS].verdict is Verdict.FAIL
