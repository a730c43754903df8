-- A node of a graph. task_id is the node's current task or child workflow. error is an error that no task reports.
create table {schema}.nodes (
    workflow_id   uuid not null,
    number        integer not null,
    name          text not null,
    kind          text not null
        constraint nodes_kind check (kind in ('task', 'workflow', 'map')),
    state         text not null
        constraint nodes_state check (
            state in ('PENDING', 'READY', 'ENQUEUED', 'COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED', 'SKIPPED')),
    iteration     integer not null default 0,
    task_id       uuid,
    member_of     integer,
    first_member  integer,
    members       integer,
    quorum        integer,
    task          text,
    queue         text,
    priority      smallint,
    options       json,
    args          json,
    template      json,
    items         json,
    graph         json,
    enqueued_at   timestamptz,
    ended_at      timestamptz,
    error         json,
    primary key (workflow_id, number)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000)
