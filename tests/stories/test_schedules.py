"""Schedules under kills, outages, clock jumps and deploys: each tick is one task or one recorded miss, and none occurs twice."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from types import ModuleType
from typing import Any

import psutil
import pytest

from everbeat import Schedule
from tests.stories.scenario import FAST, SLACK, Scenario, Tree, program_of
from tests.tick_coverage import coverage

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

SCHEDULES = 100


@pytest.fixture
def ticking(scenario: Scenario) -> Iterator[ModuleType]:
    """Yield the program whose tasks the schedules send."""
    with program_of(scenario, "ticking") as program:
        yield program


def start_scheduler(scenario: Scenario) -> Tree:
    """Start a supervisor without workers."""
    log = scenario.folder / f"tree-{len(scenario.trees)}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "scheduling"],
            env=scenario.environment(recovery=FAST, worker={}), cwd=scenario.folder, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    tree = Tree(process, log)
    scenario.trees.append(tree)
    return tree


def ticks(scenario: Scenario, name: str) -> list[dict[str, Any]]:
    return scenario.query("select * from {schema}.ticks where schedule = %s order by at", name)


def outcomes(scenario: Scenario, name: str) -> Counter[str]:
    return Counter(row["outcome"] for row in ticks(scenario, name))


def runs(scenario: Scenario, name: str) -> list[dict[str, Any]]:
    """Return the tasks of a schedule in the order of their ticks."""
    return scenario.query("select * from {schema}.tasks where schedule = %s order by tick", name)


def now(scenario: Scenario) -> datetime:
    (row,) = scenario.query("select clock_timestamp() as now")
    moment: datetime = row["now"]
    return moment


def judge(scenario: Scenario) -> Counter[str]:
    """Return the number of ticks by outcome. Raises AssertionError unless each tick was decided once."""
    found = coverage(scenario.connection, scenario.schema)
    assert found.problems == []
    return found.figures


def all_decided(scenario: Scenario, until: datetime) -> bool:
    (row,) = scenario.query("select min(decided_to) as least from {schema}.schedules where ended_at is null")
    return bool(row["least"] >= until)


def none_is_due(scenario: Scenario) -> bool:
    return scenario.query("select from {schema}.schedules where next_at <= clock_timestamp()") == []


# Kills.


def kill_schedulers(
    scenario: Scenario, ticking: ModuleType, *, seconds: float, every_s: float
) -> Counter[str]:
    """Run four supervisors for this many seconds. Kill the one that decides the ticks again and again. Return the figures."""
    for number in range(SCHEDULES):
        call = ticking.tick.call()
        missed, jitter = ("latest", None) if number % 2 else ("all", "200ms" if number % 4 else None)
        offset = f"{number * 10}ms" if number % 3 else None
        given = {"jitter": jitter, "offset": offset}
        options: Any = (
            {"missed": missed}
            | ({"most": 1_000} if missed == "all" else {})
            | {k: v for k, v in given.items() if v is not None}
        )
        ticking.app.put_schedule(Schedule(f"schedule-{number}", call, every="1s", **options))
    trees = {tree.pid: tree for tree in (start_scheduler(scenario) for _ in range(4))}
    began = time.monotonic()
    kills = 0
    deciders = set()
    while time.monotonic() < began + seconds or kills < 3:
        time.sleep(every_s)  # the time between two kills
        scenario.until(
            lambda: decider(scenario) in trees, within=30 * SLACK, what="a live tree decides ticks"
        )
        doomed = decider(scenario)
        assert doomed is not None
        deciders.add(doomed)
        trees.pop(doomed).kill()
        kills += 1
        tree = start_scheduler(scenario)
        trees[tree.pid] = tree
    stop = now(scenario)
    scenario.until(lambda: all_decided(scenario, stop), within=30 * SLACK, what="all ticks are decided")
    for tree in trees.values():
        tree.kill()
    assert len(deciders) == kills
    (late,) = scenario.query(
        """select percentile_cont(array[0.5, 0.9, 1]) within group (order by extract(epoch from decided_at - at)::float8) as s
           from {schema}.ticks where outcome = 'SENT'"""
    )
    print("median, 90 % and longest delay of a tick:", [f"{each:.2f} s" for each in late["s"]])
    return judge(scenario)


def decider(scenario: Scenario) -> int | None:
    """Return the pid of the supervisor that decided the latest tick."""
    rows = scenario.query(
        """select s.pid from {schema}.ticks t join {schema}.supervisors s on s.id = t.decided_by
           order by t.decided_at desc limit 1"""
    )
    return rows[0]["pid"] if rows else None


def test_each_tick_is_one_task_or_one_recorded_miss_while_the_deciding_supervisors_are_killed(
    scenario: Scenario, ticking: ModuleType
) -> None:  # S1
    figures = kill_schedulers(scenario, ticking, seconds=12, every_s=3)
    assert figures["SENT"] > SCHEDULES
    sent_all = scenario.query(
        """select t.schedule from {schema}.ticks t join {schema}.schedules s on s.name = t.schedule
           where s.missed = 'all' and t.outcome <> 'SENT'"""
    )
    assert sent_all == [], "schedules with missed='all' send every tick"


@pytest.mark.long
def test_each_tick_is_one_task_or_one_recorded_miss_in_a_minute_of_kills(
    scenario: Scenario, ticking: ModuleType
) -> None:  # S1
    figures = kill_schedulers(scenario, ticking, seconds=60, every_s=10)
    assert figures["SENT"] > 10 * SCHEDULES


# Outages.


def test_ticks_of_an_outage_are_sent_or_recorded_as_the_missed_policy_says(
    scenario: Scenario, ticking: ModuleType
) -> None:  # S3
    at = now(scenario)
    two_minutes_ago = round((at - timedelta(minutes=2)).timestamp()) % 300
    policies: dict[str, dict[str, Any]] = {
        "latest": {"every": "1m"},
        "all": {"every": "1m", "missed": "all", "most": 4},
        "skip": {"every": "5m", "offset": f"{two_minutes_ago}s", "missed": "skip"},
        "window": {"every": "1m", "missed": "all", "catchup_window": "210s"},
        "old-window": {
            "every": "5m",
            "offset": f"{two_minutes_ago}s",
            "missed": "all",
            "catchup_window": "60s",
        },
    }
    for name, options in policies.items():
        ticking.app.put_schedule(Schedule(name, ticking.tick.call(), **options))
    # This is what ten minutes without a supervisor leave behind.
    scenario.query(
        """update {schema}.schedules set created_at = now() - interval '10 min', decided_to = now() - interval '10 min',
               next_at = now() - interval '9 min' returning name"""
    )
    scenario.ready_tree(recovery=FAST, program="ticking")
    scenario.until(
        lambda: none_is_due(scenario), within=30 * SLACK, what="the ticks of the outage are decided"
    )

    def first_pass(name: str) -> list[tuple[str, str | None]]:
        found = ticks(scenario, name)
        return [
            (row["outcome"], row["reason"])
            for row in found
            if row["decided_at"] == min(each["decided_at"] for each in found)
        ]

    late = first_pass("latest")
    assert late == [("MISSED", "NOT_LATEST")] * (len(late) - 1) + [("SENT", None)]
    assert len(late) >= 9
    most = first_pass("all")
    assert most == [("MISSED", "TOO_MANY")] * (len(most) - 4) + [("SENT", None)] * 4
    skipped = first_pass("skip")
    assert len(skipped) == 2
    assert skipped[-1] == ("MISSED", "LATE")
    assert skipped[0][0] == "MISSED"
    window = Counter(first_pass("window"))
    assert window["SENT", None] in (3, 4), "the ticks of the last 3.5 minutes"
    assert window["MISSED", "CATCHUP_WINDOW"] == len(first_pass("window")) - window["SENT", None]
    assert first_pass("old-window") == [("MISSED", "CATCHUP_WINDOW")] * 2
    sent = sum(outcomes(scenario, name)["SENT"] for name in policies)
    scenario.until(
        lambda: len(scenario.effects("start")) >= sent, within=30 * SLACK, what="the sent ticks run"
    )
    assert judge(scenario)["SENT"] >= sent


# Overlap.


def overlaps(scenario: Scenario, name: str) -> bool:
    """Return whether two runs of a schedule were running at the same time."""
    ids = {str(task["id"]) for task in runs(scenario, name)}
    open_runs: set[str] = set()
    for line in scenario.effects():
        if line["task"] in ids:
            if line["step"] == "start" and open_runs:
                return True
            (open_runs.add if line["step"] == "start" else open_runs.discard)(line["task"])
    return False


def test_overlapping_ticks_are_sent_buffered_skipped_or_cancel_the_others(
    scenario: Scenario, ticking: ModuleType
) -> None:  # S4
    scenario.ready_tree(recovery=FAST, program="ticking")
    kinds: tuple[Any, ...] = ("allow", "skip", "buffer_one", "buffer_all", "cancel_other")
    for kind in kinds:
        limit = {"most_runs": 4} if kind in ("allow", "buffer_all", "cancel_other") else {}
        ticking.app.put_schedule(
            Schedule(kind, ticking.wait_at.call(f"go {kind}"), every="1s", overlap=kind, **limit)
        )
    scenario.until(
        lambda: all(
            outcomes(scenario, kind)["SENT"] == 4 for kind in ("allow", "buffer_all", "cancel_other")
        ),
        within=30 * SLACK,
        what="four ticks of each schedule are sent",
    )
    scenario.until(
        lambda: all(outcomes(scenario, kind)["SKIPPED"] >= 2 for kind in ("skip", "buffer_one")),
        within=30 * SLACK,
        what="ticks are skipped",
    )
    assert outcomes(scenario, "skip")["SENT"] == 1
    assert outcomes(scenario, "buffer_one")["SENT"] == 2, "one runs and one waits"
    assert {row["reason"] for row in ticks(scenario, "skip") if row["outcome"] == "SKIPPED"} == {"OVERLAP"}
    for kind in ("allow", "buffer_all", "cancel_other"):
        assert not outcomes(scenario, kind)["SKIPPED"]

    def states(kind: str) -> list[str]:
        return [task["state"] for task in runs(scenario, kind)]

    scenario.until(lambda: states("allow") == ["RUNNING"] * 4, within=30 * SLACK, what="all four run at once")
    scenario.until(
        lambda: (
            states("buffer_all") == ["RUNNING", "PENDING", "PENDING", "PENDING"]
            and states("buffer_one") == ["RUNNING", "PENDING"]
        ),
        within=30 * SLACK,
        what="one run of each line runs",
    )
    scenario.until(
        lambda: states("cancel_other") == ["CANCELLED"] * 3 + ["RUNNING"],
        within=30 * SLACK,
        what="the earlier ones are cancelled",
    )
    for kind in ("skip", "buffer_one"):
        ticking.app.pause_schedule(kind)
    for kind in kinds:
        scenario.open_gate(f"go {kind}")
    scenario.until(
        lambda: all(set(states(kind)) <= {"COMPLETED", "CANCELLED"} for kind in kinds),
        within=30 * SLACK,
        what="all end",
    )
    assert overlaps(scenario, "allow")
    for kind in ("skip", "buffer_one", "buffer_all"):
        assert not overlaps(scenario, kind)
    in_order = [
        task["id"] for task in sorted(runs(scenario, "buffer_all"), key=lambda task: task["started_at"])
    ]
    assert in_order == [task["id"] for task in runs(scenario, "buffer_all")]
    judge(scenario)


@pytest.mark.long
def test_a_run_of_a_killed_worker_stops_blocking_when_it_is_recovered_but_not_while_it_waits_for_its_retry(
    scenario: Scenario, ticking: ModuleType
) -> None:  # S4
    tree = scenario.ready_tree(program="ticking")
    for name, task in (("ends", ticking.wait_at), ("retries", ticking.wait_again_at)):
        ticking.app.put_schedule(Schedule(name, task.call(f"go {name}"), every="1s", overlap="skip"))
    scenario.until(
        lambda: all(outcomes(scenario, name)["SKIPPED"] for name in ("ends", "retries")),
        within=60 * SLACK,
        what="ticks are skipped",
    )
    scenario.until(lambda: len(scenario.effects("start")) == 2, within=30 * SLACK, what="both run")
    (ended,), (retried,) = runs(scenario, "ends"), runs(scenario, "retries")
    (worker,) = scenario.workers(tree)
    psutil.Process(worker["pid"]).kill()
    took_s = scenario.until(
        lambda: (
            scenario.task(ended["id"])["state"] == "FAILED"
            and scenario.task(retried["id"])["state"] == "PENDING"
        ),
        within=3 * SLACK,
        what="the runs of the killed worker are decided",
    )
    decided_at = now(scenario)
    scenario.until(
        lambda: outcomes(scenario, "ends")["SENT"] == 2, within=10 * SLACK, what="the next tick is sent"
    )

    def skipped_since() -> list[dict[str, Any]]:
        return [
            row
            for row in ticks(scenario, "retries")
            if row["outcome"] == "SKIPPED" and row["decided_at"] > decided_at
        ]

    scenario.until(skipped_since, within=10 * SLACK, what="a tick is skipped because of the retry")
    assert len(runs(scenario, "retries")) == 1, f"decided after {took_s:.1f} s"
    scenario.until(
        lambda: len(scenario.effects("start", retried["id"])) == 2,
        within=(ticking.RETRY_S + 10) * SLACK,
        what="the retry",
    )
    scenario.open_gate("go retries")
    scenario.until(
        lambda: outcomes(scenario, "retries")["SENT"] >= 2, within=30 * SLACK, what="the retry has ended"
    )
    scenario.open_gate("go ends")
    for name in ("ends", "retries"):
        ticking.app.pause_schedule(name)
    scenario.until(
        lambda: set(scenario.states()) <= {"COMPLETED", "FAILED"}, within=30 * SLACK, what="all end"
    )
    judge(scenario)


@pytest.mark.long
def test_a_schedule_whose_runs_keep_failing_is_paused_and_sends_again_after_it_is_resumed(
    scenario: Scenario, ticking: ModuleType
) -> None:
    tree = scenario.ready_tree(recovery=FAST, program="ticking")
    ticking.app.put_schedule(Schedule("fails", ticking.fail.call(), every="1s", pause_after_failures=3))

    def is_paused() -> bool:
        (row,) = scenario.query("select paused_at from {schema}.schedules where name = 'fails'")
        return row["paused_at"] is not None

    scenario.until(is_paused, within=30 * SLACK, what="the schedule is paused")
    before = outcomes(scenario, "fails")["SENT"]
    assert before >= 3
    scenario.until_logged(tree, "schedule_paused")
    ticking.app.resume_schedule("fails")
    scenario.until(
        lambda: outcomes(scenario, "fails")["SENT"] > before, within=30 * SLACK, what="it sends again"
    )
    judge(scenario)


# Deploys.


def stored(scenario: Scenario) -> dict[str, tuple[int, bool]]:
    """Return the interval of each schedule in milliseconds, and whether the schedule is retired."""
    rows = scenario.query(
        "select name, (timing ->> 'every_ms')::int as every, retired_at is not null as retired from {schema}.schedules"
    )
    return {row["name"]: (row["every"], row["retired"]) for row in rows}


def test_an_in_process_worker_declares_schedules_and_runs_them(scenario: Scenario) -> None:
    log = scenario.folder / "tree-0.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "import declaring_1; declaring_1.app.run_worker()"],
            env=scenario.environment(recovery=FAST, worker={}), cwd=scenario.folder, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    tree = Tree(process, log)
    scenario.trees.append(tree)
    scenario.until(
        lambda: len(scenario.effects("start")) >= 3, within=60 * SLACK, what="three runs", tree=tree
    )
    assert set(stored(scenario)) == {"shared", "only-in-1"}
    assert tree.stop() == 0
    judge(scenario)


@pytest.mark.long
def test_the_version_that_started_last_declares_the_schedules_and_a_rollback_brings_the_other_back(
    scenario: Scenario,
) -> None:  # S6
    first = {"shared": (1_000, False), "only-in-1": (1_000, False)}
    rolled_back = first | {"only-in-2": (1_000, True)}
    second = {"shared": (2_000, False), "only-in-1": (1_000, True), "only-in-2": (1_000, False)}
    all_retired = {"shared": (1_000, True), "only-in-1": (1_000, True), "only-in-2": (1_000, True)}
    old = scenario.ready_tree(recovery=FAST, program="declaring_1")
    scenario.until(lambda: stored(scenario) == first, within=20 * SLACK, what="version 1 declares")
    new = scenario.ready_tree(recovery=FAST, program="declaring_2")
    scenario.until(lambda: stored(scenario) == second, within=20 * SLACK, what="version 2 declares")
    another_old = scenario.ready_tree(recovery=FAST, program="declaring_1")
    scenario.until(lambda: outcomes(scenario, "only-in-2")["SENT"], within=20 * SLACK, what="version 2 sends")
    assert stored(scenario) == second, "another worker of version 1 does not make it the latest version"
    new.stop()
    scenario.until(lambda: stored(scenario) == rolled_back, within=20 * SLACK, what="version 1 is back")
    before = outcomes(scenario, "only-in-1")["SENT"]
    scenario.until(
        lambda: outcomes(scenario, "only-in-1")["SENT"] > before, within=20 * SLACK, what="it sends again"
    )
    assert "RETIRED" in {row["reason"] for row in ticks(scenario, "only-in-1")}, "the ticks between"

    start_scheduler(scenario)
    for tree in (old, another_old):
        tree.stop()
    scenario.until(
        lambda: stored(scenario) == all_retired, within=30 * SLACK, what="all schedules are retired"
    )
    sent = {name: outcomes(scenario, name)["SENT"] for name in all_retired}
    scenario.ready_tree(recovery=FAST, program="declaring_1")
    scenario.until(lambda: stored(scenario) == rolled_back, within=20 * SLACK, what="version 1 is back again")
    scenario.until(
        lambda: all(outcomes(scenario, name)["SENT"] > sent[name] for name in first),
        within=20 * SLACK,
        what="they send again",
    )
    assert outcomes(scenario, "only-in-2")["SENT"] == sent["only-in-2"]
