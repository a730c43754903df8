"""Limits on real workers: how many tasks run at the same time, seen from outside, through kills, freezes and a changed number."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from types import ModuleType

import psutil
import pytest

from tests.stories.counter import Counter, counting
from tests.stories.scenario import FAST, SLACK, Scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]
PROGRAM = "limited"
PERMITS = 20
SECOND = timedelta(seconds=1)


@pytest.fixture
def counter(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Yield the service that the tasks of the limit call."""
    with counting(scenario.folder) as made:
        monkeypatch.setenv("STORY_COUNTER", str(made.path))
        yield made


@pytest.fixture
def limited(scenario: Scenario, counter: Counter) -> Iterator[ModuleType]:
    """Import the program with limits as a sender does."""
    with program_of(scenario, PROGRAM) as program:
        yield program


def leased(scenario: Scenario) -> int:
    """Return the number of leases that hold permits."""
    query = (
        "select count(*) as n from {schema}.tasks where state in ('CLAIMED', 'RUNNING') and gates is not null"
    )
    return int(scenario.query(query)[0]["n"])


def run_under_kills(
    scenario: Scenario, limited: ModuleType, counter: Counter, *, tasks: int, seed: int, kills: int
) -> None:
    """Let five worker processes of two trees run the tasks while processes are killed. Check that no more than the permits are in use."""
    chosen = random.Random(seed)
    trees = [scenario.ready_tree(program=PROGRAM, worker={"processes": each}) for each in (2, 3)]
    handles = limited.app.send_many([limited.charge.call(number, 0.2) for number in range(tasks)])
    killed, most_leased = 0, 0
    last = time.monotonic()
    deadline = time.monotonic() + 60 + tasks / 10
    while any(state != "COMPLETED" for state in scenario.states()):
        assert time.monotonic() < deadline, scenario.states()
        most_leased = max(most_leased, leased(scenario))
        if killed < kills and time.monotonic() > last + 1.0 and counter.now:
            victims = [each for tree in trees for each in tree.processes()[1:]]
            if victims:
                chosen.choice(victims).kill()
                killed, last = killed + 1, time.monotonic()
        time.sleep(0.01)  # the interval between two looks from outside
    assert len([each.result(timeout=20) for each in handles]) == tasks
    print(f"{killed} kills; at most {counter.most} calls and {most_leased} leases at the same time")
    assert counter.most <= PERMITS
    assert most_leased <= PERMITS


def test_a_limit_is_never_exceeded_while_worker_processes_are_killed(
    scenario: Scenario, limited: ModuleType, counter: Counter
) -> None:  # K1
    run_under_kills(scenario, limited, counter, tasks=400, seed=1, kills=4)
    assert counter.most == PERMITS, "the permits were never all in use"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_limit_is_never_exceeded_during_many_kills(
    scenario: Scenario, limited: ModuleType, counter: Counter, seed: int
) -> None:  # K1
    run_under_kills(scenario, limited, counter, tasks=5_000, seed=seed, kills=60)
    assert counter.most == PERMITS, "the permits were never all in use"


@pytest.mark.parametrize(
    ("kind", "within_s"), [pytest.param("process", 1.0, marks=pytest.mark.long), ("tree", 3.0)]
)
def test_the_permits_of_a_killed_holder_are_free_soon(
    scenario: Scenario, limited: ModuleType, counter: Counter, kind: str, within_s: float
) -> None:  # K2
    holder = scenario.ready_tree(program=PROGRAM)
    limited.app.send_many([limited.charge.call(number, 600) for number in range(PERMITS)])
    scenario.until(lambda: counter.now == PERMITS, within=20 * SLACK, what="all permits are in use")
    scenario.ready_tree(program=PROGRAM)
    limited.app.send_many(
        [limited.charge.with_options(priority=-1).call(100 + number, 600) for number in range(PERMITS)]
    )
    if kind == "tree":
        at = holder.kill()
    else:
        (row,) = scenario.workers(holder)
        at = time.monotonic()
        psutil.Process(row["pid"]).kill()
    scenario.until(
        lambda: {line["number"] for line in scenario.effects("start")} >= set(range(100, 100 + PERMITS)),
        within=within_s * SLACK,
        what="the next tasks start",
    )
    print(f"{kind}: the next {PERMITS} tasks started within {time.monotonic() - at:.2f} s")
    assert counter.most <= PERMITS
    scenario.query(
        "update {schema}.tasks set cancel_requested_at = statement_timestamp() where state = 'RUNNING' returning id"
    )
    scenario.query("delete from {schema}.tasks where state = 'PENDING' returning id")


