"""`everbeat metrics` prints and serves the metrics of a cluster. The parser of the Prometheus client reads them."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from msgspec.structs import asdict

from everbeat import App
from everbeat.cli.metrics import ClusterMetrics
from everbeat.domain.limit.model import LimitDefinition
from everbeat.domain.metrics import names
from everbeat.domain.metrics.text import CONTENT_TYPE
from everbeat.domain.series import RateCounter
from everbeat.store import series
from everbeat.store.inspection import read_clock
from everbeat.store.limits import declare_limits
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.client.conftest import app
from tests.domain.test_metrics import samples
from tests.store.conftest import StoreHarness

__all__ = ["app"]

Found = dict[str, dict[tuple[tuple[str, str], ...], float]]


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        yield made
        made.database.close()


def value(found: Found, name: str, **labels: str) -> float:
    return found[name][tuple(sorted(labels.items()))]


def test_an_empty_cluster_has_explicit_zeros(everbeat: Command, db: StoreHarness) -> None:  # O5
    found = samples(everbeat("metrics").assert_code(0).out)
    for state in ("due", "scheduled", "suspended", "claimed", "running"):
        assert value(found, "everbeat_tasks", queue="default", state=state) == 0
    for state in ("live", "late", "draining", "suspect"):
        assert value(found, "everbeat_workers", state=state) == 0
    for state in ("RUNNING", "PAUSED", "CANCELLING"):
        assert value(found, "everbeat_workflows", state=state) == 0
    zeros = (
        names.SUPERVISORS, names.BEAT_AGE_SECONDS, names.LEASES_OVERDUE, names.SUSPECTS, names.WORKFLOWS_STUCK, names.ALL_PAUSED,
    )  # fmt: skip
    assert [value(found, each.name) for each in zeros] == [0] * len(zeros)
    assert value(found, "everbeat_oldest_due_seconds", queue="default") == 0
    assert value(found, "everbeat_slots_wanted", queue="default") == 0
    assert value(found, "everbeat_queue_paused", queue="default") == 0
    assert value(found, "everbeat_table_dead_rows", table="tasks") >= 0
    (info,) = found["everbeat_build_info"]
    assert dict(info).keys() == {"version", "schema", "python"}


def test_the_metrics_equal_the_state_of_the_cluster(
    everbeat: Command, db: StoreHarness, app: App
) -> None:  # O5
    db.supervisor("s1", "w1")
    db.run(declare_limits([LimitDefinition(name="stripe", concurrency=3)]))
    for _ in range(4):
        db.send(queue="mail", gates='{"stripe"}')
    db.send(queue="films")
    held = db.claim(starts=5, queues=("mail",))
    app.pause_all(reason="an incident")
    found = samples(everbeat("metrics").assert_code(0).out)
    assert value(found, "everbeat_tasks", queue="films", state="due") == 1
    assert value(found, "everbeat_tasks", queue="mail", state="running") == len(held) == 3
    assert value(found, "everbeat_oldest_due_seconds", queue="films") > 0
    states = [
        value(found, "everbeat_workers", state=each) for each in ("live", "late", "draining", "suspect")
    ]
    assert sum(states) == 1
    assert value(found, "everbeat_supervisors") == 1
    assert value(found, "everbeat_limit_permits", limit="stripe", state="held") == 3
    assert value(found, "everbeat_limit_permits", limit="stripe", state="free") == 0
    assert value(found, "everbeat_limit_waiting", limit="stripe") == 1
    assert value(found, "everbeat_queue_paused", queue="films") == 1
    assert value(found, "everbeat_all_paused") == 1


def test_a_fresh_sample_of_the_queues_is_used_and_an_old_one_is_not(
    everbeat: Command, db: StoreHarness
) -> None:
    def due() -> float:
        found = samples(everbeat("metrics").assert_code(0).out)
        return value(found, "everbeat_tasks", queue="default", state="due")

    db.send()
    assert db.run(series.sample_depths(taken_by="s1")) is True
    db.send()
    assert due() == 1, "the sample is seconds old"
    found = samples(everbeat("metrics").assert_code(0).out)
    assert value(found, "everbeat_last_look_timestamp_seconds", service="depths") > 1e9
    db.connection.execute(db.plain("update {schema}.turns set taken_at = taken_at - interval '2 minutes'"))
    assert due() == 2, "no supervisor samples any more"


def test_a_queue_that_became_empty_reports_zero(db: StoreHarness, app: App) -> None:
    cluster = ClusterMetrics(app)
    task_id = db.send(queue="films")
    assert value(samples(cluster.read().text()), "everbeat_oldest_due_seconds", queue="films") > 0
    db.connection.execute(db.plain("delete from {schema}.tasks where id = %s"), [task_id])
    found = samples(cluster.read().text())
    assert value(found, "everbeat_oldest_due_seconds", queue="films") == 0
    assert value(found, "everbeat_tasks", queue="films", state="due") == 0


def test_json_has_the_same_metrics(everbeat: Command, db: StoreHarness) -> None:
    document = everbeat("metrics", "--json").assert_code(0).document
    by_name = {each["name"]: each for each in document["metrics"]}
    assert by_name["everbeat_leases_overdue"]["samples"] == [{"labels": {}, "value": 0}]
    assert by_name["everbeat_tasks"]["type"] == "gauge"


def test_the_command_serves_the_metrics_until_it_is_stopped(everbeat: Command, db: StoreHarness) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "everbeat", "metrics", "--listen", "127.0.0.1:0"],
        env=everbeat.environment, cwd=everbeat.folder, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        match = re.search(r"Serving /metrics at (127\.0\.0\.1:\d+)\.", said)
        assert match, said
        with urllib.request.urlopen(f"http://{match[1]}/metrics", timeout=30) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            assert value(samples(answer.read().decode()), "everbeat_leases_overdue") == 0
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_scrape_fails_while_the_database_is_away_and_only_stderr_says_where_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = App("postgresql://nobody@127.0.0.1:1/none?connect_timeout=1")
    try:
        found = ClusterMetrics(away)
        answer = found.answer()
        found._last = (-math.inf, answer)
        assert found.answer() == answer
    finally:
        away.close()
    assert answer.status == 503
    assert [secret for secret in ("127.0.0.1", "nobody", "postgresql:") if secret in answer.body] == []
    said = capsys.readouterr().err
    assert (said.count("Scrapes fail"), "nobody@127.0.0.1" in said) == (1, True), "once per outage"


def test_the_slots_wanted_follow_from_due_tasks_and_the_run_time_of_the_last_minutes(
    everbeat: Command, db: StoreHarness, app: App
) -> None:
    def wanted(queue: str) -> float:
        return value(samples(everbeat("metrics").assert_code(0).out), "everbeat_slots_wanted", queue=queue)

    for _ in range(4):
        db.send(queue="films")
    assert wanted("films") == 1, "the run time is unknown"
    counter = RateCounter()
    counter.ended("films", "render", "completed", run_s=40.0)
    counter.ended("films", "render", "retried", run_s=20.0)
    now = db.run(read_clock()).replace(second=0, microsecond=0)
    rows = [{"at": now, **asdict(each)} for each in counter.take()]
    db.run(series.write_rates(rows, supervisor="s1"))
    assert wanted("films") == 2, "four tasks of 30 s in a minute"
    db.supervisor("s1", "w1")
    assert len(db.claim(starts=4, queues=("films",))) == 4
    assert wanted("films") == 4, "those in use"
    db.send(queue="films")
    assert wanted("films") == 5
    app.pause_all(reason="an incident")
    assert wanted("films") == 4, "no due task starts in a paused queue"


@pytest.mark.parametrize(("silent_s", "state"), [(20, "live"), (70, "late"), (400, "suspect")])
def test_commands_and_metrics_call_a_silent_tree_what_the_dashboard_calls_it(
    everbeat: Command, db: StoreHarness, silent_s: int, state: str
) -> None:
    db.supervisor("s1", "w1")
    aged = f"update {{schema}}.supervisors set last_beat_at = now() - interval '{silent_s} s'"
    db.connection.execute(db.plain(aged))
    db.connection.execute(db.plain("update {schema}.workers set started_at = now() - interval '1 h'"))
    found = samples(everbeat("metrics").assert_code(0).out)
    assert [each for each in ("live", "late", "suspect") if value(found, "everbeat_workers", state=each)] == [
        state
    ]
    assert everbeat("workers").assert_code(0).out.split().count(state) == 2  # the worker and its supervisor
    assert state in everbeat("top", "--once").assert_code(0).out.split()
    is_stale = "stale" in everbeat("workers", "--stale-after", "60s").assert_code(0).out.split()
    assert is_stale == (silent_s > 60)
