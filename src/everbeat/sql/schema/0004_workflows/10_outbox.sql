-- Unprocessed events of workflows. With a node number: the node, or its task, has ended. With -1: some nodes are READY. With null: the
-- workflow must be checked as a whole. An event can occur twice.
create table {schema}.outbox (
    id           bigint generated always as identity primary key,
    workflow_id  uuid not null,
    node         integer,
    at           timestamptz not null default statement_timestamp()
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000)
