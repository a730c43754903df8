"""A role with rights on the tables alone claims tasks of lines, as it claims all others."""

from __future__ import annotations

from uuid import uuid4

import psycopg
from psycopg import sql

from everbeat.store import claims, lines
from tests.store.conftest import StoreHarness


def test_a_worker_whose_role_has_rights_on_tables_only_claims_tasks_of_lines(db: StoreHarness) -> None:
    role = f"role_{uuid4().hex[:8]}"
    names = {"schema": sql.Identifier(db.target.schema), "role": sql.Identifier(role)}
    sent = db.send(serial="key:a")
    apply = lines.apply_changes(readers=["work"], queues=None, channel=None)
    claim = claims.claim(
        worker_id="w1",
        claim_call=uuid4(),
        names=["work"],
        limit=1,
        queues=None,
        queue_priorities={},
        starts=1,
    )
    for text in (
        "create role {role}",
        "grant usage on schema {schema} to {role}",
        "grant all on all tables in schema {schema} to {role}",
        "grant usage on sequence {schema}.audit_seq_seq to {role}",  # of the audit, which only tests install
    ):
        db.connection.execute(sql.SQL(text).format(**names))
    try:
        with psycopg.connect(db.target.url, autocommit=True) as worker:
            worker.execute(sql.SQL("set role {role}").format(**names))
            for _ in range(2):  # the second call moves the floor
                worker.execute(db.text(apply.name), apply.parameters)
            found = worker.execute(db.text(claim.name), claim.parameters).fetchall()
        assert [row[0] for row in found] == [sent]
    finally:
        db.connection.execute(sql.SQL("drop owned by {role}").format(**names))
        db.connection.execute(sql.SQL("drop role {role}").format(**names))
