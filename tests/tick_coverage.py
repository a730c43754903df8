"""An oracle about schedules: every tick of an interval is decided exactly once, and stands for exactly one task or none."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection, sql
from psycopg.rows import dict_row

_TICKS = """
    select schedule, (extract(epoch from at) * 1000)::bigint as at, (extract(epoch from last_at) * 1000)::bigint as last_at,
           outcome, task_id, missed
    from {schema}.ticks order by schedule, at"""
_TASKS = """
    select id, schedule, (extract(epoch from tick) * 1000)::bigint as tick from {schema}.all_tasks where tick is not null"""
_SCHEDULES = """
    select name, (timing ->> 'every_ms')::bigint as every, coalesce((timing ->> 'offset_ms')::bigint, 0) as "offset",
           floor(extract(epoch from created_at) * 1000)::bigint as since,
           floor(extract(epoch from decided_to) * 1000)::bigint as until
    from {schema}.schedules where timing ->> 'every_ms' is not null"""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The number of ticks by outcome, and the breaches."""

    figures: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def coverage(connection: Connection[Any], schema: str) -> Coverage:
    """Return what became of the ticks of all schedules with an interval. The oracle enumerates the ticks itself.

    The timing of the schedules must not have changed, and no tick may have been pruned or sent by hand.
    """
    schedules, ticks, tasks = (_rows(connection, schema, text) for text in (_SCHEDULES, _TICKS, _TASKS))
    found = Coverage()
    for name, (schedule,) in schedules.items():
        found.problems.extend(_problems(schedule, ticks[name], tasks[name], found.figures))
    return found


def _rows(connection: Connection[Any], schema: str, text: str) -> defaultdict[str, list[dict[str, Any]]]:
    """Return the rows by schedule."""
    found = defaultdict[str, list[dict[str, Any]]](list)
    with connection.cursor(row_factory=dict_row) as cursor:
        query = sql.SQL(text).format(schema=sql.Identifier(schema))  # type: ignore[arg-type]
        for row in cursor.execute(query).fetchall():
            found[row.get("schedule", row.get("name"))].append(row)
    return found


def _problems(
    schedule: Mapping[str, Any],
    ticks: Sequence[Mapping[str, Any]],
    tasks: Sequence[Mapping[str, Any]],
    figures: Counter[str],
) -> Iterator[str]:
    name, every, offset = schedule["name"], schedule["every"], schedule["offset"]
    first = (schedule["since"] - offset) // every + 1
    last = (schedule["until"] - offset) // every
    expected = [number * every + offset for number in range(first, last + 1)]
    decided: Counter[int] = Counter()
    for row in ticks:
        covered = [row["at"]]
        if row["last_at"] is not None:
            covered = expected[bisect_left(expected, row["at"]) : bisect_right(expected, row["last_at"])]
            if row["missed"] not in (None, len(covered)):
                yield f"{name}: a series of {row['missed']} stands for {len(covered)} ticks"
        decided.update(covered)
        figures[row["outcome"]] += len(covered)
    if lost := sorted(set(expected) - set(decided)):
        yield f"{name}: {len(lost)} of {len(expected)} ticks were lost: {lost[:5]}"
    if foreign := sorted(set(decided) - set(expected)):
        yield f"{name}: {len(foreign)} ticks are not in its interval: {foreign[:5]}"
    if twice := [at for at, times in decided.items() if times > 1]:
        yield f"{name}: ticks were decided twice: {twice[:5]}"
    sent = sorted((row["at"], row["task_id"]) for row in ticks if row["outcome"] == "SENT")
    if sent != sorted((task["tick"], task["id"]) for task in tasks):
        yield f"{name}: {len(sent)} ticks were sent, but {len(tasks)} tasks stand for ticks"
