"""How the reading statements report trees that no longer have a session in PostgreSQL."""

from __future__ import annotations

import psycopg
from psycopg import Connection, conninfo, sql

from everbeat.domain.explain.reasons import SilenceRules
from everbeat.store import diagnosis, inspection, workers
from tests.store.conftest import StoreHarness

AGE = 60_000
RULES = SilenceRules(
    claimed_ms=AGE,
    running_ms=AGE,
    beat_interval_ms=1_000,
    check_interval_ms=1_000,
    multiplier=1,
    resilient_flags=(),
)


def lost(db: StoreHarness, connection: Connection[object] | None = None) -> set[object]:
    query = db.plain("select id from {schema}.trees_without_session()")
    return {row[0] for row in (connection or db.connection).execute(query).fetchall()}  # type: ignore[index]


def hold(db: StoreHarness, holder: Connection[object], supervisor: str = "s1") -> None:
    statement = workers.hold_session(supervisor, db.target.lock_key(supervisor))
    holder.execute(db.text(statement.name), statement.parameters)


def lose(db: StoreHarness, supervisor: str = "s1") -> None:
    """Let the supervisor take its lock and end its only session."""
    with db.target.connect(f"everbeat-{supervisor} supervisor") as holder:
        hold(db, holder, supervisor)
        assert lost(db) == set()
        pid = holder.info.backend_pid
    db.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])


def test_a_tree_is_lost_without_its_lock_and_without_a_session_of_its_role_on_this_server(
    db: StoreHarness,
) -> None:  # E4
    assert lost(db) == set(), "it never held a lock: behind a pooler, or during its start"
    lose(db)
    assert lost(db) == {"s1"}
    with db.target.connect("everbeat-s1 worker") as left:
        assert lost(db) == set(), "a process of the tree is connected"
        pid = left.info.backend_pid
    db.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])
    with db.target.connect("stranger to the name") as holder:
        holder.execute("select pg_advisory_lock(%s)", [db.target.lock_key("s1")])
        assert lost(db) == set(), "its lock is held"
        holder.execute("select pg_advisory_unlock_all()")
    assert lost(db) == {"s1"}
    for server in ("null", "'1795391252.744875/00000001'"):
        db.connection.execute(db.plain(f"update {{schema}}.supervisors set session_server = {server}"))
        assert lost(db) == set(), "an older release, or a former primary"


def test_sessions_of_another_role_do_not_revive_a_lost_tree_and_need_no_rights_to_see_it(
    db: StoreHarness,
) -> None:  # B15
    role = f"stranger_{db.target.schema}"
    db.connection.execute(db.plain(f"create role {role} login"))
    db.connection.execute(db.plain(f"grant usage on schema {{schema}} to {role}"))
    db.connection.execute(db.plain(f"grant select on all tables in schema {{schema}} to {role}"))
    url = conninfo.make_conninfo(db.target.url, user=role, application_name="everbeat-s1 worker")
    try:
        with (
            psycopg.connect(url, autocommit=True) as stranger,
            db.target.connect("everbeat-s1 supervisor") as holder,
        ):
            hold(db, holder)
            assert lost(db, stranger) == set()
            db.connection.execute("select pg_terminate_backend(%s, 5000)", [holder.info.backend_pid])
            stranger.execute("select pg_advisory_lock(%s)", [db.target.lock_key("s1")])
            assert lost(db) == lost(db, stranger) == {"s1"}
    finally:
        db.connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))
        db.connection.execute(db.plain(f"drop role {role}"))


def test_no_reading_statement_counts_a_lost_tree_as_live(db: StoreHarness) -> None:  # E4
    held, waits = db.running("w1"), db.send()
    lose(db)
    staff = db.run(diagnosis.crew(stale_ms=AGE))
    assert (staff.supervisors, staff.workers, staff.lost) == (0, 0, 1)
    waiting = db.run(diagnosis.waiting(waits, stale_ms=AGE))
    assert waiting is not None
    assert (waiting.alive, waiting.knowing, waiting.lost) == (0, 0, 2)
    holding = db.run(diagnosis.holding(held.id, stale_ms=AGE))
    assert holding is not None
    assert (holding.session_lost, holding.observers) == (True, 0)
    trees = db.run(diagnosis.silent_trees(silent_ms=AGE, stale_ms=AGE))
    assert (trees.known, trees.silent, trees.living, len(trees.lost), trees.held_by_lost) == (1, 0, 0, 1, 1)
    assert db.run(diagnosis.unswept(RULES, margin_ms=0, stale_ms=AGE)).abandoned == 1
    assert [each.served for each in db.run(diagnosis.unserved(stale_ms=AGE))] == [False]
    assert db.run(diagnosis.knowing(["work"], stale_ms=AGE)) == []
    assert [
        each.session_lost for each in db.run(inspection.supervisors(stale_ms=AGE, ended_too=False, limit=9))
    ] == [True]
    listed = db.run(inspection.workers(stale_ms=AGE, ended_too=False, limit=9))
    assert [each.session_lost for each in listed] == [True, True]
    db.supervisor("s2", "w3")
    assert db.run(diagnosis.unswept(RULES, margin_ms=0, stale_ms=AGE)).abandoned == 0
    holding = db.run(diagnosis.holding(held.id, stale_ms=AGE))
    assert holding is not None
    assert (holding.session_lost, holding.observers) == (True, 1)
    staff = db.run(diagnosis.crew(stale_ms=AGE))
    assert (staff.supervisors, staff.workers, staff.lost) == (1, 1, 1)