@pytest.mark.parametrize("self_fence", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_permits_of_a_frozen_holder_are_free_after_its_threshold(
    scenario: Scenario, limited: ModuleType, counter: Counter, self_fence: bool
) -> None:  # K3
    recovery = {**FAST, "self_fence": self_fence, "detect_session_loss": False}
    frozen = scenario.ready_tree(program=PROGRAM, recovery=recovery)
    first = limited.app.send_many([limited.charge.call(number, 0, "thawed") for number in range(PERMITS)])
    scenario.until(lambda: counter.now == PERMITS, within=20 * SLACK, what="all permits are in use")
    scenario.ready_tree(program=PROGRAM, recovery=recovery)
    second = limited.app.send_many(
        [limited.charge.with_options(priority=-1).call(100 + number, 0.1) for number in range(PERMITS)]
    )
    frozen.freeze()
    scenario.until(
        lambda: len(scenario.recoveries()) >= PERMITS,
        within=10 * SLACK,
        what="the frozen leases are recovered",
    )
    assert leased(scenario) <= PERMITS
    assert [each.result(timeout=20 * SLACK) for each in second] == [100 + number for number in range(PERMITS)]
    scenario.open_gate("thawed")
    frozen.thaw()
    assert [each.result(timeout=40 * SLACK) for each in first] == [*range(PERMITS)]
    ends = [line for line in scenario.effects("end") if line["number"] < PERMITS]
    print(f"{len(ends)} ends of {PERMITS} tasks whose permits were given away")
    if self_fence:
        assert len(ends) == PERMITS, "a zombie continued after its permit was given away"


@pytest.mark.long
def test_each_key_has_its_own_permits(scenario: Scenario, limited: ModuleType) -> None:
    scenario.ready_tree(program=PROGRAM, worker={"processes": 2})
    calls = [limited.serve.call(tenant, 0.02) for _ in range(20) for tenant in "abcde"]
    handles = limited.app.send_many(calls)
    assert len([each.result(timeout=60) for each in handles]) == 100
    running: dict[str, int] = {}
    together = 0
    for line in scenario.effects():
        running[line["tenant"]] = running.get(line["tenant"], 0) + (1 if line["step"] == "start" else -1)
        assert running[line["tenant"]] <= 1
        together = max(together, sum(running.values()))
    assert together > 1, "the keys did not run side by side"


@pytest.mark.parametrize(
    ("name", "most_in_a_second"),
    [pytest.param("call_smoothly", 25, marks=pytest.mark.long), ("call_in_window", 20)],
)
def test_a_rate_is_never_exceeded(
    scenario: Scenario, limited: ModuleType, name: str, most_in_a_second: int
) -> None:  # K5
    for _ in range(2):
        scenario.ready_tree(program=PROGRAM, worker={"processes": 2})
    handles = limited.app.send_many([getattr(limited, name).call() for _ in range(100)])
    assert len([each.result(timeout=60) for each in handles]) == 100
    starts: list[datetime] = sorted(
        row["started_at"] for row in scenario.query("select started_at from {schema}.tasks")
    )
    most = max(sum(begin <= each < begin + SECOND for each in starts) for begin in starts)
    took_s = (starts[-1] - starts[0]).total_seconds()
    print(f"{name}: 100 starts within {took_s:.1f} s, at most {most} in a second")
    assert most <= most_in_a_second
    assert took_s < 10 * SLACK


@pytest.mark.long
def test_a_rate_is_kept_and_used_for_half_a_minute_by_four_claimers(
    scenario: Scenario, limited: ModuleType
) -> None:  # K5
    """200 starts a second with a burst of 10: a window of t seconds has at most 10 + 200 t starts."""
    for _ in range(2):
        scenario.ready_tree(program=PROGRAM, worker={"processes": 2})
    limited.app.send_many([limited.call_often.call() for _ in range(6_500)])
    begun = "select count(*) as n from {schema}.tasks where started_at is not null"
    scenario.until(lambda: scenario.query(begun)[0]["n"] >= 6_300, within=60, what="30 s of starts")
    rows = scenario.query("select started_at from {schema}.tasks where started_at is not null order by 1")
    starts: list[datetime] = [row["started_at"] for row in rows]
    for seconds in (0.1, 1.0, 5.0):
        most, first, window = 0, 0, seconds * SECOND
        for last, moment in enumerate(starts):
            while starts[first] <= moment - window:
                first += 1
            most = max(most, last - first + 1)
        print(f"at most {most} starts in {seconds} s, allowed {10 + 200 * seconds:.0f}")
        assert most <= 10 + 200 * seconds
    in_half_a_minute = sum(each < starts[0] + 30 * SECOND for each in starts)
    print(f"{in_half_a_minute} starts in 30 s")
    assert in_half_a_minute >= 0.95 * 6_000
