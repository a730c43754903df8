"""The charts of Pulse and Queues: their numbers in HTML and JSON, their ranges and marks, and what they show without any number."""

from __future__ import annotations

import asyncio
import itertools
import re
from datetime import datetime, timedelta

import pytest

from everbeat.domain.charts import RANGES, ChartMark, ChartPoint, Charts, nice_top, spans_of
from everbeat.domain.series import RateBucket, quantile_s
from everbeat.errors.wording import brief_duration
from everbeat.runtime.clock import SystemClock
from everbeat.web.chart_drawing import (
    DEPTHS,
    OUTCOMES,
    WAITS,
    ChartFrame,
    areas_svg,
    bars_svg,
    lines_svg,
    nice_seconds,
    summary_of,
)
from everbeat.web.database_clock import PageClock
from everbeat.web.kept_charts import KeptCharts
from everbeat.web.queue_rates import rates_of
from everbeat.web.strip_drawing import sparkline
from tests.web.conftest import NewVisitor, Workers

HISTORY = """
insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed, failed, retried, crashed, waits, runs)
select 60, date_trunc('minute', now()) - n * interval '1 minute', q, 'charge', '', 10, 7, 1, 1, 1,
    array_fill(0::bigint, array[8]) || 10::bigint || array_fill(0::bigint, array[15]),
    array_fill(0::bigint, array[10]) || 10::bigint || array_fill(0::bigint, array[13])
from generate_series(1, 30) n cross join unnest(array['mail', 'film']) q
"""
SAMPLES = """
insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)
select 60, date_trunc('minute', now()) - n * interval '1 minute', q, n, 2, 1, 3, 4, 9.5, '{{}}'
from generate_series(1, 30) n cross join unnest(array['mail', 'film']) q
"""
AT = datetime.fromisoformat("2026-11-29T14:03:20+00:00")


@pytest.fixture
def busy(workers: Workers) -> Workers:
    """Return the workers of an installation with half an hour of rates and depths."""
    for text in (HISTORY, SAMPLES):
        workers.db.connection.execute(workers.db.plain(text))
    return workers


