-- With `if_failed`, an edge is met if the parent FAILED, EXPIRED or was CANCELLED, and in no other case.
alter table {schema}.edges add column if_failed boolean not null default false
