"""The snapshots of the processes of a tree are read by their index, with 120,000 snapshots of 60 workers."""

from __future__ import annotations

from everbeat.store.snapshots import latest_states
from tests.store.conftest import StoreHarness
from tests.store.test_plans import nodes, plan

SNAPSHOTS = """
insert into {schema}.worker_states (worker_id, at, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)
select 'w' || w, now() - n * interval '10 seconds', n, 0, 4, 1000000, 1, 1 from generate_series(1, 2000) n cross join generate_series(1, 60) w
"""


def test_the_latest_snapshots_of_each_worker_are_read_by_their_index(db: StoreHarness) -> None:
    db.connection.execute(db.plain(SNAPSHOTS))
    db.connection.execute(db.plain("vacuum analyze {schema}.worker_states"))
    asked = [f"w{number}" for number in range(1, 17)]
    statement = latest_states([*asked, "unknown"], each=120)
    found = db.run(statement)
    assert {worker_id: len(states) for worker_id, states in found.items()} == {
        **dict.fromkeys(asked, 120),
        "unknown": 0,
    }
    assert [each.running for each in found["w7"][:3]] == [1, 2, 3]
    explained = plan(db, statement)["Plan"]
    reads = [node for node in nodes(explained) if node.get("Relation Name") == "worker_states"]
    assert {node.get("Index Name") for node in reads} == {"worker_states_by_worker"}
    assert explained["Shared Hit Blocks"] + explained["Shared Read Blocks"] < 16 * 130 + 100