@pytest.fixture
def in_one_minute(busy: Workers, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Return them with pages for which the minute of the fixture never ends."""
    newest = busy.db.plain("select max(at) + interval '90 seconds' from {schema}.rates")
    row = busy.db.connection.execute(newest).fetchone()
    assert row is not None
    monkeypatch.setattr(PageClock, "now", lambda _: row[0])
    return busy


def charts(points: list[ChartPoint], marks: tuple[ChartMark, ...] = ()) -> Charts:
    return Charts(
        range="1h",
        bucket_s=60,
        since=points[0].at,
        until=points[-1].at + timedelta(seconds=60),
        queue=None,
        points=points,
        marks=marks,
    )


def frame(points: list[ChartPoint], marks: tuple[ChartMark, ...] = (), **more: datetime) -> ChartFrame:
    return ChartFrame(
        charts=charts(points, marks),
        shown_at=more.get("shown_at"),
        link_at=lambda at: f"/pulse?at={at:%H:%M}",
    )


def minutes(*points: dict[str, float]) -> list[ChartPoint]:
    return [
        ChartPoint(at=AT.replace(second=0) + timedelta(minutes=place), **values)  # type: ignore[arg-type]
        for place, values in enumerate(points)
    ]


def test_the_spans_of_a_range_end_with_the_one_that_contains_now() -> None:
    for chosen in RANGES:
        spans = spans_of(chosen, now=AT)
        size = timedelta(seconds=chosen.bucket_s)
        assert spans[-1] <= AT < spans[-1] + size
        assert len(spans) == chosen.seconds // chosen.bucket_s
        assert {later - earlier for earlier, later in itertools.pairwise(spans)} == {size}
        assert len(spans) <= 72, "the number of marks on paper is bounded for each range"


@pytest.mark.parametrize(
    ("highest", "top"),
    [(0, 1), (0.03, 0.04), (1, 1), (7, 10), (11, 20), (41, 50), (999, 1_000), (1_001, 2_000)],
)
def test_the_end_of_an_axis_is_a_round_number_that_is_not_below_the_highest(
    highest: float, top: float
) -> None:
    assert nice_top(highest) == pytest.approx(top)


@pytest.mark.parametrize(
    ("highest", "words"),
    [(7, "10 s"), (56, "1 m"), (64, "2 m"), (250, "6 m"), (3_500, "1 h"), (50_000, "20 h"), (80_000, "1 d")],
)
def test_an_axis_of_durations_has_one_unit_at_its_end_and_at_its_half(highest: float, words: str) -> None:
    top = nice_seconds(highest)
    assert top >= highest
    assert brief_duration(top) == words
    assert len(brief_duration(top / 2).split()) == 2


def test_bars_are_stacked_to_the_sum_and_distinguished_without_color() -> None:
    drawn = bars_svg(frame(minutes({"completed": 6, "failed": 4}, {})), "k")
    heights = [float(each) for each in re.findall(r'<rect class="f-[a-z]+"[^>]*height="([\d.]+)"', drawn)]
    assert sum(heights) == pytest.approx(118)
    assert heights[0] / heights[1] == pytest.approx(1.5, rel=0.01)
    assert 'fill="url(#k-cross)"' in drawn
    assert 'id="k-cross"' in drawn
    assert "6 completed, 4 failed, crashed or lost" in drawn
    assert drawn.count("<a ") == 1, "a span without an end has no bar"


def test_an_outcome_that_is_rare_is_still_seen() -> None:
    drawn = bars_svg(frame(minutes({"completed": 100_000, "failed": 1})), "k")
    assert 'class="f-dead"' in drawn
    assert min(float(each) for each in re.findall(r'height="([\d.]+)"', drawn)) >= 1.0


def test_a_line_has_gaps_and_a_single_measurement_is_a_dot() -> None:
    drawn = lines_svg(frame(minutes({"wait_p50": 1.0}, {}, {"wait_p50": 2.0}, {"wait_p50": 3.0})), WAITS[:1])
    assert drawn.count("<circle") == 1
    assert drawn.count('<path class="l-run') == 1
    assert drawn.count("L") == 1, "the line connects two points"


def test_a_single_row_and_no_row_can_be_drawn() -> None:
    for points in (minutes({"due": 3, "completed": 1, "wait_p50": 0.5}), minutes({})):
        for drawn in (
            bars_svg(frame(points), "k"),
            areas_svg(frame(points), "k"),
            lines_svg(frame(points), WAITS),
        ):
            assert "nan" not in drawn.lower()
            assert drawn.count("<svg") == drawn.count("</svg>")
    assert areas_svg(frame(minutes({}, {"due": 3}, {})), "k").count('class="l-late"') == 1, (
        "one sample is drawn as wide as a bar"
    )
    assert charts(minutes({})).is_empty
    assert summary_of(charts(minutes({})), OUTCOMES, durations=False) == "nothing was counted"


def test_areas_are_stacked_and_a_series_without_tasks_is_left_out() -> None:
    tasks = minutes({"due": 3, "running": 1}, {"due": 5, "running": 1}, {}, {"due": 1}, {"due": 1})
    drawn = areas_svg(frame(tasks), "k", DEPTHS)
    assert drawn.count('class="f-late area"') == 2, "a span that was not sampled divides the area"
    assert drawn.count('class="f-run area"') == 1
    assert 'class="l-sleep"' not in drawn


def test_marks_and_the_shown_moment_are_lines_and_hostile_words_are_text() -> None:
    points = minutes({"completed": 1}, {"completed": 1})
    mark = ChartMark(at=points[1].at, kind="pause", words='paused: <script>"x"</script>')
    drawn = bars_svg(frame(points, (mark,), shown_at=points[1].at), "k")
    assert "<script" not in drawn
    assert 'class="l-late dash"' in drawn
    assert "l-ink thick" in drawn


def test_a_short_line_is_not_drawn() -> None:
    assert sparkline([1]) == ""
    assert "<path" in sparkline([1, 2])


async def test_pulse_has_the_charts_as_drawings_as_tables_and_as_records(
    in_one_minute: Workers, new_visitor: NewVisitor
) -> None:
    visitor = new_visitor("see")
    found = (await visitor.json("/pulse"))["charts"]
    assert len(found["points"]) == 60
    assert sum(point["completed"] for point in found["points"]) == 2 * 30 * 7
    assert sum(point["failed"] for point in found["points"]) == 2 * 30 * 2
    assert found["points"][-1]["due"] is None, "the present minute has not been sampled"
    point = found["points"][-3]
    assert (point["due"], point["running"], point["oldest_due_s"]) == (4, 8, 9.5)
    assert 0.2 <= point["wait_p50"] <= 0.5
    assert 1.0 <= point["run_p95"] <= 2.0
    page = (await visitor.get("/pulse")).text
    assert page.count("data-chart=") == 5
    assert "Completed: at most 14, last 14" in page
    assert [queue["queue"] for queue in (await visitor.json("/pulse"))["busiest_queues"]] == ["film", "mail"]


async def test_one_queue_has_its_own_charts_and_the_list_has_a_line_for_each(
    in_one_minute: Workers, new_visitor: NewVisitor
) -> None:
    in_one_minute.send(queue="mail")
    visitor = new_visitor("see")
    found = (await visitor.json("/queues", queue="mail"))["charts"]
    assert found["queue"] == "mail"
    assert sum(point["completed"] for point in found["points"]) == 30 * 7
    assert found["points"][-3]["due"] == 2
    page = (await visitor.get("/queues")).text
    assert "data-chart=" not in page
    assert re.search(r'aria-label="Charts of mail"><svg class="spark"', page)


async def test_a_range_is_a_link_and_sums_do_not_depend_on_it(busy: Workers, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("see")
    for chosen in RANGES:
        found = (await visitor.json("/pulse", range=chosen.name))["charts"]
        assert (found["range"], found["bucket_s"]) == (chosen.name, chosen.bucket_s)
        assert sum(point["completed"] for point in found["points"]) == 2 * 30 * 7, chosen.name
    page = (await visitor.get("/pulse", range="6h")).text
    assert re.search(r'href="/pulse\?range=6h#charts" aria-current="true"', page)
    assert (await visitor.json("/pulse", range="nonsense"))["charts"]["range"] == "1h"


async def test_a_queue_that_was_sampled_without_tasks_has_zeros(
    busy: Workers, new_visitor: NewVisitor
) -> None:
    busy.db.connection.execute(
        busy.db.plain(
            "update {schema}.depths set queue = null, due = null, running = null, table_bytes = 1 where queue = 'mail'"
        )
    )
    found = (await new_visitor("see").json("/queues", queue="mail"))["charts"]["points"]
    assert [point["due"] for point in found[-3:]] == [0, 0, None]


async def test_an_installation_without_any_count_says_so(workers: Workers, new_visitor: NewVisitor) -> None:
    page = (await new_visitor("see").get("/pulse")).text
    assert "Nothing was counted in this range" in page
    assert "data-chart=" not in page


async def test_pauses_deaths_and_new_code_are_marked(busy: Workers, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("operate")
    busy.send(queue="mail")
    answer = await visitor.post("/queues/pause", name="mail", reason="stop")
    assert answer.status_code == 303
    busy.start()
    (lease,) = busy.db.leases()
    busy.db.recover(lease, "retry", noticed_by="session")
    found = (await visitor.json("/pulse"))["charts"]["marks"]
    assert [(mark["kind"], mark["words"].partition(" by ")[0]) for mark in found] == [
        ("pause", "paused: queue mail"),
        ("death", "host died, 1 task recovered"),
    ]
    film = (await visitor.json("/queues", queue="film"))["charts"]["marks"]
    assert [mark["kind"] for mark in film] == ["death"], "a pause of another queue is not marked"
    busy.db.connection.execute(
        busy.db.plain(
            "update {schema}.workers set ended_at = now() - interval '20 minutes', started_at = now() - interval '1 day' where id = 'w1'"
        )
    )
    busy.db.connection.execute(
        busy.db.plain(
            "update {schema}.workers set metadata = '{{\"tasks\": [\"new\"]}}', started_at = now() - interval '10 minutes' where id = 'w2'"
        )
    )
    kinds = [mark["kind"] for mark in (await new_visitor("see").json("/pulse"))["charts"]["marks"]]
    assert kinds[0] == "deploy"


async def test_viewers_share_one_reading_of_a_chart(busy: Workers, new_visitor: NewVisitor) -> None:
    visitor = new_visitor("see")
    pages = await asyncio.gather(*(visitor.json("/pulse") for _ in range(3)))
    busy.db.connection.execute(busy.db.plain("truncate {schema}.rates"))
    pages.append(await visitor.json("/pulse"))
    assert {sum(point["completed"] for point in page["charts"]["points"]) for page in pages} == {420}
    other = await visitor.json("/pulse", range="6h")
    assert sum(point["completed"] for point in other["charts"]["points"]) == 0


async def test_a_kept_reading_ends_and_a_failed_one_is_not_kept() -> None:
    class Standing(SystemClock):
        at = 0.0

        def monotonic(self) -> float:
            return self.at

    clock, readings = Standing(), iter([1, 2, 3])
    kept = KeptCharts(clock=clock)

    async def reading() -> int:
        return next(readings)

    async def failing() -> int:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await kept.read("a", RANGES[0], failing)
    assert [await kept.read("a", RANGES[0], reading) for _ in range(2)] == [1, 1]
    clock.at = 11.0
    assert await kept.read("a", RANGES[0], reading) == 2
    for number in range(70):
        assert await kept.read(number, RANGES[1], lambda number=number: asyncio.sleep(0, number)) == number  # type: ignore[misc]
    assert await kept.read("a", RANGES[0], reading) == 3


async def test_the_list_of_queues_shows_what_each_did_in_the_last_ten_minutes(
    busy: Workers, new_visitor: NewVisitor
) -> None:
    busy.send("charge", queue="mail")
    visitor = new_visitor("see")
    document = await visitor.json("/queues")
    rates = {each["queue"]: each for each in document["rates"]}
    mail = rates["mail"]
    assert mail["started"] in (90, 100), "nine or ten whole minutes"
    assert (mail["ended"], mail["bad"]) == (mail["started"], mail["started"] // 5)
    # All waits lie in one class, and all runs in another one.
    assert mail["wait_p95_s"] == pytest.approx(quantile_s([0] * 8 + [10], 0.95))
    assert mail["run_p95_s"] == pytest.approx(quantile_s([0] * 10 + [10], 0.95))
    page = (await visitor.get("/queues")).text
    assert f'<span class="t-dead">{mail["bad"]} failed</span>' in page
    words = ", ".join(brief_duration(mail[name]) for name in ("wait_p95_s", "run_p95_s"))
    assert f'data-h="Wait, run p95">{words}</td>' in page


def test_rates_that_two_spans_contain_are_added_up() -> None:
    def bucket(started: int) -> RateBucket:
        counts = [0] * 3 + [started] + [0] * 20
        return RateBucket(
            AT, "mail", None, started, started, 0, 0, 0, 0, 0, 0, 0, 0, 1.0, 1.0, counts, counts
        )

    (found,) = rates_of([bucket(3), bucket(4)]).values()
    assert (found.started, found.ended, found.bad) == (7, 7, 0)
    assert found.wait_p95_s == quantile_s([0, 0, 0, 7], 0.95)
