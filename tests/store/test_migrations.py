"""Migrations run forward only, in one process while others wait, and give a clear error if code and schema do not fit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.errors import DatabaseError, SchemaForbidden, SchemaFromTheFuture, SchemaMissing, SchemaOutdated
from everbeat.store import claims, leases, migrating, migrations
from everbeat.store.database import Database
from everbeat.store.target import Target
from tests.variants import every_nth_quick


@pytest.fixture
def target(database_url: str, schema: str) -> Target:
    return Target.parse(database_url, schema=schema)


def test_an_empty_database_is_migrated_once(target: Target) -> None:
    with target.connect("everbeat test") as connection:
        before = migrations.status(connection, target)
        assert (before.applied, before.pending) == ((), before.known)
        with pytest.raises(SchemaMissing, match="everbeat migrate"):
            migrations.require_fit(before, target)
        assert migrating.migrate(connection, target) == before.known
        assert migrating.migrate(connection, target) == ()
        migrations.require_fit(migrations.status(connection, target), target)


def test_one_process_migrates_while_others_wait(target: Target) -> None:
    applied: list[tuple[int, ...]] = []
    together = threading.Barrier(6)

    def migrate() -> None:
        with target.connect("everbeat test") as connection:
            together.wait(timeout=30)
            applied.append(migrating.migrate(connection, target))

    threads = [threading.Thread(target=migrate) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    known = tuple(one.version for one in migrations.known_migrations())
    assert sorted(applied, key=len) == [(), (), (), (), (), known]


def test_a_failed_migration_leaves_nothing_behind(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (*migrations.known_migrations(), migrations.Migration(9_000, "broken", ("task/claim_tasks",)))
    monkeypatch.setattr(migrations, "known_migrations", lambda: broken)
    with target.connect("everbeat test") as connection:
        with pytest.raises(DatabaseError, match="syntax error"):
            migrating.migrate(connection, target)
        assert migrations.status(connection, target).applied == ()


@pytest.mark.parametrize(
    "verb",
    [
        migrating.migrate,
        lambda connection, target: migrations.require_fit(migrations.status(connection, target), target),
    ],
)
def test_a_schema_of_a_later_version_is_rejected(target: Target, verb: Callable[..., object]) -> None:
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        connection.execute(
            sql.SQL("insert into {}.schema_versions (version, name) values (9999, 'later')").format(
                sql.Identifier(target.schema)
            )
        )
        with pytest.raises(SchemaFromTheFuture, match="9999"):
            verb(connection, target)


def test_an_older_schema_is_rejected_until_it_is_migrated(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        newer = (*migrations.known_migrations(), migrations.Migration(9_000, "later", ()))
        monkeypatch.setattr(migrations, "known_migrations", lambda: newer)
        with pytest.raises(SchemaOutdated, match="9000"):
            migrations.require_fit(migrations.status(connection, target), target)
        assert migrating.migrate(connection, target) == (9_000,)


def test_the_printed_script_creates_the_same_schema(target: Target, database_url: str) -> None:
    with target.connect("everbeat test") as connection:
        connection.execute(migrations.script(target.schema).encode())
        assert migrations.status(connection, target).pending == ()
        assert migrating.migrate(connection, target) == ()


def test_a_role_that_owns_only_its_schema_can_migrate(target: Target, database_url: str) -> None:  # B15
    role = f"role_{target.schema}"
    with target.connect("everbeat test") as admin:
        admin.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
        try:
            theirs = Target.parse(
                psycopg.conninfo.make_conninfo(database_url, user=role), schema=target.schema
            )
            with (
                theirs.connect("everbeat test") as connection,
                pytest.raises(SchemaForbidden, match="authorization"),
            ):
                migrating.migrate(connection, theirs)
            admin.execute(
                sql.SQL("create schema {} authorization {}").format(
                    sql.Identifier(target.schema), sql.Identifier(role)
                )
            )
            with theirs.connect("everbeat test") as connection:
                assert migrating.migrate(connection, theirs) != ()
        finally:
            admin.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(role)))
            admin.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


@pytest.mark.parametrize(
    "version", every_nth_quick(3, [one.version for one in migrations.known_migrations()][:-1][::-1])
)
def test_tasks_of_an_earlier_version_are_claimed_and_settled_after_the_migration(
    target: Target, version: int
) -> None:
    """One task waited and one was running at the migration: the first is claimed, the second settled."""
    schema = sql.Identifier(target.schema)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target, to=version)
        connection.execute(
            sql.SQL(
                "insert into {}.supervisors (id, hostname, pid, lock_key, session_name) values ('s1', 'host', 1, 1, 's1')"
            ).format(schema)
        )
        connection.execute(
            sql.SQL(
                "insert into {}.workers (id, supervisor_id, hostname, pid) values ('w1', 's1', 'host', 2)"
            ).format(schema)
        )
        waiting, running, claim = uuid4(), uuid4(), uuid4()
        connection.execute(
            sql.SQL(
                "insert into {}.tasks (id, name, queue, args) values (%s, 'work', 'default', '{{}}')"
            ).format(schema),
            [waiting],
        )
        connection.execute(
            sql.SQL(
                "insert into {}.tasks (id, name, queue, args, state, claim_id, fence, claimed_at, started_at, attempt,"
                " claimed_by_worker_id) values (%s, 'work', 'default', '{{}}', 'RUNNING', %s, 1, now(), now(), 1, 'w1')"
            ).format(schema),
            [running, claim],
        )
        assert migrating.migrate(connection, target) == tuple(
            one.version for one in migrations.known_migrations() if one.version > version
        )
    database = Database(target)
    try:
        taken = database.run(
            claims.claim(
                worker_id="w1", claim_call=uuid4(), names=["work"], limit=9, queues=None, queue_priorities={}
            )
        )
        assert [one.id for one in taken] == [waiting]
        (lease,) = [one for one in database.run(leases.leases_of_worker("w1", limit=9)) if one.id == running]
        assert lease.claim_id == claim
        settlement = leases.Settlement(id=running, claim_id=claim, outcome="COMPLETED", result=b"1")
        assert database.run(leases.settle([settlement], channel=target.channel)) == {claim: "COMPLETED"}
    finally:
        database.close()


def test_an_index_for_the_partitions_to_come_is_not_an_unfinished_build(target: Target) -> None:
    """PostgreSQL marks it as invalid, like an index whose build did not finish."""
    history = sql.Identifier(target.schema, "history")
    part = sql.Identifier(target.schema, "history_of_test")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        for text in (
            "create table {1} partition of {0} for values from ('2020-01-01') to ('2020-01-02')",
            "create index history_by_test on only {0} (sent_at)",
        ):
            connection.execute(sql.SQL(text).format(history, part))
        marked = "select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid where not i.indisvalid and c.relname = 'history_by_test'"
        assert connection.execute(marked).fetchall() == [("history_by_test",)]
        assert migrating.unfinished(connection, target).invalid_indexes == ()
