-- What a recovery charged (crash, loss or nothing), whether the task became a suspect, and what a hook answered.
alter table {schema}.recoveries
    add column charge text,
    add column suspect boolean not null default false,
    add column hook text
