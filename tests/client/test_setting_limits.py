"""Test how operators replace the numbers of a limit, and which tasks count as waiting for it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from everbeat import Limit, Schedule
from everbeat.errors import ConfigurationError
from everbeat.runtime.clock import SystemClock
from tests.client.conftest import NewApp
from tests.store.conftest import StoreHarness


def test_what_a_second_set_limit_omits_stays_until_the_numbers_are_cleared(limited: NewApp) -> None:
    app = limited(Limit("gpu", concurrency=1, rate="5/s"))
    until = datetime(2099, 1, 1, tzinfo=UTC)
    app.set_limit("gpu", concurrency=5, until=until, reason="an incident")
    info = app.set_limit("gpu", rate="9/1s")
    assert (info.numbers.concurrency, info.numbers.rate) == (5, "9/1s")
    assert (info.until, info.reason) == (until, "an incident")
    info = app.set_limit("gpu", concurrency=6, until=None, reason=None)
    assert (info.until, info.reason) == (None, None)
    app.clear_limit("gpu")
    info = app.set_limit("gpu", rate="9/1s")
    assert (info.numbers.concurrency, info.until, info.reason) == (1, None, None)


def test_numbers_whose_end_has_passed_do_not_stay_in_the_next_set_limit(
    limited: NewApp, db: StoreHarness
) -> None:
    app = limited(Limit("gpu", concurrency=1))
    app.set_limit("gpu", concurrency=5, until="1h", reason="an incident")
    db.connection.execute(db.plain("update {schema}.limits set until = now() - interval '1 minute'"))
    info = app.set_limit("gpu", rate="9/1s")
    assert (info.numbers.concurrency, info.until, info.reason) == (1, None, None)


def test_the_end_of_a_set_limit_is_a_moment_or_a_duration_in_the_future(limited: NewApp) -> None:
    app = limited(Limit("gpu", concurrency=1))
    before = datetime.now(UTC)
    info = app.set_limit("gpu", concurrency=5, until="2h")
    assert info.until is not None
    assert timedelta(hours=2) <= info.until - before < timedelta(hours=2, minutes=5)
    for wrong in (before, before - timedelta(days=1), 0):
        with pytest.raises(ConfigurationError, match=r"set_limit\.until.*must be after now"):
            app.set_limit("gpu", concurrency=6, until=wrong)
    with pytest.raises(ConfigurationError, match="or a datetime with a time zone"):
        app.set_limit("gpu", concurrency=6, until="yesterday")
    assert app.limit_info("gpu").numbers.concurrency == 5


def test_the_end_of_numbers_is_judged_by_the_clock_of_the_database(
    limited: NewApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = limited(Limit("gpu", concurrency=1))
    app.set_limit("gpu", concurrency=5, until="1h", reason="an incident")
    now = datetime.now(UTC)
    for ahead in (timedelta(days=1), timedelta(days=-1)):
        monkeypatch.setattr(SystemClock, "wall", lambda _, ahead=ahead: now + ahead)
        info = app.set_limit("gpu", rate="9/1s")
        assert (info.numbers.concurrency, info.reason) == (5, "an incident")
        info = app.set_limit("gpu", rate="9/1s", until="1h")
        assert info.until is not None
        assert abs(info.until - now - timedelta(hours=1)) < timedelta(minutes=5)
        with pytest.raises(ConfigurationError, match=r"set_limit\.until.*must be after now"):
            app.set_limit("gpu", concurrency=6, until=now - timedelta(hours=1))


def test_the_end_of_a_pause_is_judged_by_the_clock_of_the_database(
    limited: NewApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = limited()

    @app.task
    def report() -> None: ...

    app.put_schedule(Schedule("hourly", report.call(), every="1h"))
    now = datetime.now(UTC)
    monkeypatch.setattr(SystemClock, "wall", lambda _: now + timedelta(days=1))
    paused = app.pause_schedule("hourly", until="1h")
    assert paused.resume_at is not None
    assert abs(paused.resume_at - now - timedelta(hours=1)) < timedelta(minutes=5)


def test_tasks_count_as_waiting_before_a_worker_has_applied_their_lines(limited: NewApp) -> None:
    app = limited(Limit("tenant", concurrency=1, key="tenant_id"), Limit("gpu", concurrency=1))

    @app.task(limits=["tenant", "gpu"])
    def charge(tenant_id: str) -> None: ...

    app.send_many([charge.call(each) for each in ("a", "a", "b")])
    waits = charge.schedule(timedelta(hours=1), "c")
    assert [(each.name, each.held, each.waiting, each.keys) for each in app.limits()] == [
        ("gpu", 0, 4, 1),
        ("tenant", 0, 4, 3),
    ]
    assert {each.key: each.waiting for each in app.limit_info("tenant").in_use} == {"a": 2, "b": 1, "c": 1}
    app.cancel(waits.id)
    assert [each.waiting for each in app.limits()] == [3, 3]
