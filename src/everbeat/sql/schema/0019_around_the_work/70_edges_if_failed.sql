-- With `if_failed`, an edge is met if the parent FAILED, EXPIRED or was CANCELLED, and in no other case. Code of an older version does not know it,
-- and would treat such an edge like any other.
alter table {schema}.edges add column if_failed boolean not null default false
