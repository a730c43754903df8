"""Tasks of unknown functions in front of a lane are marked, so that claims do not pass over them. Workers that know them claim them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from psycopg import sql

from everbeat.store.claims import set_aside
from tests.store.conftest import StoreHarness
from tests.store.plans import loaded, nodes, plan
from tests.store.test_marked_tasks import groups

__all__ = ["loaded"]
FRONT = 1_000
"""How many foreign tasks one call marks, and how many must stand in front of a lane."""


def fill(
    db: StoreHarness,
    count: int,
    *,
    name: str = "other",
    args: str = '{"b": 1, "a": 2}',
    ago_s: int = 60,
    **more: Any,
) -> None:
    """Insert due tasks, the oldest first."""
    text = db.plain(
        "insert into {schema}.tasks (id, name, queue, priority, args, enqueued_at) select gen_random_uuid(), %(name)s, %(queue)s, 0,"
        " %(args)s::json, now() - %(ago_s)s * interval '1 s' + n * interval '1 ms' from generate_series(1, %(count)s) n"
    )
    db.connection.execute(
        text, {"name": name, "count": count, "args": args, "ago_s": ago_s, "queue": "default"} | more
    )


def put_aside(
    db: StoreHarness, *, names: Sequence[str] = ("work",), queues: Sequence[str] | None = None
) -> int:
    return db.run(set_aside(names=names, queues=queues, channel=db.target.channel))


def marked_count(db: StoreHarness) -> int:
    row = db.connection.execute(
        db.plain("select count(*) from {schema}.tasks where needs_id is not null")
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_foreign_tasks_in_front_of_a_lane_are_marked_as_if_declined(db: StoreHarness) -> None:  # R4
    fill(db, FRONT + 500)
    mine = db.send()
    assert put_aside(db) == FRONT
    assert put_aside(db) == 0  # 500 are too few
    assert {(group.name, group.queue, group.needs) for group in groups(db)} == {
        ("other", "default", '{"arguments" : ["a", "b"]}')
    }
    assert [one.id for one in db.claim(limit=1)] == [mine]


def test_a_worker_that_knows_them_claims_all_of_them_at_no_cost(db: StoreHarness) -> None:  # R4
    fill(db, FRONT)
    assert put_aside(db) == FRONT
    claimed = db.claim("w2", names=["other"], limit=2 * FRONT, starts=2 * FRONT, marked=groups(db))
    assert len(claimed) == FRONT
    assert {(one.attempt, one.retry_count, one.is_marked) for one in claimed} == {(1, 0, True)}


@pytest.mark.parametrize(
    ("tasks", "queues"),
    [
        pytest.param([{"count": FRONT - 1}], None, id="too few"),
        pytest.param(
            [{"count": 10, "ago_s": 70}, {"count": 1, "name": "work"}, {"count": FRONT}],
            None,
            id="one of its own among them",
        ),
        pytest.param([{"count": FRONT, "ago_s": -60}], None, id="not due"),
        pytest.param(
            [{"count": FRONT, "queue": "elsewhere"}], ["default"], id="in a queue that it does not serve"
        ),
        pytest.param([{"count": FRONT, "args": '{"a": 1, "a": 2}'}], None, id="an argument twice"),
        pytest.param([{"count": FRONT, "args": "[]"}], None, id="no arguments"),
        pytest.param([{"count": FRONT, "args": '{"\\ud800": 1}'}], None, id="an unreadable argument"),
        pytest.param(
            [{"count": FRONT, "args": '{"' + "a" * 5_000 + '": 1}'}], None, id="a long name of an argument"
        ),
    ],
)
def test_other_tasks_keep_their_places(
    db: StoreHarness, tasks: Sequence[dict[str, Any]], queues: Sequence[str] | None
) -> None:  # R4
    for each in tasks:
        fill(db, **each)
    assert put_aside(db, queues=queues) == 0
    assert marked_count(db) == 0


def test_a_locked_task_is_passed_over(db: StoreHarness) -> None:  # R4
    fill(db, FRONT)
    with db.target.connect("everbeat test") as other, other.transaction():
        other.execute(db.plain("select from {schema}.tasks order by enqueued_at limit 10 for update"))
        assert put_aside(db) == FRONT - 10
    assert put_aside(db) == 0


def test_the_search_reads_few_pages(loaded: StoreHarness) -> None:  # R4
    schema = sql.Identifier(loaded.target.schema)
    with loaded.connection.transaction(force_rollback=True):
        nothing = plan(loaded, set_aside(names=["work"], queues=None, channel="c"))["Plan"]
        assert [
            node
            for node in nodes(nothing)
            if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "tasks"
        ] == []
        assert nothing["Shared Hit Blocks"] + nothing["Shared Read Blocks"] < 300
        loaded.connection.execute(sql.SQL("analyze {}.tasks").format(schema))
        found = plan(loaded, set_aside(names=["none"], queues=None, channel="c"))["Plan"]
        assert [
            node
            for node in nodes(found)
            if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "tasks"
        ] == []
        assert found["Shared Hit Blocks"] + found["Shared Read Blocks"] < 60 * FRONT
