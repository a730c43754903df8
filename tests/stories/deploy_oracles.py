"""Properties that every deploy must keep, judged from the effects of the code and from the rows: each check yields problems."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tests.stories.fleet import Fleet
from tests.stories.scenario import Scenario

Row = Mapping[str, Any]

RETRIED_AFTER_DEATH: Final = {"retry", "stop_fail"}
RETRIED_AFTER_STOP: Final = {"retry", "stop_retry"}
DEATHS: Final = {"CRASHED", "LOST"}
ENDS: Final = {"WORKER_STOPPED", "WORKER_CRASHED"}


def judge(scenario: Scenario, fleet: Fleet) -> Counter[str]:
    """Fail if there is any problem; return the figures of the run."""
    tasks = {str(row["id"]): row for row in scenario.query("select * from {schema}.tasks")}
    attempts: dict[str, list[Row]] = defaultdict(list)
    for row in scenario.query("select * from {schema}.attempts order by task_id, attempt"):
        attempts[str(row["task_id"])].append(row)
    ledger: dict[str, list[Row]] = defaultdict(list)
    for line in scenario.effects():
        ledger[line["task"]].append(line)
    declines = _declines(scenario, attempts)
    again = {key: times for key, times in declines.items() if times > 1}
    wrong = [*_lost(scenario, fleet, tasks), *_disorder(tasks, ledger)]
    wrong += [f"{tasks[key]['name']} {key}: declined {times} times" for key, times in again.items()]
    for key, row in tasks.items():
        problems = (
            *_end(row, attempts[key], ledger[key]),
            *_runs(row, attempts[key], ledger[key]),
            *_overlap(ledger[key]),
            *_arguments(row, ledger[key]),
        )
        wrong += [f"{row['name']} {key}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong[:20])
    outcomes = Counter(f"{row['outcome']} attempts" for rows in attempts.values() for row in rows)
    failed = Counter(row["error"]["code"] for row in tasks.values() if row["state"] == "FAILED")
    marked = sum(row["needs_id"] is not None for row in tasks.values())
    figures = Counter(
        tasks=len(tasks),
        marked=marked,
        declines=declines.total(),
        starts=sum(len(_starts(lines)) for lines in ledger.values()),
    )
    return figures + Counter(row["state"] for row in tasks.values()) + outcomes + failed + fleet.done


def _declines(scenario: Scenario, attempts: Mapping[str, Sequence[Row]]) -> Counter[str]:
    """Count how often a worker declined each task because its arguments did not fit the worker's code."""
    returned = scenario.query(
        "select task_id, count(*) from {schema}.audit where old = 'RUNNING' and new = 'PENDING' group by task_id"
    )
    ran = {str(row["task_id"]): row["count"] for row in returned}
    # Each attempt except the last returned to PENDING, too.
    return +Counter({key: times - max(0, len(attempts[key]) - 1) for key, times in ran.items()})


def _starts(lines: Sequence[Row]) -> list[Row]:
    return [line for line in lines if line["step"] == "start"]


def _policy(row: Row) -> str:
    return str(row["name"]).split("-")[1]


def _lost(scenario: Scenario, fleet: Fleet, tasks: Mapping[str, Row]) -> Iterator[str]:
    sent = fleet.sent()
    if missing := sent["task"] - tasks.keys():
        yield f"acknowledged tasks are missing: {missing}"
    workflows = {str(row["id"]) for row in scenario.query("select id from {schema}.workflows")}
    if missing := sent["workflow"] - workflows:
        yield f"acknowledged workflows are missing: {missing}"


def _end(row: Row, attempts: Sequence[Row], lines: Sequence[Row]) -> Iterator[str]:
    """A task completes after its code ended, or fails because its policy forbids a further run."""
    if row["state"] == "COMPLETED":
        if not any(line["step"] == "end" for line in lines):
            yield "COMPLETED, but its code never ended"
        return
    code = (row["error"] or {}).get("code")
    if row["state"] != "FAILED" or code not in ENDS:
        yield f"{row['state']} with {code}"
        return
    allowed = RETRIED_AFTER_STOP if code == "WORKER_STOPPED" else RETRIED_AFTER_DEATH
    if _policy(row) in allowed:
        yield f"FAILED with {code}, which its policy runs again"
    if not attempts:
        yield f"FAILED with {code} without a run"


def _runs(row: Row, attempts: Sequence[Row], lines: Sequence[Row]) -> Iterator[str]:
    """Each run after the first must be allowed by the policy and have a row with its reason.

    A stopping worker also releases tasks that it has started only in the database, before any code ran.
    """
    policy, starts = _policy(row), _starts(lines)
    begun = {line["attempt"] for line in starts}
    for attempt in attempts[:-1]:
        outcome = attempt["outcome"]
        if outcome in DEATHS and policy in RETRIED_AFTER_DEATH:
            continue
        if outcome == "RELEASED" and (policy in RETRIED_AFTER_STOP or attempt["attempt"] not in begun):
            continue
        yield f"run again after attempt {attempt['attempt']} that is {outcome}"
    if len(starts) > len(attempts):
        yield f"its code started {len(starts)} times in {len(attempts)} attempts"
    if again := [
        number for number, times in Counter(line["attempt"] for line in starts).items() if times > 1
    ]:
        yield f"its code started more than once in the attempts {again}"


def _overlap(lines: Sequence[Row]) -> Iterator[str]:
    """No code may run while another attempt of its task runs."""
    latest = 0
    for line in sorted(lines, key=lambda line: line["at"]):
        if line["attempt"] < latest:
            yield f"attempt {line['attempt']} ran after attempt {latest} had started"
            return
        latest = line["attempt"]


def _arguments(row: Row, lines: Sequence[Row]) -> Iterator[str]:
    """Given arguments must arrive, and omitted ones must have their defaults."""
    given = {key: value for key, value in row["args"].items() if key != "took_s"}
    for line in _starts(lines):
        if {key: value for key, value in line["given"].items() if value != "en"} != given:
            yield f"given {given}, but its code received {line['given']}"


def _disorder(tasks: Mapping[str, Row], ledger: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Serial lines run one task at a time, in the order in which tasks were sent."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in tasks.values():
        if row["serial"] is not None:
            lines[row["serial"]].append(row)
    for name, rows in lines.items():
        before = 0.0
        for row in sorted(rows, key=lambda row: (row["serial_at"], row["id"])):
            moments = [line["at"] for line in ledger[str(row["id"])]]
            if moments and min(moments) < before:
                yield f"{name}: {row['name']} {row['id']} ran before the one in front of it had ended"
            before = max([before, *moments])
