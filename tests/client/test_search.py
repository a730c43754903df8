"""Test the search for tasks: by label, by virtual state, by time, and by a text in the arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from everbeat import App
from everbeat.errors import ConfigurationError
from everbeat.inspection import VirtualState
from everbeat.store import inspection, steps
from tests.store.conftest import StoreHarness

VIRTUAL = [each.value for each in VirtualState]


def ids(found: Any) -> list[UUID]:
    return [each.id for each in found]


def in_states(app: App, task_id: UUID) -> set[str]:
    """Return the virtual states in which a search finds the task, in both orders."""
    by_order = [
        {each for each in VIRTUAL if task_id in ids(app.list_tasks(state=each, order=order))}  # type: ignore[arg-type]
        for order in ("sent", "happened")
    ]
    assert by_order[0] == by_order[1]
    return by_order[0]


def change(db: StoreHarness, task_id: UUID, assignments: str) -> None:
    db.connection.execute(db.plain(f"update {{schema}}.tasks set {assignments} where id = %s"), [task_id])


def test_a_task_is_retrying_from_its_failure_until_the_retry_is_claimed(app: App, db: StoreHarness) -> None:
    running = db.running()
    assert in_states(app, running.id) == set()
    db.settle(running, "FAILED", error=b'{"code": "BROKEN", "message": "no"}', retry_in_ms=60_000)
    assert in_states(app, running.id) == {"retrying"}
    change(db, running.id, "enqueued_at = now(), next_retry_at = now()")
    assert in_states(app, running.id) == {"retrying"}
    db.claim()
    assert in_states(app, running.id) == set()


def test_a_task_is_scheduled_until_it_is_due(app: App, db: StoreHarness) -> None:
    @app.task
    def work() -> None: ...

    handle = work.schedule(timedelta(hours=1))
    assert in_states(app, handle.id) == {"scheduled"}
    change(db, handle.id, "enqueued_at = now()")
    assert in_states(app, handle.id) == set()


def test_a_task_is_suspended_while_it_sleeps_or_waits_for_an_event(app: App, db: StoreHarness) -> None:
    asleep, waiting = db.running(), db.running()
    db.run(steps.begin_sleep(asleep.id, asleep.claim_id, name="s", duration_ms=3_600_000))
    db.run(steps.wait_for_signal(waiting.id, waiting.claim_id, name="w", event="go", timeout_ms=None))
    assert in_states(app, asleep.id) == set()  # the code is still running
    for claimed in (asleep, waiting):
        db.settle(claimed, "SUSPENDED")
        assert in_states(app, claimed.id) == {"suspended"}
    app.signal(waiting.id, "go", 1)
    assert in_states(app, waiting.id) == set()  # it waits for a worker


def test_a_suspect_is_found_until_it_ends(app: App, db: StoreHarness) -> None:
    task_id = db.send()
    change(db, task_id, "suspect = true")
    assert in_states(app, task_id) == {"suspect"}
    (claimed,) = db.claim()
    assert in_states(app, task_id) == {"suspect"}
    assert db.start(claimed) == ["started"]
    assert in_states(app, task_id) == {"suspect"}
    assert db.complete(claimed)
    change(db, task_id, "suspect = true")
    assert in_states(app, task_id) == set()


def test_a_task_is_overdue_a_minute_after_it_was_due(app: App, db: StoreHarness) -> None:
    task_id = db.send()
    change(db, task_id, "enqueued_at = now() - interval '59 s'")
    assert in_states(app, task_id) == set()
    change(db, task_id, "enqueued_at = now() - interval '61 s'")
    assert in_states(app, task_id) == {"overdue"}
    db.claim()
    assert in_states(app, task_id) == set()


def test_states_and_virtual_states_can_be_combined(app: App, db: StoreHarness) -> None:
    running = db.running()
    late, waiting = db.send(), db.send()
    change(db, late, "enqueued_at = now() - interval '61 s'")
    found = app.list_tasks(state=["overdue", "RUNNING", "COMPLETED"])
    assert {*ids(found)} == {running.id, late}
    assert {*ids(app.list_tasks(state=["overdue", "PENDING"]))} == {late, waiting}


@pytest.mark.parametrize("order", ["sent", "happened"])
def test_all_labels_of_a_search_must_match(app: App, db: StoreHarness, order: Any) -> None:
    @app.task(labels={"team": "billing"})
    def charge(n: int) -> None: ...

    @app.task
    def other() -> None: ...

    sent = [charge.with_options(labels={"tenant": str(n % 2)}).send(n) for n in range(6)]
    other.with_options(labels={"tenant": "0"}).send()
    other.send()

    def found(**filters: Any) -> list[UUID]:
        return ids(app.list_tasks(order=order, **filters))

    odd = [each.id for each in reversed(sent) if sent.index(each) % 2]
    assert found(labels={"team": "billing", "tenant": "1"}) == odd
    assert found(labels={"team": "billing", "tenant": "2"}) == []
    assert len(found(labels={"team": "billing", "tenant": "0"})) == 3  # the fourth one has no team
    assert len(found(labels={"tenant": "0"})) == 4
    assert len(found(labels={"tenant": None})) == 7
    assert len(found(labels={"tenant": None, "team": "billing"})) == 6
    assert found(labels={"team": "billing"}, arguments_contain='"n":3') == [sent[3].id]
    assert found(labels={"team": "billing"}, queue="other") == []
    assert len(found(labels={})) == 8
    first = app.list_tasks(labels={"team": "billing"}, order=order, limit=4)
    assert found(labels={"team": "billing"}, before=first[-1].id) == [sent[1].id, sent[0].id]


def test_a_search_by_label_continues_after_the_tasks_that_it_examined(
    app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(labels={"team": "billing"})
    def charge(n: int) -> None: ...

    sent = [charge.send(n) for n in range(7)]
    monkeypatch.setattr(inspection, "MOST_EXAMINED", 3)
    page = app.list_tasks(labels={"team": "billing"}, queue="default", limit=2)
    assert (ids(page), page.continue_before) == ([sent[6].id, sent[5].id], None)
    page = app.list_tasks(labels={"team": "billing"}, name="none", limit=2)
    assert (ids(page), page.examined, page.continue_before) == ([], 3, sent[4].id)
    assert page.unindexed == ("name",)
    page = app.list_tasks(labels={"team": "billing"}, name="none", limit=2, before=sent[3].id)
    assert (page.examined, page.continue_before) == (None, None)


def test_the_rarest_label_decides_what_a_search_examines(
    app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(labels={"a": "common"})
    def charge() -> None: ...

    rare = charge.with_options(labels={"b": "rare"}).send()
    for _ in range(5):
        charge.send()
    monkeypatch.setattr(inspection, "MOST_EXAMINED", 2)
    page = app.list_tasks(labels={"a": "common", "b": "rare"}, limit=1)
    assert (ids(page), page.continue_before) == ([rare.id], None)


def test_a_search_in_the_arguments_examines_fewer_tasks_and_says_where_it_stopped(
    app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    def work(text: str) -> None: ...

    sent = [work.send(f"Ünïcode {n}") for n in range(6)]
    assert ids(app.list_tasks(arguments_contain="ïcode 3")) == [sent[3].id]
    assert ids(app.list_tasks(arguments_contain='{"text":"Ünïcode 4"}', order="happened")) == [sent[4].id]
    assert app.list_tasks(arguments_contain="ÏCODE") == []
    monkeypatch.setattr(inspection, "MOST_SEARCHED", 2)
    for states in (None, "PENDING"):
        page = app.list_tasks(arguments_contain="code 0", state=states, limit=1)
        assert (ids(page), page.examined, page.continue_before) == ([], 2, sent[4].id)
        assert page.unindexed == ("arguments_contain",)
        found = app.list_tasks(arguments_contain="code 0", state=states, limit=2, before=sent[2].id)
        assert ids(found) == [sent[0].id]


def test_a_search_ends_before_a_time_and_begins_at_another_one(app: App, db: StoreHarness) -> None:
    old, new = db.send(), db.send()
    change(db, old, "sent_at = now() - interval '2 h', enqueued_at = now() - interval '2 h'")
    hour = timedelta(hours=1)
    assert ids(app.list_tasks(until=hour)) == [old]
    assert ids(app.list_tasks(since=hour)) == [new]
    moment = datetime.now(UTC) - hour
    assert ids(app.list_tasks(until=moment)) == [old]
    assert ids(app.list_tasks(since=moment - 2 * hour, until=moment)) == [old]
    assert app.list_tasks(since=hour, until=hour) == []


@pytest.mark.parametrize(
    ("filters", "unindexed"),
    [
        ({}, ()),
        ({"state": "RUNNING"}, ()),
        ({"state": "FAILED"}, ("state",)),
        ({"state": "FAILED", "order": "happened"}, ()),
        ({"state": "retrying"}, ("state",)),
        ({"labels": {"a": "1"}}, ()),
        ({"labels": {"a": None}}, ("labels",)),
        ({"labels": {"a": "1"}, "queue": "q", "since": timedelta(hours=1)}, ("queue", "since")),
    ],
)
def test_a_page_names_the_filters_that_no_index_serves(
    app: App, filters: dict[str, Any], unindexed: tuple[str, ...]
) -> None:
    assert app.list_tasks(**filters).unindexed == unindexed


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (lambda app: app.list_tasks(labels={"ten ant": "1"}), "labels.*must have 1 to 64"),
        (lambda app: app.list_tasks(labels={"tenant": 42}), "must be a text, not int"),
        (lambda app: app.list_tasks(labels="tenant"), "must map the keys of labels"),
        (lambda app: app.list_tasks(state="retryin"), "use 'retrying'"),
        (lambda app: app.list_tasks(arguments_contain=3), "arguments_contain = 3"),
        (lambda app: app.list_tasks(arguments_contain=""), "arguments_contain = '': must not be empty"),
        (lambda app: app.retry_all(arguments_contain="", dry_run=True), "must not be empty"),
        (lambda app: app.list_tasks(until="soon"), "until = 'soon'"),
        (lambda app: app.list_tasks(state=3), "state = 3: must be a state, or a list of states, not int"),
        (lambda app: app.cancel_all(state=3, dry_run=True), "state = 3: must be a state"),
        (lambda app: app.dead(state=3), "state = 3: must be a state"),
        (lambda app: app.list_tasks(parent="zz"), "parent = 'zz': must be a UUID"),
        (lambda app: app.list_tasks(workflow="zz"), "workflow = 'zz': must be a UUID"),
        (lambda app: app.list_tasks(before="zz"), "before = 'zz': must be a UUID"),
        (lambda app: app.dead(before="zz"), "before = 'zz': must be a UUID"),
        (lambda app: app.list_workflows(parent="zz"), r"list_workflows\.parent = 'zz': must be a UUID"),
        (lambda app: app.list_batches(before="zz"), r"list_batches\.before = 'zz': must be a UUID"),
        (lambda app: app.inbox(after="zz"), r"inbox\.after = 'zz': must be a UUID"),
        (lambda app: app.list_workflows(state="retrying"), "must be one of 'RUNNING', 'PAUSED'"),
        (lambda app: app.list_workflows(state="faild"), "use 'FAILED'"),
        (lambda app: app.list_workflows(labels={"": "1"}), "must have 1 to 64"),
    ],
)
def test_invalid_filters_are_refused(app: App, listed: Callable[[App], object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        listed(app)


@pytest.mark.parametrize(
    "listed",
    [
        lambda app, moment: app.list_tasks(since=moment),
        lambda app, moment: app.list_tasks(until=moment),
        lambda app, moment: app.list_workflows(since=moment),
        lambda app, moment: app.failures(since=moment),
        lambda app, moment: app.recoveries(since=moment),
        lambda app, moment: app.audit_log(since=moment),
    ],
)
@pytest.mark.parametrize("moment", ["2h", 5, datetime(2030, 1, 1), timedelta(hours=-1)])  # noqa: DTZ001 - refused
def test_a_fix_of_a_wrong_time_in_the_past_does_not_propose_the_future(
    app: App, listed: Callable[[App, object], object], moment: object
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        listed(app, moment)
    fix = refused.value.problems[0].fix
    assert "datetime.now(timezone.utc) - timedelta(...)" in fix
    assert "delay" not in str(refused.value)


def test_workflows_are_found_by_their_labels_and_times(app: App, db: StoreHarness) -> None:
    @app.task
    def work() -> None: ...

    started = []
    for tenant in ("1", "2"):
        wf = app.workflow("order", labels={"tenant": tenant})
        wf.add(work)
        started.append(wf.start(labels={"run": "7"}).id)
    plain = app.workflow("plain")
    plain.add(work)
    plain.start()
    assert ids(app.list_workflows(labels={"tenant": "1"})) == [started[0]]
    assert ids(app.list_workflows(labels={"tenant": "2", "run": "7"})) == [started[1]]
    assert ids(app.list_workflows(labels={"tenant": None})) == started[::-1]
    assert ids(app.list_workflows(labels={"tenant": "3"})) == []
    assert app.workflow_handle(started[0]).info().labels == {"tenant": "1", "run": "7"}
    assert app.list_workflows(until=timedelta(hours=1)) == []
    assert len(app.list_workflows(until=datetime.now(UTC) + timedelta(minutes=1))) == 3
    assert app.list_tasks(labels={"tenant": "1"}) == []  # its node is not enqueued yet


def test_the_pages_of_the_list_of_workflows_contain_each_of_them_once(app: App, db: StoreHarness) -> None:
    @app.task
    def work() -> None: ...

    def start(name: str) -> UUID:
        wf = app.workflow(name)
        wf.add(work)
        return wf.start().id

    started = [start("order" if number % 2 else "other") for number in range(7)]
    found, before = [], None
    while (page := ids(app.list_workflows(before=before, limit=2))) and len(found) < len(started):
        found += page
        before = page[-1]
    assert found == started[::-1]
    assert page == []
    assert ids(app.list_workflows(name="order", before=str(started[3]))) == [started[1]]
    assert app.list_workflows(before=started[0]) == []
    with pytest.raises(ConfigurationError, match=r"list_workflows\.before = 'zz': must be a UUID"):
        app.list_workflows(before="zz")
