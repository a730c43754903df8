"""Test storing, inspecting and controlling schedules through the app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat import App, Context, Schedule
from everbeat.app import definition_of
from everbeat.domain.schedule.ticks import jitter_ms_of, tick_task_id
from everbeat.errors import (
    BlockingCallInLoop,
    ConfigurationError,
    NotPaused,
    ScheduleNotChanged,
    TaskFailed,
    UnknownName,
)
from everbeat.store import schedules, workers
from everbeat.store.steps import installation
from tests.client.working import working
from tests.store.conftest import StoreHarness

HOUR = timedelta(hours=1)


@pytest.fixture
def shop(app: App) -> App:
    """Return the app with a task `work`, whose arguments have defaults."""

    @app.task
    def work(n: int = 0) -> int:
        return n

    return app


def schedule_of(app: App, name: str = "hourly", n: int = 7, **options: Any) -> Schedule:
    work = app._registry.task("work")
    assert work is not None
    return Schedule(name, work.call(n), **({"every": "1h"} | options))


def declare(db: StoreHarness, app: App) -> None:
    """Register a worker of the app, and store the schedules that it declares."""
    row = workers.WorkerRow(
        id="w9",
        supervisor_id="s1",
        hostname="host",
        pid=9,
        process_started=None,
        queues=None,
        declared=definition_of(app).schedules,
    )
    db.run(workers.register_worker(row))
    db.run(schedules.apply_declared(after_ms=60_000))


def move(db: StoreHarness, name: str, **by: timedelta) -> None:
    """Move columns of a schedule back in time."""
    for column, duration in by.items():
        db.connection.execute(
            db.plain(f"update {{schema}}.schedules set {column} = {column} - %s where name = %s"),
            [duration, name],
        )


def test_a_schedule_is_stored_with_its_call_and_its_rule(shop: App, db: StoreHarness) -> None:
    stored = shop.put_schedule(schedule_of(shop, jitter="5m", note="asked by ann"))
    assert (stored.name, stored.state, stored.task, stored.arguments) == (
        "hourly",
        "ACTIVE",
        "work",
        {"n": 7},
    )
    assert (stored.owner, stored.note, stored.runs, stored.last_tick) == (None, "asked by ann", 0, None)
    assert stored.rule is not None
    assert (stored.rule.timing.every_ms, stored.rule.jitter_ms) == (3_600_000, 300_000)
    assert stored.created_at <= stored.at < stored.created_at + HOUR
    found = shop.schedule_info("hourly")
    assert (found.rule, found.decided_to, found.next_at) == (stored.rule, stored.decided_to, stored.next_at)


def test_a_schedule_with_the_same_timing_continues_and_one_with_another_begins_anew(
    shop: App, db: StoreHarness
) -> None:
    first = shop.put_schedule(schedule_of(shop))
    move(db, "hourly", decided_to=3 * HOUR)
    same = shop.put_schedule(schedule_of(shop, n=8, overlap="skip"))
    assert (same.arguments, same.rule and same.rule.overlap) == ({"n": 8}, "skip")
    assert same.decided_to == first.decided_to - 3 * HOUR
    other = shop.put_schedule(schedule_of(shop, every="2h"))
    assert first.decided_to < other.decided_to <= other.at


def test_only_a_schedule_can_be_put(shop: App) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a Schedule, not str.*Schedule\("):
        shop.put_schedule("hourly")  # type: ignore[arg-type]


def test_declared_schedules_can_be_controlled_but_not_replaced_or_deleted(
    shop: App, db: StoreHarness
) -> None:
    shop.schedule("hourly", schedule_of(shop).call, every="1h")
    declare(db, shop)
    owner = definition_of(shop).schedules
    assert owner is not None
    assert shop.schedule_info("hourly").owner == owner.owner
    for change in (
        lambda: shop.put_schedule(schedule_of(shop)),
        lambda: shop.delete_schedule("hourly"),
    ):
        with pytest.raises(ScheduleNotChanged, match="only that code can change it") as error:
            change()
        assert (error.value.name, error.value.owner) == ("hourly", owner.owner)
    assert shop.pause_schedule("hourly").state == "PAUSED"
    assert shop.resume_schedule("hourly").state == "ACTIVE"
    assert shop.run_schedule("hourly").name == "work"
    assert [found.name for found in shop.list_schedules(owner=owner.owner)] == ["hourly"]


BY_NAME: list[Callable[[App, str], Any]] = [
    lambda app, name: app.schedule_info(name),
    lambda app, name: app.next_ticks(name),
    lambda app, name: app.list_ticks(name),
    lambda app, name: app.pause_schedule(name),
    lambda app, name: app.resume_schedule(name),
    lambda app, name: app.run_schedule(name),
    lambda app, name: app.delete_schedule(name),
    lambda app, name: app.backfill(
        name, since=datetime(2026, 1, 1, tzinfo=UTC), until=datetime(2026, 1, 2, tzinfo=UTC)
    ),
]


@pytest.mark.parametrize("call", BY_NAME)
def test_an_unknown_schedule_is_reported_with_the_most_similar_name(
    shop: App, db: StoreHarness, call: Callable[[App, str], Any]
) -> None:
    shop.put_schedule(schedule_of(shop))
    with pytest.raises(UnknownName, match=r"Schedule 'hourli' is not known here.*did you mean 'hourly'"):
        call(shop, "hourli")
    with pytest.raises(ConfigurationError, match="without spaces"):
        call(shop, "two words")


def test_schedules_are_listed_by_name_in_pages_and_by_filter(shop: App, db: StoreHarness) -> None:
    for name in ("b-1", "a-2", "a-1"):
        shop.put_schedule(schedule_of(shop, name))
    shop.pause_schedule("a-2")

    def names(**filters: Any) -> list[str]:
        return [found.name for found in shop.list_schedules(**filters)]

    assert names() == ["a-1", "a-2", "b-1"]
    assert names(limit=2) == ["a-1", "a-2"]
    assert names(after="a-1", limit=1) == ["a-2"]
    assert names(prefix="a-") == ["a-1", "a-2"]
    assert names(state="PAUSED") == ["a-2"]
    assert (names(task="work"), names(task="other")) == (["a-1", "a-2", "b-1"], [])
    with pytest.raises(ConfigurationError, match="'PAUSED'"):
        shop.list_schedules(state="paused")  # type: ignore[typeddict-item]
    with pytest.raises(ConfigurationError, match="prefix"):
        shop.list_schedules(prefxi="a")  # type: ignore[call-arg]


class TestNextTicks:
    def test_the_next_ticks_are_the_first_ones_after_now(self, shop: App, db: StoreHarness) -> None:
        at = shop.put_schedule(schedule_of(shop)).at
        ticks = shop.next_ticks("hourly", 3)
        first = at.replace(minute=0, second=0, microsecond=0) + HOUR
        assert ticks == [first, first + HOUR, first + 2 * HOUR]
        assert len(shop.next_ticks("hourly")) == 5

    def test_a_tick_whose_jitter_is_not_over_is_still_to_come(self, shop: App, db: StoreHarness) -> None:
        stored = shop.put_schedule(schedule_of(shop, every="1d", jitter="23h"))
        move(db, "hourly", decided_to=timedelta(days=3))
        first = shop.next_ticks("hourly", 1)[0]
        due_at = first + timedelta(milliseconds=jitter_ms_of("hourly", first, 23 * 3_600_000))
        assert due_at > stored.at
        earlier = first - timedelta(days=1)
        assert (
            earlier + timedelta(milliseconds=jitter_ms_of("hourly", earlier, 23 * 3_600_000))
            <= shop.schedule_info("hourly").at
        )

    def test_ticks_before_the_start_and_from_the_end_on_do_not_exist(
        self, shop: App, db: StoreHarness
    ) -> None:
        day = datetime(2099, 1, 1, tzinfo=UTC)
        shop.put_schedule(schedule_of(shop, starts=day, ends=day + 2 * HOUR))
        assert shop.next_ticks("hourly", 5) == [day, day + HOUR]

    def test_a_limit_on_runs_ends_the_list(self, shop: App, db: StoreHarness) -> None:
        shop.put_schedule(schedule_of(shop, most_runs=2))
        assert len(shop.next_ticks("hourly", 5)) == 2

    def test_the_ticks_of_a_pause_are_left_out(self, shop: App, db: StoreHarness) -> None:
        shop.put_schedule(schedule_of(shop))
        until = datetime(2099, 1, 1, 0, 30, tzinfo=UTC)
        shop.pause_schedule("hourly", until=until)
        assert shop.next_ticks("hourly", 1) == [until.replace(minute=0) + HOUR]

    def test_an_ended_schedule_has_no_next_ticks(self, shop: App, db: StoreHarness) -> None:
        shop.put_schedule(schedule_of(shop))
        db.connection.execute(
            db.plain("update {schema}.schedules set ended_at = statement_timestamp(), next_at = null")
        )
        assert (shop.schedule_info("hourly").state, shop.next_ticks("hourly")) == ("ENDED", [])

    def test_a_zone_that_this_machine_does_not_know_is_reported(self, shop: App, db: StoreHarness) -> None:
        shop.put_schedule(schedule_of(shop, every=None, cron="@daily", timezone="Europe/Berlin"))
        db.connection.execute(
            db.plain(
                "update {schema}.schedules set timezone = 'Mars/Olympus',"
                ' timing = (timing::jsonb || \'{{"timezone": "Mars/Olympus"}}\')::json'
            )
        )
        with pytest.raises(ConfigurationError, match=r"Mars/Olympus.*tzdata"):
            shop.next_ticks("hourly")


class TestPauses:
    def test_a_pause_has_a_reason_and_an_end_and_stays_as_it_is(self, shop: App, db: StoreHarness) -> None:
        shop.put_schedule(schedule_of(shop))
        until = datetime(2099, 1, 1, tzinfo=UTC)
        paused = shop.pause_schedule("hourly", reason="mail server", until=until)
        assert (paused.state, paused.paused_by, paused.pause_reason) == ("PAUSED", "operator", "mail server")
        assert (paused.resume_at, paused.next_at) == (until, until)
        again = shop.pause_schedule("hourly", reason="another")
        assert (again.paused_at, again.pause_reason, again.resume_at) == (
            paused.paused_at,
            "mail server",
            until,
        )
        resumed = shop.resume_schedule("hourly")
        assert (resumed.state, resumed.held_because) == ("ACTIVE", "PAUSED")

    def test_a_schedule_that_is_not_paused_cannot_be_resumed(self, shop: App, db: StoreHarness) -> None:
        shop.put_schedule(schedule_of(shop))
        shop.put_schedule(schedule_of(shop, "hourly-2"))
        shop.pause_schedule("hourly-2")
        with pytest.raises(NotPaused, match=r"Schedule 'hourly' is not paused; paused schedules: hourly-2"):
            shop.resume_schedule("hourly")

    def test_invalid_arguments_of_a_pause_change_nothing(self, shop: App, db: StoreHarness) -> None:
        shop.put_schedule(schedule_of(shop))
        with pytest.raises(ConfigurationError, match="without a time zone"):
            shop.pause_schedule("hourly", until=datetime(2099, 1, 1))  # noqa: DTZ001 - a moment without a zone is the mistake
        with pytest.raises(ConfigurationError, match="printable"):
            shop.pause_schedule("hourly", reason="two\nlines")
        with pytest.raises(ConfigurationError, match=r"pause_schedule\.until.*must be after now"):
            shop.pause_schedule("hourly", until=datetime.now(UTC))
        assert shop.schedule_info("hourly").state == "ACTIVE"

    def test_the_end_of_a_pause_can_be_a_duration(self, shop: App, db: StoreHarness) -> None:
        shop.put_schedule(schedule_of(shop))
        paused = shop.pause_schedule("hourly", until="2h")
        assert paused.paused_at is not None
        assert paused.resume_at is not None
        assert abs(paused.resume_at - paused.paused_at - 2 * HOUR) < timedelta(minutes=1)


def test_a_run_now_is_a_task_of_the_schedule_without_a_tick(shop: App, db: StoreHarness) -> None:
    shop.put_schedule(schedule_of(shop))
    shop.pause_schedule("hourly")
    handle = shop.run_schedule("hourly")
    info = handle.info()
    assert (info.name, info.schedule, info.tick, info.state) == ("work", "hourly", None, "PENDING")
    assert shop.list_ticks("hourly") == []
    (claimed,) = db.claim()
    db.start(claimed)
    db.complete(claimed, result=b"7")
    assert handle.result(timeout="10s") == 7


def test_a_run_now_returns_the_live_task_with_its_key(shop: App, db: StoreHarness) -> None:
    work = shop._registry.task("work")
    assert work is not None
    shop.put_schedule(Schedule("hourly", work.with_options(key="k").call(1), every="1h"))
    first = shop.run_schedule("hourly")
    assert shop.run_schedule("hourly").id == first.id


def test_a_deleted_schedule_is_gone_and_its_runs_and_ticks_remain(shop: App, db: StoreHarness) -> None:
    stored = shop.put_schedule(schedule_of(shop))
    ticks = shop.backfill("hourly", since=stored.at - 2 * HOUR, until=stored.at)
    shop.delete_schedule("hourly")
    assert shop.list_schedules() == []
    assert [tick.at for tick in shop.list_ticks("hourly")] == ticks[::-1]
    with pytest.raises(UnknownName):
        shop.delete_schedule("hourly")


class TestBackfill:
    def test_a_backfill_sends_each_tick_once_in_order(self, shop: App, db: StoreHarness) -> None:
        stored = shop.put_schedule(schedule_of(shop, expires="1s"))
        last = stored.at.replace(minute=0, second=0, microsecond=0)
        expected = [last - 2 * HOUR, last - HOUR, last]
        since, until = expected[0], stored.at + HOUR
        assert shop.backfill("hourly", since=since, until=until, dry_run=True) == expected
        assert shop.list_ticks("hourly") == []
        assert shop.backfill("hourly", since=since, until=until) == expected
        assert shop.backfill("hourly", since=since, until=until) == []
        known = str(db.run(installation()))
        assert [(tick.at, tick.outcome, tick.task_id, tick.state) for tick in shop.list_ticks("hourly")] == [
            (at, "SENT", tick_task_id(known, "hourly", at), "PENDING") for at in reversed(expected)
        ]
        for at in expected:
            (claimed,) = db.claim()  # one at a time
            assert (claimed.tick, claimed.args, claimed.good_until) == (at, '{"n":7}', None)
            db.start(claimed)
            db.complete(claimed)

    def test_a_range_ends_before_its_end_and_leaves_out_what_was_sent(
        self, shop: App, db: StoreHarness
    ) -> None:
        stored = shop.put_schedule(schedule_of(shop))
        last = stored.at.replace(minute=0, second=0, microsecond=0)
        middle = last - HOUR
        assert shop.backfill("hourly", since=middle, until=last) == [middle]
        assert shop.backfill("hourly", since=middle - HOUR, until=last + HOUR, dry_run=True) == [
            middle - HOUR,
            last,
        ]

    def test_runs_of_a_backfill_can_start_at_once(self, shop: App, db: StoreHarness) -> None:
        at = shop.put_schedule(schedule_of(shop)).at
        assert len(shop.backfill("hourly", since=at - 5 * HOUR, until=at, overlap="allow")) == 5
        assert len(db.claim()) == 5

    def test_a_backfill_returns_only_the_ticks_that_it_sent(self, shop: App, db: StoreHarness) -> None:
        work = shop._registry.task("work")
        assert work is not None
        keyed = Schedule("hourly", work.with_options(key="k").call(1), every="1h")
        at = shop.put_schedule(keyed).at
        sent = shop.backfill("hourly", since=at - 5 * HOUR, until=at)
        assert len(sent) == len(db.table("tasks")) == 1
        assert [tick.at for tick in shop.list_ticks("hourly") if tick.outcome == "SENT"] == sent

    def test_ticks_that_the_schedule_does_not_have_are_not_sent(self, shop: App, db: StoreHarness) -> None:
        now = datetime.now(UTC)
        stored = shop.put_schedule(schedule_of(shop, starts=now - 3 * HOUR, ends=now - HOUR))
        found = shop.backfill("hourly", since=now - 9 * HOUR, until=now + 9 * HOUR, dry_run=True)
        assert len(found) == 2
        assert all(now - 3 * HOUR <= tick < now - HOUR for tick in found)
        assert shop.backfill("hourly", since=stored.at + HOUR, until=stored.at + 9 * HOUR) == []

    def test_a_range_that_is_empty_or_too_long_is_rejected(self, shop: App, db: StoreHarness) -> None:
        at = shop.put_schedule(schedule_of(shop, every="1s")).at
        with pytest.raises(ConfigurationError, match="must be before until"):
            shop.backfill("hourly", since=at, until=at)
        with pytest.raises(ConfigurationError, match=r"more than 10,000 ticks.*or earlier"):
            shop.backfill("hourly", since=at - timedelta(days=300), until=at)
        with pytest.raises(ConfigurationError, match="'buffer_all'"):
            shop.backfill("hourly", since=at - HOUR, until=at, overlap="skip")  # type: ignore[arg-type]
        assert db.table("tasks") == []

    def test_ten_thousand_ticks_are_sent(self, shop: App, db: StoreHarness) -> None:
        at = shop.put_schedule(schedule_of(shop, every="1s")).at.replace(microsecond=0)
        since = at - timedelta(seconds=10_000)
        assert len(shop.backfill("hourly", since=since, until=at)) == 10_000
        assert len(db.table("tasks", "id")) == len(db.table("ticks", "at")) == 10_000


async def test_each_method_has_an_async_version_that_does_the_same(shop: App, db: StoreHarness) -> None:
    stored = await shop.aput_schedule(schedule_of(shop))
    assert (await shop.aschedule_info("hourly")).name == "hourly"
    assert [found.name for found in await shop.alist_schedules(prefix="h")] == ["hourly"]
    assert len(await shop.anext_ticks("hourly", 2)) == 2
    assert (await shop.apause_schedule("hourly", reason="x")).state == "PAUSED"
    assert (await shop.aresume_schedule("hourly")).state == "ACTIVE"
    assert (await (await shop.arun_schedule("hourly")).ainfo()).schedule == "hourly"
    sent = await shop.abackfill("hourly", since=stored.at - HOUR, until=stored.at, overlap="allow")
    assert [tick.at for tick in await shop.alist_ticks("hourly", limit=1)] == sent
    await shop.adelete_schedule("hourly")
    assert await shop.alist_schedules() == []


async def test_a_blocking_method_on_an_event_loop_names_its_async_version(shop: App) -> None:
    for call, name in (
        (lambda: shop.put_schedule(schedule_of(shop)), "aput_schedule"),
        (lambda: shop.run_schedule("hourly"), "arun_schedule"),
    ):
        with pytest.raises(BlockingCallInLoop, match=rf"await App\.{name}"):
            call()


async def test_the_code_of_a_run_reads_the_tick(app: App) -> None:
    @app.task
    async def in_loop(ctx: Context) -> str:
        return str(ctx.tick)

    @app.task
    def in_thread() -> str:
        return str(Context.current().tick)

    async with working(app):
        for task in (in_loop, in_thread):
            stored = await app.aput_schedule(Schedule(task.name, task.call(), every="1h"))
            (tick,) = await app.abackfill(task.name, since=stored.at - HOUR, until=stored.at)
            run = (await app.alist_ticks(task.name))[0].task_id
            assert run is not None
            assert await app.handle(run).aresult(timeout="30s") == str(tick)
            now = await app.arun_schedule(task.name)
            assert await now.aresult(timeout="30s") == "None"
            assert await (await task.asend()).aresult(timeout="30s") == "None"


async def test_a_run_whose_task_fails_is_an_ordinary_failed_task(app: App) -> None:
    @app.task
    async def fails() -> None:
        raise ValueError("no data")

    async with working(app):
        await app.aput_schedule(Schedule("fails", fails.call(), every="1h"))
        with pytest.raises(TaskFailed, match="no data"):
            await (await app.arun_schedule("fails")).aresult(timeout="30s")


async def test_an_in_process_worker_stores_the_declared_schedules_and_sends_their_ticks(app: App) -> None:
    ran: asyncio.Queue[datetime | None] = asyncio.Queue()

    @app.schedule("quick", every="1s")
    @app.task
    async def quick(ctx: Context) -> None:
        ran.put_nowait(ctx.tick)

    async with working(app):
        ticks = [await asyncio.wait_for(ran.get(), timeout=60) for _ in range(2)]
    found = await app.aschedule_info("quick")
    assert found.owner == definition_of(app).schedules.owner  # type: ignore[union-attr]
    sent = [tick.at for tick in await app.alist_ticks("quick") if tick.outcome == "SENT"]
    assert None not in ticks
    assert set(ticks) <= set(sent)
    assert len(set(ticks)) == 2
