"""What the looking statements say of trees that have no session in PostgreSQL any more."""

from __future__ import annotations

import psycopg
from psycopg import Connection, conninfo, sql

from everbeat.domain.explanation import SilenceRules
from everbeat.store import diagnosis, explanation, inspect, workers
from tests.store.conftest import Hands

AGE = 60_000
RULES = SilenceRules(
    claimed_ms=AGE,
    running_ms=AGE,
    beat_interval_ms=1_000,
    check_interval_ms=1_000,
    multiplier=1,
    resilient_flags=(),
)


def lost(hands: Hands, connection: Connection[object] | None = None) -> set[object]:
    query = hands.plain("select id from {schema}.trees_without_session()")
    return {row[0] for row in (connection or hands.connection).execute(query).fetchall()}  # type: ignore[index]


def hold(hands: Hands, holder: Connection[object], supervisor: str = "s1") -> None:
    statement = workers.hold_session(supervisor, hands.target.lock_key(supervisor))
    holder.execute(hands.text(statement.name), statement.parameters)


def lose(hands: Hands, supervisor: str = "s1") -> None:
    """The supervisor takes its lock, and its only session ends."""
    with hands.target.connect(f"everbeat-{supervisor} supervisor") as holder:
        hold(hands, holder, supervisor)
        assert lost(hands) == set()
        pid = holder.info.backend_pid
    hands.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])


def test_a_tree_is_lost_without_its_lock_and_without_any_session_of_its_role_on_this_server(
    hands: Hands,
) -> None:  # E4
    assert lost(hands) == set(), "it never held a lock: a pooler, or a start"
    lose(hands)
    assert lost(hands) == {"s1"}
    with hands.target.connect("everbeat-s1 worker") as left:
        assert lost(hands) == set(), "a process of the tree is connected"
        pid = left.info.backend_pid
    hands.connection.execute("select pg_terminate_backend(%s, 5000)", [pid])
    with hands.target.connect("stranger to the name") as holder:
        holder.execute("select pg_advisory_lock(%s)", [hands.target.lock_key("s1")])
        assert lost(hands) == set(), "its lock is held"
        holder.execute("select pg_advisory_unlock_all()")
    assert lost(hands) == {"s1"}
    for server in ("null", "'1795391252.744875/00000001'"):
        hands.connection.execute(hands.plain(f"update {{schema}}.supervisors set session_server = {server}"))
        assert lost(hands) == set(), "an older release, or a former primary"


def test_another_role_neither_revives_a_lost_tree_nor_needs_rights_to_see_it(hands: Hands) -> None:  # B15
    role = f"stranger_{hands.target.schema}"
    hands.connection.execute(hands.plain(f"create role {role} login"))
    hands.connection.execute(hands.plain(f"grant usage on schema {{schema}} to {role}"))
    hands.connection.execute(hands.plain(f"grant select on all tables in schema {{schema}} to {role}"))
    url = conninfo.make_conninfo(hands.target.url, user=role, application_name="everbeat-s1 worker")
    try:
        with (
            psycopg.connect(url, autocommit=True) as stranger,
            hands.target.connect("everbeat-s1 supervisor") as holder,
        ):
            hold(hands, holder)
            assert lost(hands, stranger) == set()
            hands.connection.execute("select pg_terminate_backend(%s, 5000)", [holder.info.backend_pid])
            stranger.execute("select pg_advisory_lock(%s)", [hands.target.lock_key("s1")])
            assert lost(hands) == lost(hands, stranger) == {"s1"}
    finally:
        hands.connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))
        hands.connection.execute(hands.plain(f"drop role {role}"))


def test_no_look_counts_a_lost_tree_as_live(hands: Hands) -> None:  # E4
    held, waits = hands.running("w1"), hands.send()
    lose(hands)
    crew = hands.run(diagnosis.crew(stale_ms=AGE))
    assert (crew.supervisors, crew.workers, crew.lost) == (0, 0, 1)
    waiting = hands.run(explanation.waiting(waits, stale_ms=AGE))
    assert waiting is not None
    assert (waiting.alive, waiting.knowing, waiting.lost) == (0, 0, 2)
    holding = hands.run(explanation.holding(held.id, stale_ms=AGE))
    assert holding is not None
    assert (holding.session_lost, holding.observers) == (True, 0)
    trees = hands.run(diagnosis.silent_trees(silent_ms=AGE, stale_ms=AGE))
    assert (trees.known, trees.silent, trees.living, len(trees.lost), trees.held_by_lost) == (1, 0, 0, 1, 1)
    assert hands.run(diagnosis.unswept(RULES, margin_ms=0, stale_ms=AGE)).abandoned == 1
    assert [each.served for each in hands.run(diagnosis.unserved(stale_ms=AGE))] == [False]
    assert hands.run(diagnosis.knowing(["work"], stale_ms=AGE)) == []
    assert [
        each.session_lost for each in hands.run(inspect.supervisors(stale_ms=AGE, ended_too=False, limit=9))
    ] == [True]
    listed = hands.run(inspect.workers(stale_ms=AGE, ended_too=False, limit=9))
    assert [each.session_lost for each in listed] == [True, True]
    hands.supervisor("s2", "w3")
    assert hands.run(diagnosis.unswept(RULES, margin_ms=0, stale_ms=AGE)).abandoned == 0
    holding = hands.run(explanation.holding(held.id, stale_ms=AGE))
    assert holding is not None
    assert (holding.session_lost, holding.observers) == (True, 1)
    crew = hands.run(diagnosis.crew(stale_ms=AGE))
    assert (crew.supervisors, crew.workers, crew.lost) == (1, 1, 1)
