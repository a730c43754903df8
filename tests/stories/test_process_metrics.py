"""A supervisor serves the metrics of its processes. The parser of the Prometheus client reads them, and they equal what happened."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from types import ModuleType

import pytest

from everbeat import __version__
from everbeat.domain.metrics.text import CONTENT_TYPE
from tests.domain.test_metrics import samples
from tests.stories.scenario import FAST, Scenario, Tree, program_of
from tests.stories.test_probes import free_port

pytestmark = pytest.mark.story

AGAIN = {"queue": "default", "task": "wait_for_on_crash"}
OUTCOMES = ("completed", "failed", "retried", "cancelled", "suspended", "released", "crashed", "lost")
Found = dict[str, dict[tuple[tuple[str, str], ...], float]]


def value(found: Found, name: str, **labels: str) -> float:
    return found[name][tuple(sorted(labels.items()))]


class Scraped:
    """A tree whose metrics are read over HTTP."""

    def __init__(self, scenario: Scenario, *, program: str = "sample_tasks") -> None:
        self.port = free_port()
        self.tree: Tree = scenario.ready_tree(
            program=program,
            recovery=FAST,
            worker={"async_concurrency": 4},
            options=("--probe", f"127.0.0.1:{self.port}"),
        )

    def read(self) -> Found:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            return samples(answer.read().decode())


@pytest.mark.long
def test_the_metrics_of_a_supervisor_equal_what_happened_in_its_processes(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # O5
    scraped = Scraped(scenario)
    before = scraped.read()
    assert (
        value(
            before,
            "everbeat_recoveries_total",
            queue="default",
            was="RUNNING",
            noticed_by="child_exit",
            action="retry",
        )
        == 0
    )
    assert [
        value(before, "everbeat_late_writes_refused_total", verb=verb)
        for verb in ("start", "store", "settle")
    ] == [0, 0, 0]
    assert value(before, "everbeat_rerun_seconds_count", noticed_by="session") == 0
    assert value(before, "everbeat_schedule_late_seconds_count") == 0
    assert value(before, "everbeat_process_exits_total", in_order="false") == 0
    assert value(before, "everbeat_schedule_ticks_total", outcome="missed") == 0
    assert value(before, "everbeat_database_up") == 1
    (info,) = before["everbeat_build_info"]
    assert dict(info)["version"] == __version__
    assert value(before, "everbeat_beats_failed_total") == 0

    for each in [sample_tasks.quick.send(n) for n in range(20)]:
        each.result(timeout=30)
    sent = sample_tasks.wait_for_on_crash.send("go")
    scenario.until(scenario.started(sent.id), within=20, what="it runs")
    scenario.until(
        lambda: value(scraped.read(), "everbeat_slots", state="busy") == 1, within=20, what="a slot is busy"
    )
    scenario.until(
        lambda: sum(scraped.read()["everbeat_attempts_started_total"].values()) == 21,
        within=20,
        what="the supervisor has the worker's counts",
    )
    (worker,) = scenario.workers(scraped.tree)
    os.kill(worker["pid"], signal.SIGKILL)
    scenario.until(scenario.started(sent.id, 2), within=20, what="it runs again")
    scenario.open_gate("go")
    scenario.until(scenario.state_is(sent.id, "COMPLETED"), within=20, what="it is done")

    def has_all() -> bool:
        return sum(scraped.read()["everbeat_attempts_started_total"].values()) == len(
            scenario.effects("start")
        )

    scenario.until(has_all, within=20, what="each start is counted")
    scenario.until(
        lambda: value(scraped.read(), "everbeat_attempts_ended_total", **AGAIN, outcome="completed") == 1,
        within=20,
        what="the second attempt is counted",
    )
    stored = "select coalesce(sum(started), 0) as started from {schema}.rates"
    scenario.until(
        lambda: scenario.query(stored)[0]["started"] == 22, within=30, what="the counts are written"
    )
    found = scraped.read()
    assert value(found, "everbeat_attempts_started_total", queue="default", task="quick") == 20
    assert value(found, "everbeat_attempts_started_total", **AGAIN) == 2
    (first, _) = scenario.attempts(sent.id)
    ended = {
        outcome: value(found, "everbeat_attempts_ended_total", **AGAIN, outcome=outcome)
        for outcome in OUTCOMES
    }
    assert ended == dict.fromkeys(OUTCOMES, 0) | {"completed": 1, first["outcome"].lower(): 1}
    assert (
        value(found, "everbeat_attempts_ended_total", queue="default", task="quick", outcome="completed")
        == 20
    )
    assert value(found, "everbeat_task_run_seconds_count", queue="default", task="quick") == 20
    assert value(found, "everbeat_task_wait_seconds_count", queue="default") == 22
    assert value(found, "everbeat_tasks_expired_total", queue="default", task="quick") == 0
    (recovery,) = scenario.recoveries()
    assert (
        value(
            found,
            "everbeat_recoveries_total",
            queue="default",
            was="RUNNING",
            noticed_by="child_exit",
            action=recovery["action"],
        )
        == 1
    )
    assert sum(found["everbeat_recoveries_total"].values()) == 1
    assert value(found, "everbeat_notice_seconds_count", noticed_by="child_exit") == 1
    assert value(found, "everbeat_notice_seconds_sum", noticed_by="child_exit") < 3
    assert value(found, "everbeat_poisoned_total", task="wait_for_on_crash") == 0
    scenario.until(
        lambda: value(scraped.read(), "everbeat_rerun_seconds_count", noticed_by="child_exit") == 1,
        within=20,
        what="the second run is noticed",
    )
    (_, second) = scenario.attempts(sent.id)
    waited_s = (second["started_at"] - recovery["noticed_at"]).total_seconds()
    rerun_s = value(scraped.read(), "everbeat_rerun_seconds_sum", noticed_by="child_exit")
    assert rerun_s == pytest.approx(waited_s + recovery["noticed_after_ms"] / 1_000, abs=0.01)
    assert value(found, "everbeat_process_exits_total", in_order="false") == 1
    assert (
        value(found, "everbeat_processes", state="ready")
        == value(found, "everbeat_processes", state="wanted")
        == 1
    )
    (beat,) = scenario.query(
        "select max(beat_seq) as seq from {schema}.supervisors where pid = %s", scraped.tree.pid
    )
    assert 1 <= value(found, "everbeat_beat_write_seconds_count") <= beat["seq"] + 1
    assert value(found, "everbeat_loop_lag_seconds") >= 0


def test_the_sends_of_code_poisoned_tasks_and_late_ticks_are_counted(scenario: Scenario) -> None:  # O5
    with program_of(scenario, "measured") as measured:
        scraped = Scraped(scenario, program="measured")
        fan_out, deadly = measured.fan_out.send(7), measured.deadly.send()
        fan_out.result(timeout=30)
        assert deadly.outcome(timeout=60).error.data["poison"] is True
        sent = {"queue": "default", "task": "quick"}
        scenario.until(
            lambda: scraped.read()["everbeat_tasks_sent_total"].get(tuple(sorted(sent.items()))) == 7,
            within=20,
            what="the worker has reported the sends of its code",
        )
        scenario.until(
            lambda: scraped.read()["everbeat_poisoned_total"].get((("task", "deadly"),)) == 1,
            within=20,
            what="the worker has reported the recoveries of its task processes",
        )
        found = scraped.read()
        recovered = [
            value(
                found,
                "everbeat_recoveries_total",
                queue="default",
                was="RUNNING",
                noticed_by="child_exit",
                action=action,
            )
            for action in ("retry", "fail")
        ]
        assert recovered == [1, 1]
        assert len(scenario.recoveries(deadly.id)) == 2
        ticks = value(found, "everbeat_schedule_ticks_total", outcome="sent")
        assert value(found, "everbeat_schedule_late_seconds_count") == ticks > 0
        assert 0 <= value(found, "everbeat_schedule_late_seconds_sum") < 5 * ticks
        assert value(found, "everbeat_poisoned_total", task="quick") == 0
