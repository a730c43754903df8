"""Task functions that commit in a session of SQLAlchemy. No task process imports them, because this import takes longer than its start."""

from __future__ import annotations

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from everbeat.domain.task.context import Context
from tests.worker.sample_tasks import task


@task()
def commit_joined_session(ctx: Context, url: str, schema: str) -> None:
    """Use a session whose commit() leaves the transaction to the outer connection."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool)
    with (
        engine.connect() as connection,
        connection.begin(),
        Session(connection, join_transaction_mode="rollback_only") as session,
        ctx.commit(session),
    ):
        session.execute(text(f"insert into \"{schema}\".user_rows values ('joined')"))


@task()
def end_inside(ctx: Context, url: str, schema: str, how: str) -> None:
    """End the transaction of the block by hand."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool)
    with Session(engine) as session, ctx.commit(session):
        session.execute(text(f"insert into \"{schema}\".user_rows values ('inside')"))
        getattr(session, how)()
