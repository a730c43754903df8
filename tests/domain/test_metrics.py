"""The text format of metrics, read by the parser of the Prometheus client, and the rules for their names."""

from __future__ import annotations

import math
import re
from operator import add
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everbeat.domain.metrics import names
from everbeat.domain.metrics.demand import slots_wanted
from everbeat.domain.metrics.events import MOST_RECENT, EventTotals
from everbeat.domain.metrics.names import Metric
from everbeat.domain.metrics.text import OTHER, Histogram, MetricsText, bounded
from everbeat.domain.series import EventCounts, RecoveredLease

ALL = [each for each in vars(names).values() if isinstance(each, Metric)]
HOSTILE = 'a"b\\c\nd\x1b[31m{e="f"} 1\u202e'


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the values of the samples by name and labels, as Prometheus reads them."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            found.setdefault(each.name, {})[tuple(sorted(each.labels.items()))] = each.value
    return found


def test_prometheus_reads_values_labels_and_types() -> None:
    found = MetricsText()
    found.add(names.TASKS, {("mail", "due"): 3, ("mail", "running"): 0})
    found.add(names.OLDEST_DUE_SECONDS, {("mail",): 1.25})
    found.add(names.LEASES_OVERDUE, 0)
    found.add(names.RECOVERIES, {("mail", "RUNNING", "child_exit", "retry"): 7})
    read = samples(found.text())
    assert read["everbeat_tasks"] == {
        (("queue", "mail"), ("state", "due")): 3,
        (("queue", "mail"), ("state", "running")): 0,
    }
    assert read["everbeat_oldest_due_seconds"] == {(("queue", "mail"),): 1.25}
    assert read["everbeat_leases_overdue"] == {(): 0}
    assert list(read["everbeat_recoveries_total"].values()) == [7]
    kinds = {family.name: family.type for family in text_string_to_metric_families(found.text())}
    assert kinds == {
        "everbeat_tasks": "gauge",
        "everbeat_oldest_due_seconds": "gauge",
        "everbeat_leases_overdue": "gauge",
        "everbeat_recoveries": "counter",
    }


def test_a_histogram_is_cumulative_and_ends_with_infinity() -> None:
    histogram = Histogram.empty((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 30.0):
        histogram.observe(seconds)
    found = MetricsText()
    found.add(names.NOTICE_SECONDS, {("child_exit",): histogram})
    read = samples(found.text())
    buckets = {dict(labels)["le"]: value for labels, value in read["everbeat_notice_seconds_bucket"].items()}
    assert {float(bound): value for bound, value in buckets.items()} == {0.1: 2, 1.0: 3, math.inf: 4}
    assert list(read["everbeat_notice_seconds_count"].values()) == [4]
    assert list(read["everbeat_notice_seconds_sum"].values()) == [pytest.approx(30.65)]


def test_a_hostile_name_is_one_label_value_without_control_characters() -> None:
    found = MetricsText()
    found.add(names.LIMIT_WAITING, {(HOSTILE,): 2, ("plain",): 1, ("\udce9",): 0})
    text = found.text()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", text)
    read = samples(text)["everbeat_limit_waiting"]
    assert sorted(read.values()) == [0, 1, 2]
    assert len(text.splitlines()) == 5


def test_names_beyond_the_limit_are_joined_as_other() -> None:
    given = {(f"q{n:04}", "due"): 1.0 for n in range(300)} | {("q0299", "running"): 5.0}
    found = bounded(given, add, most=200)
    assert len({values[0] for values in found}) == 201
    assert found[OTHER, "due"] == 100
    assert found[OTHER, "running"] == 5
    assert sum(found.values()) == sum(given.values())
    pairs = {("mail", "a"): 1, ("mail", "b"): 2, ("films", "c"): 4}
    assert bounded(pairs, add, most=1, label=1) == {
        ("mail", "a"): 1,
        ("mail", OTHER): 2,
        ("films", OTHER): 4,
    }
    assert bounded({("a",): 1.0, ("b",): 3.0, ("c",): 2.0}, max, most=1) == {("a",): 1.0, (OTHER,): 3.0}


def test_a_metric_cannot_be_added_twice() -> None:
    found = MetricsText()
    found.add(names.LEASES_OVERDUE, 0)
    with pytest.raises(ValueError, match="added twice"):
        found.add(names.LEASES_OVERDUE, 1)


@pytest.mark.parametrize("metric", ALL, ids=lambda each: each.name)
def test_each_metric_keeps_the_naming_rules_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"everbeat_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|count|sum|bucket)$", metric.name)
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds")
    assert not {"id", "task_id", "worker", "worker_id", "supervisor", "supervisor_id", "le"} & set(
        metric.labels
    )
    assert metric.help.endswith(".")


def test_no_two_metrics_have_the_same_name() -> None:
    assert len({each.family for each in ALL}) == len(ALL) > 20


@pytest.mark.parametrize(
    ("due", "held", "run_s", "wanted"),
    [
        (0, 0, 5.0, 0),
        (0, 3, 5.0, 3),
        (1, 0, 0.001, 1),
        (120, 2, 30.0, 62),
        (10_000, 0, 0.06, 10),
        (50, 0, None, 1),
        (50, 4, None, 5),
    ],
)
def test_the_wanted_slots_start_all_due_tasks_within_a_minute(
    due: int, held: int, run_s: float | None, wanted: int
) -> None:
    assert slots_wanted(due=due, held=held, run_s=run_s) == wanted
    assert slots_wanted(due=due, held=held, run_s=run_s, is_paused=True) == held


def test_a_tree_that_recovers_many_tasks_remembers_few_of_them() -> None:
    totals = EventTotals()
    lease = RecoveredLease(UUID(int=1), 1, "mail", "send", "RUNNING", "age", "retry", 2.0, False)
    totals.add(EventCounts(recovered=[lease] * 2_000))
    assert totals.recoveries == {("mail", "RUNNING", "age", "retry"): 2_000}
    assert len(totals.recent) == MOST_RECENT
    assert not totals.poisoned
