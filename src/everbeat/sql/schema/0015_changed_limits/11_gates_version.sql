-- The version of the limit by which the lines that wait for this gate were last judged.
alter table {schema}.gates
    add column version bigint not null default 0
