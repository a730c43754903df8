-- An edge: the child waits for the parent. The edge becomes MET or UNMET after the parent has ended.
create table {schema}.edges (
    workflow_id  uuid not null,
    parent       integer not null,
    child        integer not null,
    number       smallint not null default 0,
    joins        boolean not null default false,
    tolerates    boolean not null default false,
    path         text[],
    expects      boolean,
    state        text not null default 'OPEN'
        constraint edges_state check (state in ('OPEN', 'MET', 'UNMET')),
    primary key (workflow_id, parent, child, number)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000)
