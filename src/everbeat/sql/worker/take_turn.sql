-- Takes the turn of a cluster service for one interval; no row when somebody else has it.
insert into {schema}.turns as t (service, taken_until, taken_by)
values (%(service)s, statement_timestamp() + %(interval_ms)s * interval '1 millisecond', %(taken_by)s)
on conflict (service) do update
set taken_until = excluded.taken_until, taken_by = excluded.taken_by
where t.taken_until <= statement_timestamp() or t.taken_by = excluded.taken_by
returning service
