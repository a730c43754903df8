-- The kind 'all' pauses every task function and every queue.
alter table {schema}.pauses
    drop constraint pauses_kind,
    add constraint pauses_kind check (kind in ('task', 'queue', 'all'))
