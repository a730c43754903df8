"""The figures of worker processes over time, as lines and in words."""

from __future__ import annotations

import re

from tests.web.conftest import NewVisitor, Workers

SNAPSHOTS = """
insert into {schema}.worker_states (worker_id, at, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)
select %(worker)s, now() - n * interval '1 minute', mod(n, 3), 0, 4, (100 + n) * 1048576, 2 * n, 5 from generate_series(0, %(last)s) n
"""


def add(workers: Workers, worker: str, *, last: int) -> None:
    """Store a snapshot of a worker for each of the last minutes."""
    workers.db.connection.execute(workers.db.plain(SNAPSHOTS), {"worker": worker, "last": last})


async def test_a_worker_has_lines_with_their_lowest_and_highest_values(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    add(workers, "w1", last=120)
    visitor = new_visitor("see")
    page = (await visitor.get("/workers/w1")).text
    assert re.findall(r'<svg class="spark"[^>]* role="img" aria-label="([^"]*)"', page) == [
        "RSS, 100 to 220 MiB in 2 h, now 100 MiB",
        "CPU, 0 to 240 % in 2 h, now 0 %",
        "Loop lag, 5 to 5 ms in 2 h, now 5 ms",
        "Running, 0 to 2 in 2 h, now 0 of 4",
    ]
    assert len((await visitor.json("/workers/w1"))["snapshots"]) == 121


async def test_a_tree_has_the_lines_of_its_live_processes_of_the_last_snapshots(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.db.supervisor("s2", *(f"x{number:02}" for number in range(20)))
    add(workers, "x00", last=300)
    add(workers, "x01", last=0)
    visitor = new_visitor("see")
    page = (await visitor.get("/workers/s2")).text
    (table,) = re.findall(r"<table class=\"fold figures-of\">(.*?)</table>", page, re.DOTALL)
    rows = re.findall(r'<tr><th scope="row".*?</tr>', table, re.DOTALL)
    assert len(rows) == 16
    assert "4 more processes" in page
    assert "RSS, 100 to 219 MiB in 1 h 59 m, now 100 MiB" in rows[0]
    assert "<svg" not in rows[1]
    assert "100 MiB" in rows[1]
    assert "There is no snapshot of it." in rows[2]
    snapshots = (await visitor.json("/workers/s2"))["snapshots"]
    assert {each["worker_id"] for each in snapshots} == {"x00", "x01"}
    assert len(snapshots) == 121
    assert "figures-of" not in (await visitor.get("/workers/x00")).text


async def test_values_that_are_not_finite_do_not_break_a_line(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    add(workers, "w1", last=2)
    workers.db.connection.execute(
        workers.db.plain(
            "update {schema}.worker_states set cpu_percent = 'NaN', loop_lag_ms = 'infinity' where tasks_running = 1"
        )
    )
    page = (await new_visitor("see").get("/workers/w1")).text
    assert "CPU, 0 to 4 % in 2 m, now 0 %" in page
    assert re.findall(r'd="[^"]*(?:nan|inf)[^"]*"', page) == []
