-- A workflow: a graph of nodes. At most one live workflow per name has a given key. A child workflow refers to the node that it represents.
create table {schema}.workflows (
    id                   uuid primary key,
    name                 text not null,
    key                  text,
    state                text not null default 'RUNNING'
        constraint workflows_state check (state in ('RUNNING', 'PAUSED', 'CANCELLING', 'COMPLETED', 'FAILED', 'CANCELLED')),
    on_error             text not null
        constraint workflows_on_error check (on_error in ('fail', 'pause', 'continue')),
    success              json,
    output               integer,
    node_count           integer not null,
    input                json,
    parent_id            uuid,
    parent_node          integer,
    sent_at              timestamptz not null default statement_timestamp(),
    paused_at            timestamptz,
    cancel_requested_at  timestamptz,
    retry_call           uuid,
    ended_at             timestamptz,
    result               json,
    error                json
) with (fillfactor = 70)
