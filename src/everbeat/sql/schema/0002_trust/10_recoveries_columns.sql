-- The charge of a recovery (crash, loss or none), whether the task became a suspect, and the reply of a hook.
alter table {schema}.recoveries
    add column charge text,
    add column suspect boolean not null default false,
    add column hook text
