"""A run's additions to its schema: a ledger for user code, and triggers that record when deaths and recoveries were written."""

from __future__ import annotations

from typing import Any, Final

from psycopg import Connection, sql

# A run shifts the server's clock, but /proc/uptime follows the machine's clock.
_WITNESS: Final = """
create table {schema}.ledger (task_id uuid not null, claim_id uuid not null);
create table {schema}.witness (seq bigserial primary key, what text not null, subject text not null, at double precision not null);
create function {schema}.witness() returns trigger language plpgsql as $$
begin
    insert into {schema}.witness (what, subject, at)
    values (tg_argv[0], to_jsonb(new) ->> tg_argv[1], split_part(pg_read_file('/proc/uptime'), ' ', 1)::double precision);
    return null;
end $$;
create trigger witness after insert on {schema}.recoveries for each row execute function {schema}.witness('recovery', 'id');
create trigger witness after insert on {schema}.beats for each row execute function {schema}.witness('beat', 'supervisor_id');
create trigger witness after update on {schema}.supervisors for each row
    when (old.ended_at is null and new.ended_at is not null) execute function {schema}.witness('end', 'id');
"""


def install_witness(connection: Connection[Any], schema: str) -> None:
    """Record every recovery, heartbeat and end of a supervisor from now on, with times from a clock that no fault shifts."""
    connection.execute(sql.SQL(_WITNESS).format(schema=sql.Identifier(schema)))
