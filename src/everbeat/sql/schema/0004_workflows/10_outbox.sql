-- What has happened to workflows and nobody has acted on yet. A node: it, or its task, has ended. -1: some nodes are READY. Null: look
-- at all of it. The same may stand here twice.
create table {schema}.outbox (
    id           bigint generated always as identity primary key,
    workflow_id  uuid not null,
    node         integer,
    at           timestamptz not null default statement_timestamp()
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000)
