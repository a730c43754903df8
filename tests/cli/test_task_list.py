"""Test the filters of `everbeat tasks list` and its order by the latest event."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta

import pytest

from everbeat import App, TaskState
from everbeat.cli.task_filters import ListedState
from everbeat.domain.task.context_backend import EmittedItem
from everbeat.errors import ConfigurationError
from everbeat.inspection import VirtualState
from everbeat.store import leases, streams
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.client.conftest import app
from tests.store.conftest import StoreHarness

__all__ = ["app"]


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    """Return a harness without audit triggers, because the tests date rows back."""
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        made.supervisor("s1", "w1", "w2")
        yield made
        made.database.close()


def error(code: str, kind: str | None = None) -> bytes:
    return json.dumps({"code": code, "message": "m"} | ({} if kind is None else {"type": kind})).encode()


def listed(everbeat: Command, *options: str) -> list[str]:
    return [
        task["id"] for task in everbeat("tasks", "list", *options, "--json").assert_code(0).document["tasks"]
    ]


def test_the_task_list_begins_with_the_latest_event(
    app: App, db: StoreHarness, everbeat: Command
) -> None:  # J10
    done, retried, failed, running = (db.running("w1") for _ in range(4))
    waiting = db.send("unknown")
    db.settle(failed, "FAILED", error=error("BROKEN"))
    db.settle(retried, "FAILED", error=error("BROKEN"), retry_in_ms=600_000)
    db.complete(done)
    expected = [str(each) for each in (done.id, retried.id, failed.id, waiting, running.id)]
    assert listed(everbeat) == expected
    assert [str(task.id) for task in app.list_tasks(order="happened")] == expected
    assert [str(task.id) for task in app.list_tasks()] == sorted(expected, reverse=True)
    first = app.list_tasks(order="happened", limit=2)
    second = app.list_tasks(order="happened", limit=2, before=first[-1].id)
    assert [str(task.id) for task in (*first, *second)] == expected[:4]
    assert listed(everbeat, "--limit", "2", "--before", expected[1][:13]) == expected[2:4]
    app.retry(failed.id)
    assert listed(everbeat)[0] == str(failed.id)
    with pytest.raises(ConfigurationError, match="order"):
        app.list_tasks(order="ended")  # type: ignore[arg-type]


def test_the_task_list_filters_by_error_code_and_exception_class(
    db: StoreHarness, everbeat: Command
) -> None:  # J10
    coded, classed, retried = (db.running("w1") for _ in range(3))
    db.settle(coded, "FAILED", error=error("CARD_DECLINED"))
    db.settle(classed, "FAILED", error=error("UNHANDLED_EXCEPTION", "shop.errors.CardDeclined"))
    db.settle(retried, "FAILED", error=error("UNHANDLED_EXCEPTION", "CardDeclined"), retry_in_ms=60_000)
    assert listed(everbeat, "--error", "CARD_DECLINED") == [str(coded.id)]
    assert listed(everbeat, "--error", "shop.errors.CardDeclined") == [str(classed.id)]
    assert listed(everbeat, "--error", "CardDeclined") == [str(retried.id), str(classed.id)]
    assert listed(everbeat, "--error", "Declined") == []
    assert listed(everbeat, "--error", "CardDeclined", "--state", "pending") == [str(retried.id)]


def test_a_damaged_error_does_not_hide_other_tasks_of_the_list(db: StoreHarness, everbeat: Command) -> None:
    broken, coded = db.running("w1"), db.running("w1")
    for each in (broken, coded):
        db.settle(each, "FAILED", error=error("BROKEN"))
    db.connection.execute(
        db.plain('update {schema}.tasks set error = \'{{"code": "\\u0000"}}\' where id = %s'), [broken.id]
    )
    assert listed(everbeat, "--error", "BROKEN") == [str(coded.id)]


def test_the_task_list_filters_by_the_worker_that_holds_or_ran_a_task(
    db: StoreHarness, everbeat: Command
) -> None:  # J10
    held, ran, other = db.running("w1"), db.running("w1"), db.running("w2")
    db.settle(ran, "FAILED", error=error("BROKEN"), retry_in_ms=0)
    (again,) = db.claim("w2", limit=1)
    assert again.id == ran.id
    assert db.start(again) == ["started"]
    assert set(listed(everbeat, "--worker", "w1")) == {str(held.id), str(ran.id)}
    assert set(listed(everbeat, "--worker", "w2")) == {str(other.id), str(ran.id)}
    assert listed(everbeat, "--worker", "w3") == []


def test_the_task_list_filters_by_time(app: App, db: StoreHarness, everbeat: Command) -> None:  # J10
    old, ended, new = db.send("unknown"), db.running("w1"), db.send("unknown")
    db.connection.execute(
        db.plain(
            "update {schema}.tasks set sent_at = now() - interval '1 h', enqueued_at = now() - interval '1 h' where id = any(%s)"
        ),
        [[old, ended.id]],
    )
    db.complete(ended)
    assert set(listed(everbeat, "--since", "10m")) == {str(ended.id), str(new)}
    assert set(listed(everbeat, "--since", "2h")) == {str(ended.id), str(new), str(old)}
    assert {task.id for task in app.list_tasks(since=timedelta(minutes=10))} == {ended.id, new}
    answer = everbeat("tasks", "list", "--since", "yesterday").assert_code(2)
    assert "--since" in answer.err


def test_the_task_list_shows_the_seconds_until_a_retry(db: StoreHarness, everbeat: Command) -> None:  # J10
    retried = db.running("w1")
    db.settle(retried, "FAILED", error=error("BROKEN"), retry_in_ms=100_000)
    assert re.search(r"  retry in (100|\d\d) s: BROKEN: m", everbeat("tasks", "list").out)


def test_the_task_list_shows_the_progress_of_a_retry_and_not_its_last_error(
    db: StoreHarness, everbeat: Command
) -> None:  # J10
    task = db.running("w1")
    db.settle(task, "FAILED", error=error("BROKEN"), retry_in_ms=0)
    (again,) = db.claim("w1", limit=1)
    assert db.start(again) == ["started"]
    assert "BROKEN: m" in everbeat("tasks", "list").out
    db.run(
        leases.record_progress(
            again.id, again.claim_id, b'{"stage": "packing", "fraction": 0.5, "message": "box 7"}'
        )
    )
    shown = everbeat("tasks", "list").out
    assert "packing 50% box 7" in shown
    assert "BROKEN" not in shown


def test_a_time_without_a_time_zone_is_refused_with_a_valid_form(db: StoreHarness, everbeat: Command) -> None:
    db.send("unknown")
    answer = everbeat("tasks", "list", "--since", "2030-01-31").assert_code(2)
    assert "2030-01-31T00:00:00Z" in answer.err
    assert listed(everbeat, "--since", "2030-01-31T00:00:00Z") == []


def test_tasks_are_sent_found_and_shown_with_their_labels(
    app: App, db: StoreHarness, everbeat: Command
) -> None:
    sent = [
        everbeat("send", "--url", db.target.url, "--schema", app.schema, "charge", "n=1", *labels, "--json")
        .assert_code(0).document["id"]
        for labels in (("--label", "tenant=42", "--label", "team=billing"), ("--label", "tenant=a=b"), ())
    ]  # fmt: skip
    assert listed(everbeat, "--label", "tenant=42") == [sent[0]]
    assert listed(everbeat, "--label", "tenant=42", "--label", "team=sales") == []
    assert listed(everbeat, "--label", "tenant=a=b") == [sent[1]]
    assert {*listed(everbeat, "--label", "tenant")} == {sent[0], sent[1]}
    assert len(listed(everbeat, "--arguments-contain", '"n":1')) == 3
    assert listed(everbeat, "--until", "1h") == []
    assert listed(everbeat, "--state", "retrying", "--state", "OVERDUE") == []
    assert "labels       team=billing, tenant=42" in re.sub(
        r"labels +", "labels       ", everbeat("tasks", "show", sent[0]).assert_code(0).out
    )
    shown = everbeat("tasks", "show", sent[0], "--json").assert_code(0).document
    assert shown["labels"] == {"team": "billing", "tenant": "42"}
    page = everbeat("tasks", "list", "--label", "tenant", "--json").assert_code(0).document
    assert page["unindexed"] == ["labels"]
    assert everbeat("workflows", "list", "--label", "tenant=42", "--json").document == {"workflows": []}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tasks", "list", "--label", "a=1", "--label", "a=2"), "twice"),
        (("tasks", "list", "--label", "a b=1"), "--label"),
        (("tasks", "list", "--state", "retryin"), "retrying"),
        (("send", "charge", "--label", "tenant"), "no value"),
        (("send", "charge", "--label", "_tenant=1"), "--label"),
    ],
)
def test_invalid_labels_of_a_command_are_refused(
    app: App, db: StoreHarness, everbeat: Command, words: tuple[str, ...], said: str
) -> None:
    answer = everbeat(*words, "--url", db.target.url, "--schema", app.schema)
    answer.assert_code(2)
    assert said in answer.err


def test_the_state_filter_offers_each_state_and_virtual_state() -> None:
    assert [each.value for each in ListedState] == [*TaskState, *VirtualState]


def test_a_stream_without_items_is_reported_with_the_streams_that_the_task_has(
    db: StoreHarness, everbeat: Command
) -> None:
    held = db.running("w1")
    emitted = [EmittedItem(name, 1, '"a"') for name in ("words", "lines")]
    insertion = streams.insert_items([((held.id, held.claim_id), emitted)], channel=db.target.items_channel)
    assert db.run(insertion) == {held.claim_id}
    missing = everbeat("tasks", "stream", str(held.id), "wrods").assert_code(0)
    assert missing.out == ""
    assert "no items in stream 'wrods'. Its streams: lines, words" in missing.err
    assert everbeat("tasks", "stream", str(held.id), "wrods", "--json").assert_code(0).document["items"] == []
    assert everbeat("tasks", "stream", str(held.id), "words").assert_code(0).err == ""
